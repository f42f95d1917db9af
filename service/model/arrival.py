"""Weights on their way into leased memory: read in the order of use, while the first prompt is already computed behind the reading.

The embedding, a quarter of a small model, comes last: of it the first prompt needs only its own rows.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Sequence

import torch

from ..core import CancelCheck, ProgressReport
from ..errors import Cancelled
from ..loader.header import TensorInfo
from ..loader.rows import read_rows
from ..loader.stream import StreamStats, stream_tensors
from ..memory.pool import Lease
from .weights import WeightPlan

# How often a wait for a part looks whether the reading has failed.
LOOK_SECONDS = 0.05
EMBEDDING = 0


class WeightArrival:
    """Fills the tensors of `plan` in `lease` on a thread of its own.

    `tensors` (by destination key) can be built into a network at once; a part may be computed with after `wait` for it, or of the
    embedding some rows after `fetch_rows`. `waited` is the
    seconds that whoever computes lost by waiting. `progress` and `cancel` are called on the reading thread.
    """

    def __init__(self, plan: WeightPlan, lease: Lease, progress: ProgressReport | None, cancel: CancelCheck | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._jobs: list[tuple[TensorInfo, torch.Tensor]] = []
        self._job_tensor: list[int] = []
        self._parts_left: list[int] = []
        self._widen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tensor_part: list[int] = []
        self._missing: dict[int, int] = {}
        targets: list[torch.Tensor] = []
        for index, tensor in enumerate(plan.tensors):
            held = lease.carve(tensor.destination.shape, tensor.held)
            self.tensors[tensor.destination.key] = held
            targets.append(held)
            if tensor.held != tensor.stored:
                targets[-1] = torch.empty(tensor.destination.shape, dtype=tensor.stored, device=held.device)
                self._widen[index] = (held, targets[-1])
            self._parts_left.append(len(tensor.parts))
            self._tensor_part.append(tensor.destination.part)
            self._missing[tensor.destination.part] = self._missing.get(tensor.destination.part, 0) + 1
        for index in sorted(range(len(targets)), key=lambda i: self._tensor_part[i] == EMBEDDING):
            row = 0
            for part in plan.tensors[index].parts:
                self._jobs.append((part, targets[index][row : row + part.shape[0]]))
                self._job_tensor.append(index)
                row += part.shape[0]
        self._here = {part: threading.Event() for part in self._missing}
        self.waited = 0.0
        self._progress = progress
        self._stopped = threading.Event()
        self._cancel = cancel
        self._failure: BaseException | None = None
        self._stats: StreamStats | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._read), name="onedesk-load", daemon=True)

    def start(self) -> WeightArrival:
        """Begin to read."""
        self._thread.start()
        return self

    @property
    def complete(self) -> bool:
        """Whether every byte is there."""
        return self._stats is not None

    def wait(self, part: int) -> None:
        """Return when all tensors of `part` are there. Raises Cancelled or FileError when the reading has ended before."""
        event = self._here.get(part)
        if event is None or event.is_set():
            return
        started = time.perf_counter()
        while not event.wait(LOOK_SECONDS):
            if not self._thread.is_alive() and not event.is_set():
                self.finish()
                break
        self.waited += time.perf_counter() - started

    def fetch_rows(self, rows: Sequence[int]) -> None:
        """Return when these rows of the embedding are there, whether or not the rest is. Raises Cancelled or FileError.

        A row may be written twice, with the same bytes: here and when the whole embedding comes.
        """
        if self._here[EMBEDDING].is_set():
            return
        if not self._thread.is_alive():
            self.finish()
        started = time.perf_counter()
        for job, index in enumerate(self._job_tensor):
            if self._tensor_part[index] == EMBEDDING:
                read_rows(self._jobs[job][0], rows, self._jobs[job][1])
        self.waited += time.perf_counter() - started

    def finish(self) -> StreamStats:
        """Wait until everything is there; returns what the reading took. Raises Cancelled or FileError."""
        started = time.perf_counter()
        self._thread.join()
        self.waited += time.perf_counter() - started
        if self._failure is not None:
            raise self._failure
        if self._stats is None:
            raise Cancelled("loading was stopped")
        return self._stats

    def stop(self) -> None:
        """End the reading, wait for its thread, and let go of the tensors."""
        self._stopped.set()
        self._thread.join()
        self.tensors.clear()
        self._jobs.clear()
        self._widen.clear()

    def _should_stop(self) -> bool:
        return self._stopped.is_set() or (self._cancel is not None and self._cancel())

    def _read(self) -> None:
        try:
            self._stats = stream_tensors(self._jobs, progress=self._progress, cancel=self._should_stop, arrived=self._take)
        except BaseException as failure:  # noqa: BLE001 - handed to the thread that waits, whatever it is
            self._failure = failure

    def _take(self, job: int) -> None:
        index = self._job_tensor[job]
        self._parts_left[index] -= 1
        if self._parts_left[index]:
            return
        if index in self._widen:
            held, stored = self._widen.pop(index)
            held.copy_(stored)
        part = self._tensor_part[index]
        self._missing[part] -= 1
        if self._missing[part] == 0:
            self._here[part].set()
