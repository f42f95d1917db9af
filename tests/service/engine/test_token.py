"""The Python calls per token besides the network, counted: in a small model they are most of its time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import pytest
from kept_kernels import keep_kernels
from onedesk.service.api import OpenModel, open_model
from onedesk.service.core import Request, Sampling
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from tiny_families import write_family

TOKENS = 20
# Calls, those of C functions included: 333 were counted where it took 501 before.
MOST_CALLS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    folder = write_family(tmp_path_factory.mktemp("models") / "tiny", "qwen4_exp", seed=5)
    kernels = tmp_path_factory.mktemp("kernels")
    keep_kernels(kernels)
    opened = open_model(
        folder, pool=Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu")), context=128, kernel_cache=kernels
    )
    yield opened
    opened.close()


def calls_a_token(model: OpenModel) -> list[int]:
    """Calls between each token and the next."""
    seen, counted = 0, list[int]()

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    request = Request(ids=(5, 6, 7, 8, 9), sampling=Sampling(temperature=0.0), max_tokens=TOKENS, speculation=False)
    before = sys.getprofile()
    try:
        for event in model.generate(request):
            sys.setprofile(None)
            if event.token is not None:
                counted.append(seen)
            seen = 0
            sys.setprofile(count)
    finally:
        sys.setprofile(before)
    return counted[1:]


def test_a_token_of_the_largest_family_takes_few_calls(model: OpenModel) -> None:
    calls_a_token(model)  # compiled calls are recorded
    calls = sorted(calls_a_token(model))
    assert len(calls) >= TOKENS // 2
    assert calls[len(calls) // 2] <= MOST_CALLS
