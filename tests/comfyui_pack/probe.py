"""What the tests want to know from inside the ComfyUI process, and nodes that make lists and look at random states."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import sys
from types import ModuleType
from typing import Any

import comfy.model_management
import numpy
import torch
from aiohttp import web
from comfy_api.latest import io
from server import PromptServer


def registry() -> Any:
    """The registry of the pack that ComfyUI loaded, which is not the one of an installed onedesk."""
    modules: dict[str, ModuleType] = dict(sys.modules)
    return next(m.REGISTRY for name, m in modules.items() if "custom_nodes" in name and name.endswith("onedesk.service.registry"))


def random_states() -> str:
    """A digest of the process's global random states: Python's, numpy's, torch's."""
    states = (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return hashlib.sha256(pickle.dumps(states)).hexdigest()


@PromptServer.instance.routes.get("/onedesk_tests/state")
async def state(_: web.Request) -> web.Response:
    models = registry().models()
    return web.json_response(
        {
            "models": [{"name": m.name, "loaded": m.loaded, "held": m.held_bytes(), "busy": m.busy} for m in models],
            "allocations": sum(pool.allocations for pool in {id(m.pool): m.pool for m in models}.values()),
            "used": sum(pool.used() for pool in {id(m.pool): m.pool for m in models}.values()),
            "comfyui": [
                {"name": type(loaded.model.model).__name__, "size": loaded.model_memory(), "loaded": loaded.model_loaded_memory()}
                for loaded in comfy.model_management.current_loaded_models
                if loaded.model is not None
            ],
        }
    )


class TestList(io.ComfyNode):
    """A JSON list of texts as a list of outputs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.String.Input("texts", default="[]")]
        return io.Schema(node_id="TestList", category="test", inputs=inputs, outputs=[io.String.Output(is_output_list=True)])

    @classmethod
    def execute(cls, texts: str) -> io.NodeOutput:
        return io.NodeOutput(json.loads(texts))


class TestRandomStates(io.ComfyNode):
    """Passes a value on and shows the digest of the random states at this point of the workflow."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.AnyType.Input("value"), io.Int.Input("turn", default=0)]
        return io.Schema(node_id="TestRandomStates", category="test", is_output_node=True, inputs=inputs, outputs=[io.AnyType.Output()])

    @classmethod
    def execute(cls, value: object, turn: int) -> io.NodeOutput:
        return io.NodeOutput(value, ui={"text": [random_states()]})


class TestFailure(io.ComfyNode):
    """Fails when it is reached."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="TestFailure", category="test", is_output_node=True, inputs=[io.AnyType.Input("value")], outputs=[])

    @classmethod
    def execute(cls, value: object) -> io.NodeOutput:
        raise RuntimeError("this node always fails")
