"""Reading a running workflow: which text nodes still need a model."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from typing import Any

from onedesk.nodes.phase import Tracker, ancestors, may_use, signature, still_to_run
from onedesk.nodes.values import Conversation

Nodes = dict[str, dict[str, Any]]


class Running:
    """A workflow in API format, as ComfyUI hands it to a node."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def all_node_ids(self) -> Collection[str]:
        return self.nodes.keys()

    def get_node(self, node_id: str, /) -> Mapping[str, Any]:
        return self.nodes[node_id]


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def two_writers(**changes: dict[str, Any]) -> Running:
    nodes = {
        "load": node("OnedeskLoadModel", model="m", context=4096),
        "a": node("OnedeskGenerate", model=["load", 0], seed=1),
        "b": node("OnedeskGenerate", model=["load", 0], seed=2),
        "end": node("Save", x=["a", 0], y=["b", 0]),
    }
    return Running(nodes | changes)


def is_output(class_type: str) -> bool:
    return class_type == "Save"


def remaining(graph: Running, *finished: str, cached: Collection[str] = (), model: str = "m") -> set[str]:
    return still_to_run(graph, model, finished, is_output, lambda node_id, _: node_id in cached)


def test_those_that_have_not_run_remain():
    assert remaining(two_writers()) == {"a", "b"}
    assert remaining(two_writers(), "a") == {"b"}
    assert remaining(two_writers(), "a", "b") == set()
    assert remaining(two_writers(), "a", cached=["b"]) == set()


def test_only_those_that_lead_to_an_output_remain():
    assert remaining(two_writers(end=node("Save", x=["a", 0]))) == {"a"}
    assert remaining(two_writers(end=node("Preview", x=["a", 0]))) == set()


def test_other_models_are_ignored_computed_choices_count():
    other = {"load2": node("OnedeskLoadModel", model="other"), "b": node("OnedeskTextEncoder", model=["load2", 0])}
    assert remaining(two_writers(**other)) == {"a"}
    assert remaining(two_writers(**other), model="other") == {"b"}
    computed = other | {"load2": node("OnedeskLoadModel", model=["names", 0]), "names": node("Names")}
    assert remaining(two_writers(**computed)) == {"a", "b"}


def test_a_model_that_passes_through_other_nodes_is_found():
    through = two_writers(
        reroute=node("Reroute", x=["load", 0]), b=node("OnedeskGenerate", model=["reroute", 0], seed=2)
    )
    assert may_use(through, "b", "m")
    assert not may_use(through, "b", "other")
    assert not may_use(two_writers(b=node("OnedeskGenerate", model=["absent", 0])), "b", "m")


def test_ancestors_end_in_circles_too():
    graph = Running({"x": node("X", y=["y", 0]), "y": node("Y", x=["x", 0], z=["absent", 1])})
    assert ancestors(graph, "x") == {"x", "y"}
    assert signature(graph, "x") is None


def test_a_signature_covers_all_ancestors_and_fingerprints():
    base = signature(two_writers(), "a")
    assert base == signature(two_writers(), "a")
    assert base == signature(two_writers(b=node("OnedeskGenerate", model=["load", 0], seed=9)), "a")
    assert base != signature(two_writers(a=node("OnedeskGenerate", model=["load", 0], seed=9)), "a")
    assert base != signature(two_writers(load=node("OnedeskLoadModel", model="m", context=1)), "a")
    assert base != signature(
        two_writers(load=node("OnedeskLoadModel", model="m", context=4096) | {"is_changed": ["t1"]}), "a"
    )
    assert (
        signature(two_writers(load=node("OnedeskLoadModel", model="m") | {"is_changed": [float("nan")]}), "a") is None
    )


def test_a_link_is_not_taken_for_a_list_of_the_same_look():
    linked = two_writers(a=node("OnedeskGenerate", model=["load", 0], seed=["a1", 0]), a1=node("Int"))
    assert signature(linked, "a") != signature(
        two_writers(a=node("OnedeskGenerate", model=["load", 0], seed=["x1", 0])), "a"
    )


def test_the_tracker_knows_answers_that_are_alive():
    tracker, answer = Tracker(), Conversation(())
    first = two_writers()
    tracker.begin(first)
    tracker.finish(first, "b", answer)
    assert tracker.needed(first, "m", is_output)
    second = two_writers(a=node("OnedeskGenerate", model=["load", 0], seed=7))
    tracker.begin(second)
    assert tracker.needed(second, "m", is_output)  # "a" runs
    tracker.finish(second, "a", Conversation(()))
    assert not tracker.needed(second, "m", is_output)  # "b" is kept by ComfyUI's cache, here by `answer`
    del answer
    gc.collect()
    assert tracker.needed(second, "m", is_output)


def test_the_tracker_waits_only_until_the_workflow_fails():
    tracker, graph = Tracker(), two_writers()
    tracker.begin(graph)
    tracker.begin(graph)
    tracker.finish(graph, "a", None)
    assert tracker.needed(graph, "m", is_output)
    tracker.finish(graph, "b", None)
    assert not tracker.needed(graph, "m", is_output)
    again = two_writers()
    tracker.begin(again)
    tracker.finish(again, "a", Conversation(()))
    assert tracker.needed(again, "m", is_output)
