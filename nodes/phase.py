"""Finds the text nodes of a running workflow that still need a model, so that the model gives way after the last of
them.

ComfyUI never runs a node that it answers from its cache, and does not report that to other nodes. A text node's answer
is alive only as long as ComfyUI keeps it. A node is answered from the cache if its answer is alive and its inputs (all
ancestors) are unchanged. A wrong prediction breaks nothing: too early costs a reload, and too late is handled at the
workflow's end.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Any, Protocol

LOADER = "OnedeskLoadModel"
TEXT_NODES = ("OnedeskGenerate", "OnedeskTextEncoder", "OnedeskDescribeImage")
MODEL_INPUT = "model"


class Graph(Protocol):
    """A running workflow; ComfyUI's DynamicPrompt is one."""

    def all_node_ids(self) -> Collection[str]: ...

    def get_node(self, node_id: str, /) -> Mapping[str, Any]: ...


def is_link(value: object) -> bool:
    """Whether an input's value is [node id, output index]."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def ancestors(graph: Graph, node_id: str) -> set[str]:
    """Every node that `node_id` depends on, itself included; links to absent nodes are ignored."""
    known = graph.all_node_ids()
    found: set[str] = set()
    waiting = [node_id]
    while waiting:
        current = waiting.pop()
        if current in found or current not in known:
            continue
        found.add(current)
        waiting += (value[0] for value in graph.get_node(current)["inputs"].values() if is_link(value))
    return found


def may_use(graph: Graph, node_id: str, model: str) -> bool:
    """Whether a text node's `model` input may come from a loader of `model`; a loader whose choice is computed
    counts as one.
    """
    source = graph.get_node(node_id)["inputs"].get(MODEL_INPUT)
    if not is_link(source):
        return False
    loaders = (
        graph.get_node(n)["inputs"] for n in ancestors(graph, source[0]) if graph.get_node(n)["class_type"] == LOADER
    )
    return any(is_link(inputs.get(MODEL_INPUT)) or inputs.get(MODEL_INPUT) == model for inputs in loaders)


def signature(graph: Graph, node_id: str) -> str | None:
    """A digest of a node, its fixed inputs, fingerprints and all its ancestors; None if ComfyUI never answers it from
    its cache.
    """
    nodes = {n: graph.get_node(n) for n in ancestors(graph, node_id)}
    order = TopologicalSorter(
        {n: {v[0] for v in node["inputs"].values() if is_link(v) and v[0] in nodes} for n, node in nodes.items()}
    )
    digests: dict[str, str] = {}
    try:
        for current in order.static_order():
            node = nodes[current]
            inputs = {k: [digests.get(v[0]), v[1]] if is_link(v) else {"fixed": v} for k, v in node["inputs"].items()}
            content = json.dumps(
                [node["class_type"], node.get("is_changed"), inputs], sort_keys=True, allow_nan=False, default=repr
            )
            digests[current] = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    except ValueError:  # NaN, ComfyUI's "always run again", or a cycle
        return None
    return digests[node_id]


def still_to_run(
    graph: Graph,
    model: str,
    finished: Collection[str],
    is_output: Callable[[str], bool],
    is_cached: Callable[[str, str], bool],
) -> set[str]:
    """Ids of the text nodes that may use `model`, lead to an output node, have not finished, and will not come from the
    cache.

    `is_output` is called with class names, `is_cached` with a node id and its signature.
    """
    return {
        node_id
        for node_id in _needed(graph, is_output)
        if graph.get_node(node_id)["class_type"] in TEXT_NODES
        and node_id not in finished
        and may_use(graph, node_id, model)
        and not _cached(graph, node_id, is_cached)
    }


def _needed(graph: Graph, is_output: Callable[[str], bool]) -> set[str]:
    def outputs() -> Iterator[str]:
        return (n for n in graph.all_node_ids() if is_output(graph.get_node(n)["class_type"]))

    return set().union(*(ancestors(graph, node_id) for node_id in outputs()))


def _cached(graph: Graph, node_id: str, is_cached: Callable[[str, str], bool]) -> bool:
    digest = signature(graph, node_id)
    return digest is not None and is_cached(node_id, digest)


class Tracker:
    """The state of one model's text nodes in the running workflow, and the earlier answers that ComfyUI still keeps.

    Used only by the thread that runs workflows.
    """

    def __init__(self) -> None:
        self.running = 0
        self.ending = False
        self._graph: weakref.ref[Graph] | None = None
        self._finished: set[str] = set()
        self._answers: weakref.WeakValueDictionary[tuple[str, str], Any] = weakref.WeakValueDictionary()

    def begin(self, graph: Graph) -> None:
        """A text node of the workflow `graph` starts to use the model."""
        if self._graph is None or self._graph() is not graph:
            self._graph = weakref.ref(graph)
            self._finished = set()
            self.ending = False
        self.running += 1

    def finish(self, graph: Graph, node_id: str, answer: object | None) -> None:
        """The node is done. `answer` is its return value, which ComfyUI keeps; None when it failed or was stopped: the
        workflow ends.
        """
        self.running -= 1
        self._finished.add(node_id)
        self.ending = self.ending or answer is None
        digest = signature(graph, node_id)
        if digest is not None and answer is not None:
            self._answers[node_id, digest] = answer

    def needed(self, graph: Graph, model: str, is_output: Callable[[str], bool]) -> bool:
        """Whether another text node of this workflow will use the model: one is running or pending."""
        if self.running or self.ending:
            return self.running > 0
        return bool(
            still_to_run(
                graph, model, self._finished, is_output, lambda node_id, digest: (node_id, digest) in self._answers
            )
        )
