"""With --cpu, where ComfyUI never evicts: our models give way before its nodes run, and its models give way to ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from comfyui import Comfy
from node_graphs import Graph, free, held, load, node, prompt, show, shown, writing

MODEL = "tiny-writer"
GIB = 1 << 30
LARGE = 64 << 20
# Tokens whose KV is more than 1 MiB: the pool does not look at the machine for less.
CONTEXT = 4096


@pytest.fixture
def machine(comfyui: Comfy) -> Iterator[Machine]:
    """Says how much is available; what there really is afterwards."""
    free(comfyui)
    yield Machine(comfyui)
    comfyui.client.ask("/onedesk_tests/available", {"bytes": None})


class Machine:
    def __init__(self, comfyui: Comfy) -> None:
        self._comfyui = comfyui

    def offers(self, nbytes: int) -> int:
        """Let so many bytes be available above the floor; returns what ComfyUI wants free while it computes."""
        return int(self._comfyui.client.ask("/onedesk_tests/available", {"bytes": nbytes})["minimum"])


def files(comfyui: Comfy) -> int:
    return (comfyui.models / "diffusion_models" / "tiny_painter_16.safetensors").stat().st_size


def loading() -> Graph:
    """ComfyUI loads an image model, and a node behind it sees what memory holds then."""
    loader = node("UNETLoader", unet_name="tiny_painter_16.safetensors", weight_dtype="default")
    return {"unet": loader, "seen": node("TestMemory", value=["unet", 0])}


def memory(comfyui: Comfy, graph: Graph) -> dict[str, Any]:
    return json.loads(shown(comfyui.run(graph), "seen"))


def kept(comfyui: Comfy, seed: int, **choice: Any) -> None:
    """A model that stays in memory after it has written."""
    graph = writing("kept", seed=seed)
    graph["load"]["inputs"] |= choice
    assert comfyui.run(graph).ok
    assert held(comfyui, MODEL) > 0


def test_an_idle_model_gives_way_before_comfyui_loads(comfyui: Comfy, machine: Machine):
    kept(comfyui, 1)
    before = memory(comfyui, {"seen": node("TestMemory", value="nothing")})["evictions"]
    minimum = machine.offers(100 * GIB)
    machine.offers(files(comfyui) + minimum - 1)
    seen = memory(comfyui, loading())
    assert seen["ours"] == 0
    assert seen["evictions"] == before + 1
    assert sum(item["measured"] for item in seen["given"]) > 0


def test_it_stays_when_everything_fits(comfyui: Comfy, machine: Machine):
    minimum = machine.offers(100 * GIB)
    kept(comfyui, 2)
    machine.offers(files(comfyui) + minimum)
    assert memory(comfyui, loading())["ours"] == held(comfyui, MODEL) > 0


def test_a_computing_node_needs_comfyuis_minimum(comfyui: Comfy, machine: Machine):
    minimum = machine.offers(100 * GIB)
    kept(comfyui, 3)
    use = {"model": node("TestLargeModel", bytes=1024), "use": node("TestUseModel", model=["model", 0])}
    machine.offers(minimum)
    assert comfyui.run(use).ok
    assert held(comfyui, MODEL) > 0
    machine.offers(minimum - 1)
    use["model"]["inputs"]["bytes"] = 2048
    assert comfyui.run(use).ok
    assert held(comfyui, MODEL) == 0


def test_nodes_that_need_no_model_take_nothing(comfyui: Comfy, machine: Machine):
    kept(comfyui, 4)
    machine.offers(1)
    assert comfyui.run({"text": node("PreviewAny", source="words ending in painter.safetensors")}).ok
    assert held(comfyui, MODEL) > 0


def test_a_pinned_model_stays(comfyui: Comfy, machine: Machine):
    kept(comfyui, 5, policy="pinned")
    machine.offers(1)
    assert memory(comfyui, loading())["ours"] == held(comfyui, MODEL) > 0
    comfyui.free()
    assert comfyui.run({"after": node("PreviewAny", source="pinned")}).ok
    assert held(comfyui, MODEL) > 0
    graph = {"load": load(policy="stay"), "release": node("OnedeskRelease", value="x", model=["load", 0])}
    assert comfyui.run(graph).ok
    assert held(comfyui, MODEL) == 0


def test_a_text_node_runs_first_and_gives_way_once(comfyui: Comfy, machine: Machine):
    free(comfyui)
    graph = writing("words for a picture", seed=6)
    graph |= {"later": prompt("", history=["write", 2]), "later shown": show("later")}
    graph |= loading()
    machine.offers(100 * GIB)
    outcome = comfyui.run(graph)
    assert outcome.ok
    assert "load " in shown(outcome, "stats")
    machine.offers(files(comfyui))
    graph["write"]["inputs"]["seed"] = 7
    again = comfyui.run(graph)
    # The image model is answered from the cache: nothing is loaded, so nobody has to go.
    assert "unet" in again.cached()
    assert "load " not in shown(again, "stats")
    assert held(comfyui, MODEL) > 0


def alive(comfyui: Comfy) -> int:
    """Bytes of large image models that are in memory."""
    return comfyui.client.ask("/onedesk_tests/large")["alive"]


def neighbour(comfyui: Comfy, nbytes: int, turn: int) -> dict[str, Any]:
    return json.loads(shown(comfyui.run({"ask": node("TestNeighbour", bytes=nbytes, turn=turn)}), "ask"))


def test_models_of_earlier_workflows_are_freed(comfyui: Comfy):
    free(comfyui)
    use = {"model": node("TestLargeModel", bytes=LARGE), "use": node("TestUseModel", model=["model", 0])}
    assert comfyui.run(use).ok
    assert alive(comfyui) == LARGE
    # More than there can be available: everything that may go must go, whatever others do on this machine.
    figures = neighbour(comfyui, 1 << 40, 1)
    assert figures["could"] >= LARGE
    assert figures["room"] == figures["could"]
    assert figures["beside"] == 0  # a thread beside the one that runs workflows may not touch ComfyUI's list
    assert figures["still"] == figures["could"]
    assert figures["left"] <= figures["could"] - LARGE
    assert alive(comfyui) == 0


def test_comfyui_is_asked_before_a_language_model_is_refused(comfyui: Comfy, machine: Machine):
    graph = {"model": node("TestLargeModel", bytes=LARGE), "use": node("TestUseModel", model=["model", 0])} | writing(
        ["use", 0], seed=8, context=CONTEXT
    )
    machine.offers(1 << 10)
    outcome = comfyui.run(graph)
    # This machine never offers more, so the answer is refused, after ComfyUI let go even what the workflow has used.
    assert outcome.end == "execution_error"
    assert outcome.last["exception_type"].endswith("MemoryFull")
    assert "use" in outcome.executed()
    assert alive(comfyui) == 0
    assert held(comfyui, MODEL) == 0
    machine.offers(100 * GIB)
    assert comfyui.run(graph).ok
