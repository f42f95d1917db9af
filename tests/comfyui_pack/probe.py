"""What the tests want to know from inside the ComfyUI process, and nodes that make lists and look at random states."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import random
import sys
import time
from types import ModuleType
from typing import Any

import comfy.model_management
import numpy
import torch
from aiohttp import web
from comfy_api.latest import io
from server import PromptServer


def module_of(tail: str) -> Any:
    """A module of the pack that ComfyUI loaded, such as nodes.correction, which is not the one of an installed
    onedesk.
    """
    modules: dict[str, ModuleType] = dict(sys.modules)
    return next(
        module for name, module in modules.items() if "custom_nodes" in name and name.endswith(f"onedesk.{tail}")
    )


def registry() -> Any:
    """The registry of the pack that ComfyUI loaded."""
    return module_of("service.registry").REGISTRY


def handles() -> list[Any]:
    """Every model of the pack, in this process or in another."""
    return [*registry().models(), *registry().remotes()]


def random_states() -> str:
    """A digest of the process's global random states: Python's, numpy's, torch's."""
    states = (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return hashlib.sha256(pickle.dumps(states)).hexdigest()


def core_models() -> list[dict[str, Any]]:
    """ComfyUI's own list of loaded models, bytes."""
    return [
        {
            "name": type(loaded.model.model).__name__,
            "size": loaded.model_memory(),
            "loaded": loaded.model_loaded_memory(),
            "dynamic": loaded.model.is_dynamic(),
        }
        for loaded in comfy.model_management.current_loaded_models
        if loaded.model is not None
    ]


def memory() -> dict[str, Any]:
    """Who holds how many bytes at this moment, and what our models gave back when ComfyUI last took room from them."""
    models = registry().models()
    seen = [model.companion for model in models if model.companion is not None]
    figures = {
        "time": time.time(),
        "core": core_models(),
        "ours": sum(model.held_bytes() for model in models),
        "evictions": sum(patcher.evictions for patcher in seen),
        "given": [
            {"owner": item.owner, "asked": item.asked, "measured": item.measured, "seconds": item.seconds}
            for patcher in seen
            for item in patcher.given
        ],
    }
    device = comfy.model_management.get_torch_device()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        figures |= {
            "used": total - free,
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
    return figures


@PromptServer.instance.routes.get("/onedesk_tests/state")
async def state(_: web.Request) -> web.Response:
    models = registry().models()
    return web.json_response(
        {
            "models": [{"name": m.name, "loaded": m.loaded, "held": m.held_bytes(), "busy": m.busy} for m in handles()],
            "allocations": sum(pool.allocations for pool in {id(m.pool): m.pool for m in models}.values()),
            "used": sum(pool.used() for pool in {id(m.pool): m.pool for m in models}.values()),
            "comfyui": core_models(),
        }
    )


class TestList(io.ComfyNode):
    """A JSON list of texts as a list of outputs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.String.Input("texts", default="[]")]
        return io.Schema(
            node_id="TestList", category="test", inputs=inputs, outputs=[io.String.Output(is_output_list=True)]
        )

    @classmethod
    def execute(cls, texts: str) -> io.NodeOutput:
        return io.NodeOutput(json.loads(texts))


class TestRandomStates(io.ComfyNode):
    """Passes a value on and shows the digest of the random states at this point of the workflow."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.AnyType.Input("value"), io.Int.Input("turn", default=0)]
        return io.Schema(
            node_id="TestRandomStates",
            category="test",
            is_output_node=True,
            inputs=inputs,
            outputs=[io.AnyType.Output()],
        )

    @classmethod
    def execute(cls, value: object, turn: int) -> io.NodeOutput:
        return io.NodeOutput(value, ui={"text": [random_states()]})


class TestMemory(io.ComfyNode):
    """Passes a value on and shows who holds how many bytes at this point of the workflow, as JSON."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.AnyType.Input("value")]
        return io.Schema(
            node_id="TestMemory", category="test", is_output_node=True, inputs=inputs, outputs=[io.AnyType.Output()]
        )

    @classmethod
    def execute(cls, value: object) -> io.NodeOutput:
        return io.NodeOutput(value, ui={"text": [json.dumps(memory())]})


class TestFailure(io.ComfyNode):
    """Fails when it is reached."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestFailure", category="test", is_output_node=True, inputs=[io.AnyType.Input("value")], outputs=[]
        )

    @classmethod
    def execute(cls, value: object) -> io.NodeOutput:
        raise RuntimeError("this node always fails")


class TestRoom(io.ComfyNode):
    """Lets ComfyUI's memory manager free bytes as if none were free, as for a large image model, and shows what it did
    to our models.

    With `busy` it first waits until one of them works.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.AnyType.Input("value"),
            io.Int.Input("bytes", min=1, max=2**60),
            io.Boolean.Input("busy"),
            io.Int.Input("turn"),
        ]
        return io.Schema(node_id="TestRoom", category="test", is_output_node=True, inputs=inputs, outputs=[])

    @classmethod
    async def execute(cls, value: object, bytes: int, busy: bool, turn: int) -> io.NodeOutput:
        end = time.monotonic() + 30
        while busy and not any(model.busy for model in handles()) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        manager = comfy.model_management
        measured = manager.get_free_memory
        figures = {"busy": [model.name for model in handles() if model.busy], "before": cls.held()}
        manager.get_free_memory = lambda device=None, torch_free_too=False: (0, 0) if torch_free_too else 0
        try:
            manager.free_memory(bytes, torch.device("cpu"))
        finally:
            manager.get_free_memory = measured
        return io.NodeOutput(ui={"text": [json.dumps(figures | {"after": cls.held()})]})

    @staticmethod
    def held() -> int:
        return sum(model.held_bytes() for model in handles())
