"""From open files to a device: through host buffers that are filled while others are copied."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .chunks import CHUNK_BYTES, Chunk, Rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagingBuffer:
    """A reader's staging buffers: `raw` uint8 for a chunk as stored, `work` flat fp32; both on the rows' device."""

    raw: torch.Tensor
    work: torch.Tensor


@torch.inference_mode()
def take_rows(rows: Rows | None, views: Sequence[torch.Tensor], staging: StagingBuffer | None) -> None:
    """Let the intake of `rows` take them from `views`, the reader's raw buffer; nothing for a chunk without rows."""
    if rows is not None and staging is not None:
        rows.intake.take(views[0].view(rows.dtype).view(rows.shape), rows.first, staging.work)


class Bounce:
    """Two host buffers, pinned for CUDA, through which a reader feeds a device: one is filled while the other is
    copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffers = [host_buffer(CHUNK_BYTES, pinned=self._cuda) for _ in range(2)]
        self._turn = 0
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._flying: tuple[Chunk, torch.cuda.Event | None] | None = None

    def window(self, nbytes: int) -> memoryview:
        """The buffer to fill next; nothing is copied from it any more."""
        if nbytes > self._buffers[self._turn].numel():  # one step of rows that are wider than a chunk
            self._buffers[self._turn] = host_buffer(nbytes, pinned=self._cuda)
        return self._buffers[self._turn].numpy().data[:nbytes]

    @torch.inference_mode()
    def send(self, chunk: Chunk, views: Sequence[torch.Tensor], staging: StagingBuffer | None) -> Chunk | None:
        """Start to copy the filled buffer into `views`, in order, and to let the intake take its rows there. Waits for
        the chunk before this one, and returns it.
        """
        buffer = self._buffers[self._turn]
        parts = torch.split(buffer[: sum(view.numel() for view in views)], [view.numel() for view in views])
        with torch.cuda.stream(self._stream):
            for view, part in zip(views, parts, strict=True):
                view.copy_(part, non_blocking=True)
            take_rows(chunk.rows, views, staging)
            event = None if self._stream is None else torch.cuda.Event(blocking=True)
            if event is not None:
                event.record()
        before = self.finish()
        self._flying = chunk, event
        self._turn = 1 - self._turn
        return before

    def finish(self) -> Chunk | None:
        """Wait for the chunk that is being copied, and return it; None if there is none."""
        flying, self._flying = self._flying, None
        if flying is None:
            return None
        chunk, event = flying
        if event is not None:
            event.synchronize()
        return chunk

    def settle(self) -> None:
        """Wait for every copy, also of a chunk whose `send` failed: its destination may be freed next."""
        if self._stream is not None:
            self._stream.synchronize()


def host_buffer(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """`nbytes` of host memory, uint8; pinned if wanted and if the host has memory for it, ordinary memory otherwise."""
    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            logger.warning("no pinned memory for reading weights, copies are slower: %s", str(error).splitlines()[0])
    return torch.empty(nbytes, dtype=torch.uint8)
