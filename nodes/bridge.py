"""ComfyUI's view of our models, and our view of its memory. The only file that touches comfy.model_management.

Each open model is one patcher in ComfyUI's list of loaded models, with its real size in bytes. So ComfyUI evicts it
with its own code when it needs memory, and POST /free frees it. Before a model loads, ComfyUI is asked to free the
memory that it needs. With --cpu ComfyUI never evicts: there its models are a neighbour of our pool, and ours give way
before its nodes run.

Threads: ComfyUI's list has no lock. Only the thread that runs prompts touches it (node code between awaits, and
ComfyUI's own calls of a patcher). Models work in other threads, which never wait for that thread.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import time
import weakref

import comfy.memory_management as ram
import comfy.model_management as mm
import torch
from comfy.model_management import InterruptProcessingException
from comfy.model_patcher import ModelPatcher
from comfyui_version import __version__ as comfyui_version
from server import PromptServer

from ..service.api import Model, OpenModel, RemoteModel
from ..service.config import load_config
from ..service.errors import MemoryFull, OnedeskError, PeerError
from ..service.memory.budget import show
from ..service.memory.pool import Pool, Released
from ..service.memory.truth import Truth
from ..service.peers.tenancy import Tenancy
from ..service.registry import REGISTRY
from .correction import FreeMemoryCorrection
from .folders import model_roots, peer_settings
from .phase import Tracker
from .show import returned
from .values import HERE, SERVICE, ModelChoice

log = logging.getLogger(__name__)

# Seconds between two checks while waiting for a running generation.
LOOK = 0.02


def cancelled() -> bool:
    """Whether the user pressed Stop; the flag stays set."""
    return mm.processing_interrupted()


def interrupted() -> InterruptProcessingException:
    """The exception that ends the running prompt as stopped. Clears the flag, as ComfyUI expects."""
    mm.interrupt_current_processing(False)
    return InterruptProcessingException()


def device() -> str:
    """The device for our models: ComfyUI's."""
    return "cuda" if torch.device(mm.get_torch_device()).type == "cuda" else "cpu"


class OnedeskModel(torch.nn.Module):
    """The object that ComfyUI references weakly and names in its log."""

    device: torch.device | None = None


class Guest:
    """An open model whose memory is on another machine; invisible to ComfyUI's memory manager."""

    def __init__(self) -> None:
        self.tracker = Tracker()
        self.evictions = 0
        self.given: tuple[Released, ...] = ()


class LanguageModel(ModelPatcher):
    """An open model as ComfyUI's memory manager sees it, in this process or another one. Sizes are bytes."""

    def __init__(self, model: Model) -> None:
        home = mm.get_torch_device() if device() == "cuda" else torch.device("cpu")
        super().__init__(OnedeskModel(), home, torch.device("cpu"), size=1)
        self._open = weakref.ref(model)
        self.tracker = Tracker()
        # How often ComfyUI evicted it, and what the last eviction returned.
        self.evictions = 0
        self.given: tuple[Released, ...] = ()

    def is_dynamic(self) -> bool:
        """False: all bytes are in memory or none, never paged on demand."""
        return False

    def model_size(self) -> int:
        """Bytes that the model holds when it is loaded."""
        model = self._open()
        return max(1, self.loaded_size(), need(model, headroom=0) if model else 0)

    def loaded_size(self) -> int:
        """Bytes that it holds now."""
        model = self._open()
        return model.held_bytes() if model else 0

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.loaded_size() else self.offload_device

    def model_dtype(self) -> None:
        return None

    def model_patches_to(self, device: object) -> None:
        """Does nothing: there are no patches."""

    def clone(self, *_: object, **__: object) -> LanguageModel:
        return self

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Loads nothing: the node that requested memory loads the model, where it can be stopped and shows progress."""
        return 0

    def partially_unload(
        self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Evict the whole model; returns the bytes returned. If that were less than requested, ComfyUI would detach it
        at once.
        """
        return sum(item.measured for item in self.evict())

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        """Evict the model. With unpatch_all False ComfyUI only reorders its list, and nothing is evicted."""
        if unpatch_all:
            self.evict()
        return self.model

    def evict(self, *, wait: bool = True) -> tuple[Released, ...]:
        """Evict the model for ComfyUI, and count it. A pinned model keeps its bytes; with `wait` False a busy one does
        too.
        """
        model = self._open()
        if model is None or model.policy.name == "pinned":
            return ()
        released = give_way(model, wait=wait)
        if released:
            self.evictions += 1
            self.given = released
            log.info("ComfyUI needs the room; %s", returned(released))
        return released


def give_way(model: Model, *, wait: bool = True) -> tuple[Released, ...]:
    """Return the model's bytes, with `wait` after a running generation has ended, by itself or by Stop; it is never
    cut.

    Stop does not end another client's generation in another process: it only ends the wait.
    """
    while True:
        try:
            released = model.give_way()
        except PeerError as error:
            log.warning("%s", error)
            return ()
        if released or not wait or not model.busy or (isinstance(model, RemoteModel) and cancelled()):
            return released
        time.sleep(LOOK)


def open_model(choice: ModelChoice) -> Model:
    """The handle of a choice, known to ComfyUI's memory manager from its first use on. Loads nothing. Raises
    ModelError, FileError, RequestError for an unknown `where`.
    """
    spec = choice.spec(device())
    if choice.where == HERE:
        model: Model = REGISTRY.open(
            spec.name, roots=model_roots(), context=spec.context, quant=spec.quant, device=spec.device, load=False
        )
    elif choice.where == SERVICE:
        model = REGISTRY.open_in_service(spec, roots=model_roots())
        tell_service()
    else:
        model = REGISTRY.open_at_peer(peer_settings(choice.where))
    if isinstance(listed(model), LanguageModel):
        know_comfyui(pool_of(model))
    return model


def tell_service() -> None:
    """Report to the running local service what ComfyUI's models hold, so that it can ask them for memory."""
    models = ComfyModels(REGISTRY.pool(device()))
    REGISTRY.service(model_roots(), device()).join(Tenancy("ComfyUI", models.could_free, models.free))


def open_models() -> list[Model]:
    """Every handle whose memory is on this machine."""
    return [*REGISTRY.models(), *(model for model in REGISTRY.remotes() if model.has_memory)]


def title(model: Model) -> str:
    """Display name, with the engine that runs it if that is another process."""
    return model.title if isinstance(model, RemoteModel) else model.name


def need(model: Model, *, headroom: float) -> int:
    """Bytes of a loaded model, plus the given share of them; 0 where another process has not reported them yet."""
    if isinstance(model, OpenModel):
        return model.need.with_headroom(headroom)
    return int(model.need_bytes * (1 + headroom))


def pool_of(model: Model) -> Pool:
    """The pool that a model's bytes come from, or the pool of the machine that it shares."""
    return model.pool if isinstance(model, OpenModel) else REGISTRY.pool(device())


def pool() -> Pool:
    """The pool that our models share, with ComfyUI's models as its neighbour."""
    shared = REGISTRY.pool(device())
    know_comfyui(shared)
    return shared


def know_comfyui(pool: Pool) -> None:
    """Let the pool ask ComfyUI's models to give way."""
    if not any(isinstance(neighbour, ComfyModels) for neighbour in pool.arbiter.neighbours):
        pool.arbiter.add_neighbour(ComfyModels(pool))


def listed(model: Model) -> LanguageModel | Guest:
    """ComfyUI's view of the model. ComfyUI references it only weakly, so the handle keeps it."""
    if not isinstance(model.companion, LanguageModel | Guest):
        elsewhere = isinstance(model, RemoteModel) and not model.has_memory
        model.companion = Guest() if elsewhere else LanguageModel(model)
    return model.companion


def make_room(model: Model) -> None:
    """Ask ComfyUI to free what the model needs beyond what it holds, and put it first in ComfyUI's list.

    If the pool is still short, it evicts idle leases and asks its neighbours, unless all of them together are too
    small.
    """
    seat = listed(model)
    if isinstance(seat, Guest):
        return
    mm.load_models_gpu([seat])
    pool = pool_of(model)
    room, wanted = pool.room(), need(model, headroom=pool.settings.headroom)
    # Another process has its own budget, on the same machine.
    now, most = (
        (room.now, room.most)
        if isinstance(model, OpenModel)
        else (room.machine, room.machine + room.yielding + room.neighbours)
    )
    if now < wanted <= most:
        pool.make_room(wanted - now)


def make_more_room(model: Model, reason: MemoryFull) -> bool:
    """Ask ComfyUI to unload everything else, where the machine is still short of memory; False if the budget is too
    small.
    """
    seat, pool = listed(model), pool_of(model)
    wanted = need(model, headroom=pool.settings.headroom)
    if isinstance(seat, Guest) or (isinstance(model, OpenModel) and wanted > pool.budget.spendable):
        return False
    log.info("asking ComfyUI to unload its models: %s", reason)
    mm.free_memory(1e30, seat.load_device, keep_loaded=_ours())
    if _one_memory(pool.read_truth()):
        room = pool.room()
        _drop_outputs(wanted - (room.now if isinstance(model, OpenModel) else room.machine), free_active=True)
    return True


def keep_listed(model: Model) -> None:
    """Put the model back into ComfyUI's list if it was removed while it loaded."""
    seat = listed(model)
    if (
        isinstance(seat, LanguageModel)
        and model.loaded
        and not any(loaded.model is seat for loaded in mm.current_loaded_models)
    ):
        make_room(model)


def release(name: str | None) -> list[Released]:
    """Evict the models of one name, or all."""
    return [item for model in open_models() if name in (None, model.name) for item in give_way(model)]


def comfyui_models() -> list[tuple[str, int]]:
    """(class, bytes loaded now) of each of ComfyUI's own models that holds any. May be called from any thread."""
    patchers = [loaded.model for loaded in list(mm.current_loaded_models)]
    held = (
        (type(p.model).__name__, int(p.loaded_size()))
        for p in patchers
        if p is not None and not isinstance(p, LanguageModel)
    )
    return [(name, nbytes) for name, nbytes in held if nbytes]


class ComfyModels:
    """ComfyUI's models as a neighbour of a pool: reports what they would free, and frees it.

    On unified memory, moving a model from the device to the host frees nothing, and ComfyUI keeps each model for as
    long as it keeps the loader's output. There the outputs of earlier workflows are dropped, by ComfyUI's own function
    for that.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def could_free(self) -> int:
        """Bytes that ComfyUI's models hold. This is an upper bound: a model that the running workflow still needs
        stays.
        """
        return sum(nbytes for _, nbytes in comfyui_models())

    def free(self, nbytes: int) -> int:
        """Free about `nbytes` and return the bytes freed. Only the thread that runs workflows may touch ComfyUI's list.
        In any other thread nothing is freed now, and ComfyUI is asked to free memory itself when no workflow is queued.
        """
        if not runs_workflows():
            queue = PromptServer.instance.prompt_queue
            if not queue.get_tasks_remaining():
                queue.set_flag("free_memory", True)
            return 0
        before = self._pool.read_truth()
        if _one_memory(before):
            _drop_outputs(nbytes)
        freed = self._pool.read_truth().available - before.available
        if freed < nbytes and before.device_free is not None:
            torch_device = mm.get_torch_device()
            mm.free_memory(mm.get_free_memory(torch_device) + nbytes - max(0, freed), torch_device, keep_loaded=_ours())
            freed = self._pool.read_truth().available - before.available
        log.info("ComfyUI was asked for %s; %s more are available", show(nbytes), show(max(0, freed)))
        return max(0, freed)


def _one_memory(truth: Truth) -> bool:
    """Whether our leases and the host's memory are the same bytes."""
    return truth.device_free is None or truth.integrated


def _ours() -> list[mm.LoadedModel]:
    return [loaded for loaded in mm.current_loaded_models if isinstance(loaded.model, LanguageModel)]


def _drop_outputs(nbytes: int, *, free_active: bool = False) -> None:
    """Let ComfyUI's cache drop outputs until `nbytes` more of the host's memory are available: models of earlier
    workflows first, with `free_active` also outputs of the running one that no node waits for. Only the default kind of
    cache drops anything.
    """
    available = mm.get_free_memory(torch.device("cpu"))
    ram.extra_ram_release(available + nbytes, free_active=free_active)
    gc.collect()  # a model and its patcher form a reference cycle


def runs_workflows() -> bool:
    """Whether this is the thread that runs workflows: it has its own event loop, which is not the server's."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return False
    return loop is not PromptServer.instance.loop


def never_evicts() -> bool:
    """Whether ComfyUI runs with --cpu, where it frees nothing before it loads or draws."""
    return mm.cpu_mode()


def inference_minimum() -> int:
    """Bytes that ComfyUI itself wants free in addition to the weights while it computes."""
    return int(mm.minimum_inference_memory())


def give_room(nbytes: int) -> tuple[Released, ...]:
    """Evict idle models, the least recently used first, until ComfyUI can have `nbytes` above the floor. Busy and
    pinned ones stay.
    """
    released: list[Released] = []
    for model in sorted((model for model in open_models() if model.loaded), key=_idle, reverse=True):
        seat = listed(model)
        if _room_for_comfyui(pool_of(model)) >= nbytes:
            break
        released += seat.evict(wait=False) if isinstance(seat, LanguageModel) else ()
    return tuple(released)


def _room_for_comfyui(pool: Pool) -> int:
    truth = pool.read_truth()
    return min(truth.available, truth.host_available) - pool.budget.floor


def _idle(model: Model) -> float:
    """Seconds since the last use."""
    if isinstance(model, RemoteModel):
        return model.idle
    return min((lease.idle for lease in model.pool.leases() if lease.owner == model.name), default=0.0)


def correct_free_memory() -> None:
    """Correct ComfyUI's reading of free memory where it is wrong and onedesk.toml allows it; undone when the process
    ends.
    """
    torch_device = torch.device(mm.get_torch_device())
    if torch_device.type != "cuda":
        return
    correction = FreeMemoryCorrection(mm, comfyui_version)
    try:
        if load_config().comfyui.correct_free_memory and correction.apply(str(torch_device)):
            atexit.register(correction.undo)
    except OnedeskError as error:
        log.warning("ComfyUI's reading of free memory is left as it is: %s", error)
