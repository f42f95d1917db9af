"""Evicts idle language models before ComfyUI's nodes run: with --cpu ComfyUI frees nothing before it loads or draws.

ComfyUI notifies cache providers, which any pack may register, of each node that it is about to run and cannot answer
from its cache. It does not notify them of nodes after one that always runs again; before those nothing is checked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from comfy_api.latest import Caching
from server import PromptServer

import nodes as comfy_nodes

from . import bridge
from .folders import model_file_bytes
from .show import returned

log = logging.getLogger(__name__)

# Link types that bring a model with which a node computes.
MODEL_TYPES = frozenset(("MODEL", "CLIP", "VAE", "CONTROL_NET", "CLIP_VISION", "UPSCALE_MODEL", "GUIDER"))


class RoomForComfyUI(Caching.CacheProvider):
    """Checks before each node of ComfyUI whether the files that it names, and its computation, fit in the available
    memory. Caches nothing.
    """

    def __init__(self) -> None:
        self._prompt_id = ""
        self._asked: set[str] = set()
        self._planning = True

    def on_prompt_start(self, prompt_id: str) -> None:
        self._prompt_id = prompt_id
        self._asked = set()
        self._planning = True

    def should_cache(self, context: Caching.CacheContext, value: Caching.CacheValue | None = None) -> bool:
        """True for lookups, false for outputs."""
        return value is None

    async def on_store(self, context: Caching.CacheContext, value: Caching.CacheValue) -> None:
        """Stores nothing."""

    async def on_lookup(self, context: Caching.CacheContext) -> None:
        """ComfyUI asks once for every node when it plans a workflow, then again for each node that it is about
        to run.
        """
        self._planning = self._planning and context.node_id not in self._asked
        self._asked.add(context.node_id)
        if self._planning:
            return
        nbytes = self._need(context)
        released = bridge.give_room(nbytes) if nbytes else ()
        if released:
            log.info("ComfyUI's node %s needs room; %s", context.node_id, returned(released))

    def _need(self, context: Caching.CacheContext) -> int:
        """Bytes that the node may need: the model files that it names, and the memory that ComfyUI wants free for
        computing.
        """
        files = sum(
            model_file_bytes(value) for value in self._inputs(context.node_id).values() if isinstance(value, str)
        )
        computes = files or MODEL_TYPES & _types(context.class_type)
        return files + bridge.inference_minimum() if computes else 0

    def _inputs(self, node_id: str) -> Mapping[str, Any]:
        """The node's inputs as they were queued; none for a node that was added while the workflow runs."""
        running, _ = PromptServer.instance.prompt_queue.get_current_queue_volatile()
        graph = next((item[2] for item in running if item[1] == self._prompt_id), {})
        return graph.get(node_id, {}).get("inputs", {})


def _types(class_type: str) -> set[str]:
    """The link types of a node's inputs."""
    known = comfy_nodes.NODE_CLASS_MAPPINGS  # pyright: ignore[reportAttributeAccessIssue] - ComfyUI's nodes.py, not our folder
    declared = known[class_type].INPUT_TYPES() if class_type in known else {}
    specs = [spec for part in ("required", "optional") for spec in declared.get(part, {}).values()]
    return {spec[0] for spec in specs if isinstance(spec, list | tuple) and spec and isinstance(spec[0], str)}
