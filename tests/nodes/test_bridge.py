"""ComfyUI's memory manager and our models, in the real ComfyUI: sizes, eviction as a whole, and never in the middle
of an answer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from comfyui import Comfy, Outcome
from node_graphs import Graph, free, held, node, prompt, sampling, show, shown, state, writing

MODEL = "tiny-writer"


def listed(comfyui: Comfy) -> list[dict[str, Any]]:
    """Our models in ComfyUI's list that hold bytes."""
    return [entry for entry in state(comfyui)["comfyui"] if entry["name"] == "OnedeskModel" and entry["loaded"]]


def room(outcome: Outcome) -> dict[str, Any]:
    return json.loads(shown(outcome, "room"))


def asked_for_room_while_writing(seed: int, **answer: Any) -> Graph:
    """A chain up to the prompt, so that nothing else is left to run once the answer has begun but a node that asks
    for room.
    """
    graph = writing(["options shown", 0], seed=seed, **answer)
    graph["load shown"] = show("load")
    graph["options"] = sampling(stop=["load shown", 0])
    graph["options shown"] = show("options")
    # ComfyUI prefers nodes that run beside others, such as the writer, to this one.
    graph["later"] = prompt("later", history=["prompt", 0])
    graph["room"] = node("TestRoom", value=["later", 0], bytes=1, busy=True, turn=seed)
    return graph


def test_a_model_is_listed_once_with_what_it_really_holds(comfyui: Comfy):
    free(comfyui)
    assert listed(comfyui) == []
    for seed in (1, 2):
        assert comfyui.run(writing("listed", seed=seed)).ok
        (entry,) = listed(comfyui)
        assert entry["loaded"] == entry["size"] == held(comfyui, MODEL) > 0


@pytest.mark.parametrize("wanted", [1, 1 << 40], ids=["a byte", "more than there is"])
def test_comfyui_evicts_a_model_and_it_reloads(comfyui: Comfy, wanted: int):
    graph = writing("evict me", seed=3, max_tokens=20)
    text = shown(comfyui.run(graph), "text")
    asking = {"room": node("TestRoom", value="nothing", bytes=wanted, busy=False, turn=wanted % 1000)}
    figures = room(comfyui.run(asking))
    assert figures["before"] > 0
    assert figures["after"] == 0
    assert held(comfyui, MODEL) == 0
    free(comfyui)
    assert shown(comfyui.run(graph), "text") == text


def test_a_running_answer_is_never_cut_for_room(comfyui: Comfy):
    graph = asked_for_room_while_writing(4, max_tokens=120)
    outcome = comfyui.run(graph)
    assert len(shown(outcome, "text")) == 120
    assert room(outcome)["busy"] == [MODEL]  # it was asked while the answer was written
    assert room(outcome)["after"] == 0


def test_stop_works_while_room_waits_for_an_answer(comfyui: Comfy):
    graph = asked_for_room_while_writing(5, max_tokens=900)
    run = comfyui.start(graph)
    run.wait_for("executing", node="room")
    run.interrupt()
    assert run.result().end == "execution_interrupted"
    assert comfyui.run(writing("after that", seed=6)).ok


@pytest.fixture
def boundless(comfyui: Comfy) -> Iterator[str]:
    """A model that allows a context far beyond any memory."""
    folder = comfyui.models / "llm" / "boundless"
    shutil.copytree(comfyui.models / "llm" / MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**31 - 1}))
    yield folder.name
    shutil.rmtree(folder)


def test_an_oversized_model_is_refused_before_loading(comfyui: Comfy, boundless: str):
    outcome = comfyui.run(writing("too much", model=boundless, context=2**31 - 1))
    assert outcome.end == "execution_error"
    assert outcome.last["exception_type"].endswith("MemoryFull")
    assert "boundless needs " in outcome.error
    assert "KV 1024 GiB" in outcome.error
    assert held(comfyui, boundless) == 0
    assert comfyui.run(writing("small again", model=boundless, context=256)).ok
