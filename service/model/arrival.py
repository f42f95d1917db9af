"""Reads weights into leased memory in the order of use, while the first prompt is computed.

The embedding, a quarter of a small model, comes last: the first prompt needs only its own rows of it.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Sequence

import torch

from ..core import CancelCheck, ProgressReport
from ..errors import Cancelled
from ..loader.bounce import StagingBuffer
from ..loader.chunks import Job
from ..loader.stream import StreamStats, stream_tensors
from ..memory.file_cache import FileCache
from ..memory.pool import Lease
from ..quant.quantize_weights import Quantizer
from ..quant.weight import Weight
from .reading import Settle
from .weights import WeightPlan

log = logging.getLogger(__name__)

# Seconds between two checks, while waiting for a part, whether the reading has failed.
LOOK_SECONDS = 0.05
EMBEDDING = 0


class WeightArrival:
    """Fills the tensors of `plan` in `lease` on a thread of its own.

    `tensors` (by destination key) can be built into a network at once. A part may be used after `wait` for it; rows of
    the embedding may be used after `fetch_rows`. `waited` is the seconds that the computation has waited for weights.
    `progress` and `cancel` are called on the reading thread. Tensors that are converted while they are read go through
    `staging`, a lease of plan.staging_bytes, which is returned when the reading ends. `faster` quantizes where it can.
    `files` decides whether the file's pages stay cached; without it they are dropped.
    """

    def __init__(
        self,
        plan: WeightPlan,
        lease: Lease,
        progress: ProgressReport | None,
        cancel: CancelCheck | None,
        staging: Lease | None = None,
        faster: Quantizer | None = None,
        files: FileCache | None = None,
    ) -> None:
        self.tensors: dict[str, Weight] = {tensor.destination.key: tensor.carve(lease.carve) for tensor in plan.tensors}
        self._plan = plan
        self._jobs: list[Job] = []
        self._job_tensor: list[int] = []
        self._parts_left = [len(tensor.readings) for tensor in plan.tensors]
        self._missing: dict[int, int] = {}
        for tensor in plan.tensors:
            self._missing[tensor.destination.part] = self._missing.get(tensor.destination.part, 0) + 1
        for index in sorted(range(len(plan.tensors)), key=lambda i: plan.tensors[i].destination.part == EMBEDDING):
            for reading in plan.tensors[index].readings:
                self._jobs.append((reading.info, reading.destination(self._tensor(index), faster)))
                self._job_tensor.append(index)
        self._staging = staging
        self._faster = faster
        self._files = files or FileCache(lambda: 0)
        self._device = next(iter(self.tensors.values())).device
        self._staging_buffers = self._make_staging()
        self._here = {part: threading.Event() for part in self._missing}
        self.waited = 0.0
        self._progress = progress
        self._stopped = threading.Event()
        self._cancel = cancel
        self._failure: BaseException | None = None
        self._stats: StreamStats | None = None
        if plan.note:
            log.warning(plan.note)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._read), name="onedesk-load", daemon=True)

    def _tensor(self, index: int) -> Weight:
        return self.tensors[self._plan.tensors[index].destination.key]

    def _make_staging(self) -> list[StagingBuffer]:
        count, raw, work = self._plan.staging(self._device)

        def room(nbytes: int, dtype: torch.dtype) -> torch.Tensor:
            shape = (nbytes // dtype.itemsize,)
            return (
                self._staging.carve(shape, dtype)
                if self._staging is not None
                else torch.empty(shape, dtype=dtype, device=self._device)
            )

        return [StagingBuffer(room(raw, torch.uint8), room(work, torch.float32)) for _ in range(count)]

    def start(self) -> WeightArrival:
        """Start reading."""
        self._thread.start()
        return self

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived."""
        return self._stats is not None

    def wait(self, part: int) -> None:
        """Return when all tensors of `part` have arrived. Raises Cancelled, FileError or ModelError when the reading
        ended before.
        """
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
        """Return when these rows of the embedding have arrived; the rest may follow. Raises Cancelled, FileError,
        ModelError.

        A row may be written twice with the same bytes: here, and when the whole embedding arrives.
        """
        if self._here[EMBEDDING].is_set():
            return
        if not self._thread.is_alive():
            self.finish()
        embedding = [index for index, tensor in enumerate(self._plan.tensors) if tensor.destination.part == EMBEDDING]
        readings = [(index, reading) for index in embedding for reading in self._plan.tensors[index].readings]
        if not all(reading.rowwise for _, reading in readings):
            self.wait(EMBEDDING)
            return
        started, wanted = time.perf_counter(), sorted(set(rows))
        for index, reading in readings:
            reading.fetch(wanted, self._tensor(index), self._faster)
        self.waited += time.perf_counter() - started

    def finish(self) -> StreamStats:
        """Wait until everything has arrived; return the figures of the reading. Raises Cancelled, FileError,
        ModelError.
        """
        started = time.perf_counter()
        self._thread.join()
        self._return_bench()
        self.waited += time.perf_counter() - started
        if self._failure is not None:
            raise self._failure
        if self._stats is None:
            raise Cancelled("loading was stopped")
        return self._stats

    def stop(self) -> None:
        """Stop reading, wait for the thread, and release the tensors."""
        self._stopped.set()
        self._thread.join()
        self._return_bench()
        self.tensors.clear()

    def _return_bench(self) -> None:
        """Release the staging buffers: the reading has ended, so nothing is converted any more."""
        self._jobs.clear()
        self._staging_buffers.clear()
        self._faster = None  # kernels hold memory of their own
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.release()

    def _should_stop(self) -> bool:
        return self._stopped.is_set() or (self._cancel is not None and self._cancel())

    def _read(self) -> None:
        try:
            with self._files.reading(info.file for info, _ in self._jobs):
                self._stats = stream_tensors(
                    self._jobs,
                    progress=self._progress,
                    cancel=self._should_stop,
                    arrived=self._take,
                    staging=self._staging_buffers,
                    drop_behind=self._files.lacks_room,
                )
        except BaseException as failure:  # noqa: BLE001 - handed to the thread that waits, whatever it is
            self._failure = failure

    def _take(self, job: int) -> None:
        index = self._job_tensor[job]
        self._parts_left[index] -= 1
        if self._parts_left[index]:
            return
        planned = self._plan.tensors[index]
        if planned.settle is not None:
            self._settle(planned.settle, self._tensor(index))
        self._missing[planned.destination.part] -= 1
        if self._missing[planned.destination.part] == 0:
            self._here[planned.destination.part].set()

    @torch.inference_mode()
    def _settle(self, settle: Settle, tensor: Weight) -> None:
        settle(tensor)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the computation uses another stream
