"""ComfyUI's reading of free memory on an integrated GPU, with its real comfy.model_management and a replayed
machine.
"""

from __future__ import annotations

from typing import Any

import pytest
from comfyui import Comfy

GIB = 1 << 30
# What torch's cache holds unused in the replay, and what the driver calls free there.
CACHED, DRIVER_FREE = GIB, 3 * GIB


def ask(comfyui: Comfy, **special: Any) -> dict[str, Any]:
    return comfyui.client.ask("/onedesk_tests/correction", special)


def test_the_figure_is_corrected_and_undo_restores_it(comfyui: Comfy):
    figures = ask(comfyui)
    assert figures["applied"]
    assert figures["replaced"]
    assert (
        figures["truth"] == 54525952 * 1024
    )  # MemAvailable of the replayed machine, where the driver calls 3 GiB free
    assert figures["free"] == figures["truth"] + CACHED
    assert figures["both"] == [figures["truth"] + CACHED, CACHED]
    assert figures["free"] > DRIVER_FREE
    assert figures["default is cpu"] == [2, True]
    assert figures["again"]  # a second load of the pack takes the first one's correction away before it makes its own
    assert figures["restored"]


@pytest.mark.parametrize(("machine", "available"), [("container_v2", 3 * GIB), ("spark_hugepages", 60 * GIB)])
def test_a_container_limit_and_huge_pages_are_respected(comfyui: Comfy, machine: str, available: int):
    figures = ask(comfyui, machine=machine)
    assert figures["truth"] == available
    assert figures["free"] == available + CACHED


@pytest.mark.parametrize(
    "special",
    [
        {"integrated": False},
        {"version": "0.29.9"},
        {"version": "0.39.0"},
        {"version": "1.0"},
        {"version": "nightly"},
        {"foreign": True},
        {"parameters": True},
    ],
    ids=str,
)
def test_nothing_is_touched_where_something_is_not_as_expected(comfyui: Comfy, special: dict[str, Any]):
    figures = ask(comfyui, **special)
    assert not figures["applied"]
    assert not figures["replaced"]
    assert figures["restored"]
