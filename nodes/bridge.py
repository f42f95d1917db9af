"""ComfyUI's view of our models, and ours of its memory. The only file that touches comfy.model_management.

Each open model is one patcher in ComfyUI's list of loaded models, with the bytes that it really holds, so that ComfyUI evicts it with
its own code when it needs room, and POST /free frees it. Before a model loads, ComfyUI is asked to free what it needs.

Threads: ComfyUI's list has no lock. It is touched only by the thread that runs prompts (node code between awaits, and ComfyUI's
own calls of a patcher); models work in other threads, which never wait for that thread.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable

import comfy.model_management as mm
import torch
from comfy.model_management import InterruptProcessingException
from comfy.model_patcher import ModelPatcher

from ..service.api import OpenModel
from ..service.errors import MemoryFull
from ..service.memory.pool import Released
from ..service.registry import REGISTRY
from .folders import model_roots
from .phase import Tracker
from .show import returned
from .values import ModelChoice

log = logging.getLogger(__name__)

# How often a wait for a running generation looks again, in seconds.
LOOK = 0.02


def cancelled() -> bool:
    """Whether the user pressed Stop; the flag stays set."""
    return mm.processing_interrupted()


def interrupted() -> InterruptProcessingException:
    """The exception that ends the running prompt as stopped; the flag is cleared, as ComfyUI expects of who raises it."""
    mm.interrupt_current_processing(False)
    return InterruptProcessingException()


def device() -> str:
    """The device for our models: the one that ComfyUI uses."""
    return "cuda" if torch.device(mm.get_torch_device()).type == "cuda" else "cpu"


class OnedeskModel(torch.nn.Module):
    """What ComfyUI keeps a weak reference to and names in its log."""

    device: torch.device | None = None


class LanguageModel(ModelPatcher):
    """An open model as ComfyUI's memory manager sees it. Sizes are bytes."""

    def __init__(self, model: OpenModel) -> None:
        home = mm.get_torch_device() if device() == "cuda" else torch.device("cpu")
        super().__init__(OnedeskModel(), home, torch.device("cpu"), size=1)
        self._open = weakref.ref(model)
        self.tracker = Tracker()
        # How often ComfyUI took the room, and what came back the last time.
        self.evictions = 0
        self.given: tuple[Released, ...] = ()

    def is_dynamic(self) -> bool:
        """False: the bytes are there as a whole or not at all, never paged on demand."""
        return False

    def model_size(self) -> int:
        """What the model holds when it is loaded."""
        model = self._open()
        return max(1, self.loaded_size(), model.need.total if model else 0)

    def loaded_size(self) -> int:
        """What it holds now."""
        model = self._open()
        return model.held_bytes() if model else 0

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.loaded_size() else self.offload_device

    def model_dtype(self) -> None:
        return None

    def model_patches_to(self, device: object) -> None:
        """Nothing: there are no patches."""

    def clone(self, *_: object, **__: object) -> LanguageModel:
        return self

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        """Nothing is loaded by ComfyUI's hand: the node that asked for room loads, where it can be stopped and shows progress."""
        return 0

    def partially_unload(self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        """Give way as a whole; returns the bytes that came back. ComfyUI would take the rest at once if less than asked came back."""
        return sum(item.measured for item in self._give_way())

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        """Give way; with unpatch_all False ComfyUI only sorts its list anew, then nothing is given."""
        if unpatch_all:
            self._give_way()
        return self.model

    def _give_way(self) -> tuple[Released, ...]:
        model = self._open()
        released = give_way(model) if model else ()
        if released:
            self.evictions += 1
            self.given = released
            log.info("ComfyUI needs the room; %s", returned(released))
        return released


def give_way(model: OpenModel) -> tuple[Released, ...]:
    """Return the model's bytes, after a running generation has ended; that ends by itself or by Stop, and is never cut."""
    while True:
        released = model.give_way()
        if released or not model.busy:
            return released
        time.sleep(LOOK)


def open_model(choice: ModelChoice) -> OpenModel:
    """The handle of a choice, known to ComfyUI's memory manager from its first use on. Loads nothing. Raises ModelError, FileError."""
    model = REGISTRY.open(choice.name, roots=model_roots(), context=choice.context, quant=choice.quant, device=device(), load=False)
    listed(model)
    return model


def listed(model: OpenModel) -> LanguageModel:
    """The model as ComfyUI sees it. ComfyUI holds that only weakly, so the handle keeps it."""
    if not isinstance(model.companion, LanguageModel):
        model.companion = LanguageModel(model)
    return model.companion


def make_room(model: OpenModel) -> None:
    """Ask ComfyUI to free what the model needs beyond what it holds, and put it first in ComfyUI's list."""
    mm.load_models_gpu([listed(model)])


def make_more_room(model: OpenModel, reason: MemoryFull) -> None:
    """Ask ComfyUI to unload everything else; for when the pool still lacks room (on --cpu ComfyUI frees nothing by itself)."""
    log.info("asking ComfyUI to unload its models: %s", reason)
    keep = [loaded for loaded in mm.current_loaded_models if loaded.model is listed(model)]
    mm.free_memory(1e30, listed(model).load_device, keep_loaded=keep)


def keep_listed(model: OpenModel) -> None:
    """Put the model back into ComfyUI's list if it was taken out while it loaded."""
    if model.loaded and not any(loaded.model is listed(model) for loaded in mm.current_loaded_models):
        make_room(model)


def release(name: str | None) -> list[Released]:
    """Let the models of one name, or all, give way."""
    models: Iterable[OpenModel] = REGISTRY.models()
    return [item for model in models if name in (None, model.name) for item in give_way(model)]
