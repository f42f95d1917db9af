"""Other machines for the real ComfyUI: a pool whose truth is given by a test, a replayed integrated GPU, a large
model of ComfyUI's.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import comfy.model_management
import comfyui_version
import torch
from aiohttp import web
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from server import PromptServer

from .probe import module_of, registry

MACHINES = Path(__file__).resolve().parents[1] / "service" / "memory" / "machines"


@PromptServer.instance.routes.post("/onedesk_tests/available")
async def available(request: web.Request) -> web.Response:
    """Let our pool believe that the body's `bytes` are available above the floor; null for what there really is."""
    nbytes = (await request.json())["bytes"]
    pool = registry().pool("cpu")
    truth = module_of("service.memory.truth")

    def fixed() -> Any:
        free = nbytes + pool.budget.floor
        return dataclasses.replace(truth.read_truth("cpu"), available=free, host_available=free)

    pool.read_truth = truth.read_truth if nbytes is None else fixed
    return web.json_response({"floor": pool.budget.floor, "minimum": comfy.model_management.minimum_inference_memory()})


@PromptServer.instance.routes.post("/onedesk_tests/correction")
async def correction(request: web.Request) -> web.Response:
    """Correct the real comfy.model_management for a replayed machine, ask it, undo it; the body says what is special.

    machine: a folder of MACHINES; integrated; version; foreign: another pack's function stands there; parameters:
    another signature.
    """
    asked = {"machine": "spark", "integrated": True, "version": comfyui_version.__version__, **await request.json()}
    manager, truth = comfy.model_management, module_of("service.memory.truth")
    ours = manager.get_free_memory
    roots = {"proc": MACHINES / asked["machine"] / "proc", "cgroup": MACHINES / asked["machine"] / "cgroup"}

    def probe(device: str) -> Any:
        return truth.DeviceFigures(asked["integrated"], 3 << 30, 120 << 30, 5 << 30, 4 << 30)

    def another(device: object = None) -> int:
        return 1

    if asked.get("foreign"):
        manager.get_free_memory = lambda dev=None, torch_free_too=False: 7
    if asked.get("parameters"):
        another.__module__ = manager.__name__
        manager.get_free_memory = another
    before = manager.get_free_memory
    change = module_of("nodes.correction").FreeMemoryCorrection(manager, asked["version"], probe=probe, **roots)
    try:
        applied = change.apply("cuda:0")
        figures: dict[str, Any] = {"applied": applied, "replaced": manager.get_free_memory is not before}
        if applied:
            place = torch.device("cuda", 0)
            figures |= {
                "free": manager.get_free_memory(place),
                "both": manager.get_free_memory(place, torch_free_too=True),
            }
            figures["default is cpu"] = [len(manager.get_free_memory(None, True)), manager.get_free_memory() > 0]
            again = module_of("nodes.correction").FreeMemoryCorrection(manager, asked["version"], probe=probe, **roots)
            figures["again"] = again.apply("cuda:0")
            again.undo()
        else:
            change.undo()
        figures["restored"] = manager.get_free_memory is before
        figures["truth"] = truth.read_truth("cuda:0", probe=probe, **roots).available
    finally:
        manager.get_free_memory = ours
    return web.json_response(figures)


class Large(torch.nn.Module):
    """An image model of ComfyUI's, but for its bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(nbytes // 4), requires_grad=False)
        self.device = torch.device("cpu")


@PromptServer.instance.routes.get("/onedesk_tests/large")
async def large(_: web.Request) -> web.Response:
    """Bytes of Large models that are still alive, whether ComfyUI lists them or not."""
    return web.json_response({"alive": sum(m.weight.nbytes for m in gc.get_objects() if isinstance(m, Large))})


class TestLargeModel(io.ComfyNode):
    """Loads a model of so many bytes as ComfyUI's loaders do."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Int.Input("bytes", min=4, max=2**40)]
        return io.Schema(node_id="TestLargeModel", category="test", inputs=inputs, outputs=[io.Model.Output()])

    @classmethod
    def execute(cls, bytes: int) -> io.NodeOutput:
        cpu = torch.device("cpu")
        patcher = ModelPatcher(Large(bytes), load_device=cpu, offload_device=cpu)
        comfy.model_management.load_models_gpu([patcher])
        return io.NodeOutput(patcher)


class TestUseModel(io.ComfyNode):
    """Needs a model until it has run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model"), io.AnyType.Input("value", optional=True)]
        return io.Schema(
            node_id="TestUseModel", category="test", is_output_node=True, inputs=inputs, outputs=[io.String.Output()]
        )

    @classmethod
    def execute(cls, model: ModelPatcher, value: object = None) -> io.NodeOutput:
        name = type(model.model).__name__
        return io.NodeOutput(name, ui={"text": [name]})


class TestNeighbour(io.ComfyNode):
    """Asks ComfyUI, as our pool does, what it could free, then to free so many bytes; shows both, and whether a
    thread beside it may.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Int.Input("bytes", min=1, max=2**40), io.Int.Input("turn")]
        return io.Schema(node_id="TestNeighbour", category="test", is_output_node=True, inputs=inputs, outputs=[])

    @classmethod
    async def execute(cls, bytes: int, turn: int) -> io.NodeOutput:
        pool = module_of("nodes.bridge").pool()
        (neighbour,) = pool.arbiter.neighbours
        figures = {"could": neighbour.could_free(), "room": pool.room().neighbours}
        with ThreadPoolExecutor(1) as beside:
            figures["beside"] = beside.submit(neighbour.free, bytes).result(timeout=30)
        figures["still"] = neighbour.could_free()
        figures |= {"freed": neighbour.free(bytes), "left": neighbour.could_free()}
        return io.NodeOutput(ui={"text": [json.dumps(figures)]})


NODES = (TestLargeModel, TestUseModel, TestNeighbour)
