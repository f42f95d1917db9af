"""Corrects ComfyUI's reading of free memory on a GPU with unified memory, whose driver counts reclaimable page cache as
used.

The only change that Onedesk makes to a running ComfyUI. It is made only where torch says that the GPU is integrated,
only for versions whose function is known, only if that function is still ComfyUI's own, and only if onedesk.toml does
not forbid it. It can be undone.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..service.memory.budget import show
from ..service.memory.truth import DeviceFigures, DeviceProbe, Truth, probe_torch, read_truth

log = logging.getLogger(__name__)

NAME = "get_free_memory"
# Tested releases: their function takes these parameters and returns bytes, or (bytes, bytes of them in torch's cache).
FIRST, BEYOND = (0, 30), (0, 39)
PARAMETERS = {"dev": None, "torch_free_too": False}
_UNDO = "onedesk_undo"


class FreeMemoryCorrection:
    """Makes `manager.get_free_memory` return the corrected figure for integrated CUDA devices, and leaves all others
    unchanged.

    `manager` is comfy.model_management, `version` ComfyUI's. `probe`, `proc` and `cgroup` are the sources of the
    figure.
    """

    def __init__(
        self,
        manager: Any,
        version: str,
        *,
        probe: DeviceProbe = probe_torch,
        proc: Path = Path("/proc"),
        cgroup: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self._manager = manager
        self._version = version
        self._probe = probe
        self._proc = proc
        self._cgroup = cgroup
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None

    def apply(self, device: str) -> bool:
        """Correct the reading if `device`, such as "cuda:0", is integrated and everything is as expected; log it once.

        Raises RequestError if there is no such device, FileError if meminfo is unreadable.
        """
        earlier = getattr(getattr(self._manager, NAME, None), _UNDO, None)
        if earlier is not None:  # the pack was loaded earlier in this process
            earlier()
        truth = self._truth(device)[0]
        if not truth.integrated:
            return False
        reason = self._reason_against()
        if reason:
            log.warning(
                "ComfyUI's reading of free memory is not corrected: %s; large image models may be unloaded without"
                " need",
                reason,
            )
            return False
        original = self._original = getattr(self._manager, NAME)
        self._ours = self._corrected(original)
        setattr(self._manager, NAME, self._ours)
        log.info(
            "the GPU shares its memory with the CPU: ComfyUI's free memory is corrected from %s to %s, page cache is"
            " reclaimable (switch: correct_free_memory in [comfyui] of onedesk.toml)",
            show(truth.device_free or 0),
            show(truth.available),
        )
        return True

    def undo(self) -> None:
        """Restore ComfyUI's own function. If ours was replaced since, it only forwards calls from now on."""
        original, self._original = self._original, None
        if original is not None and getattr(self._manager, NAME) is self._ours:
            setattr(self._manager, NAME, original)

    def _corrected(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_free_memory(dev: Any = None, torch_free_too: bool = False) -> Any:
            device = self._manager.get_torch_device() if dev is None else dev
            if self._original is None or getattr(device, "type", None) != "cuda":
                return original(dev, torch_free_too)
            truth, cached = self._truth(str(device))
            if not truth.integrated:
                return original(dev, torch_free_too)
            free = truth.available + cached
            return (free, cached) if torch_free_too else free

        setattr(get_free_memory, _UNDO, self.undo)
        return get_free_memory

    def _truth(self, device: str) -> tuple[Truth, int]:
        """The corrected reading, and the unused bytes in torch's cache: the system counts those as used."""
        figures = self._probe(device)

        def measured(device: str) -> DeviceFigures:
            return figures

        truth = read_truth(device, proc=self._proc, cgroup=self._cgroup, probe=measured)
        return truth, max(0, figures.reserved - figures.allocated)

    def _reason_against(self) -> str:
        """Why the function must not be replaced; "" if it may."""
        numbers = tuple(int(part) for part in self._version.split(".")[:2] if part.isdecimal())
        if not FIRST <= numbers < BEYOND:
            return f"ComfyUI {self._version} is not among the versions that are known (from 0.30, before 0.39)"
        function = getattr(self._manager, NAME, None)
        if not inspect.isfunction(function) or function.__module__ != self._manager.__name__:
            return "the function is not ComfyUI's own; another pack has replaced it"
        parameters = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
        if parameters != PARAMETERS:
            return f"its parameters are {', '.join(parameters) or 'none'}, not {', '.join(PARAMETERS)}"
        return ""
