"""What the device knows of each sequence that penalties, a bias or a mask bind: counts of its tokens, and its bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..memory.lease import Lease, carved_bytes
from .device_plan import BIASED, CHAINED, MASKED, NEUTRAL_ROW, NEWEST, PENALIZED, RowState
from .sampler import Sampler

if TYPE_CHECKING:
    from .device_plan import RowChoice

# The sign bit of a count: the prompt has the token.
IN_PROMPT = np.int32(-(1 << 31))


class _SlotState:
    """The sequence of a slot, and which of its tokens the device has counted: `counted` of them, of which `chosen` are
    those that the device chose itself and that were not compared with what the host accepted. `unknown`: counted
    before the host has seen them."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.sampler = sampler
        self.counted = 0
        self.unknown = 0
        self.chosen: list[int] = []


class DeviceSlots:
    """Rows of `written` (int32 [slots, vocab]) and `bias` (fp32 [slots, vocab]) on the device, as
    kernels/cuda/triton_adjust reads them, and whose they are.

    A row is sent as a whole when a sequence gets a slot, and when what the device chose ahead was not accepted; else
    the few tokens since the last step go with the plan. Copies follow the steps in flight, in the device's order.
    """

    def __init__(self, lease: Lease, slots: int, vocab: int) -> None:
        self.written = lease.carve((slots, vocab), torch.int32).zero_()
        self.bias = lease.carve((slots, vocab), torch.float32).zero_()
        self._slots = [_SlotState() for _ in range(slots)]
        self._row: torch.Tensor | None = None
        self._sent: torch.cuda.Event | None = None

    @staticmethod
    def nbytes(slots: int, vocab: int) -> int:
        """Bytes on the device, alignment included."""
        return carved_bytes((slots, vocab), torch.int32) + carved_bytes((slots, vocab), torch.float32)

    def rows(self, feeds: Sequence[RowChoice]) -> list[RowState]:
        """The states of the rows of a step, in the order of `feeds`; after this, the step must be launched."""
        used = {id(feed.sampler) for feed in feeds}
        return [self._state(feed, used) if feed.wanted else NEUTRAL_ROW for feed in feeds]

    def verify_rows(self, feeds: Sequence[RowChoice]) -> list[RowState]:
        """The same for the rows of a verify pass, all of one sequence: its tokens are counted once."""
        first = next(row for row, feed in enumerate(feeds) if feed.wanted)
        state = self._state(feeds[first], {id(feeds[first].sampler)})
        rest = RowState(state.flags, state.slot)
        return [NEUTRAL_ROW] * first + [state] + [rest] * (len(feeds) - first - 1)

    def note_chosen(self, sampler: Sampler, token: int) -> None:
        """The host has seen the token that a step chose for a sequence; the next step may have counted it already."""
        slot = next((slot for slot in self._slots if slot.sampler is sampler), None)
        if slot is not None and slot.unknown:
            slot.unknown -= 1
            slot.chosen.append(token)

    def close(self) -> None:
        """Drop every tensor and sampler."""
        self._slots.clear()
        self._row = self._sent = None
        del self.written, self.bias

    def _state(self, feed: RowChoice, used: set[int]) -> RowState:
        sampler = feed.sampler
        flags = PENALIZED * sampler.penalized | BIASED * sampler.biased
        masked = MASKED if sampler.allowed is not None else 0
        if not flags:
            return RowState(masked) if masked else NEUTRAL_ROW
        index = self._index_of(sampler, used)
        new = self._count(self._slots[index], index, chained=feed.token is None) if sampler.penalized else ()
        chained = CHAINED if sampler.penalized and feed.token is None else 0
        return RowState(flags | masked | chained, index, new)

    def _index_of(self, sampler: Sampler, used: set[int]) -> int:
        """The slot of a sequence; a new one has one that no sequence of this step uses."""
        free = -1
        for index, slot in enumerate(self._slots):
            if slot.sampler is sampler:
                return index
            if slot.sampler is None or (free < 0 and id(slot.sampler) not in used):
                free = index
        self._slots[free] = _SlotState(sampler)
        if sampler.biased:
            row = self._staged().view(np.float32)
            row[:] = 0.0
            row[sampler.adjustments.biased] = sampler.adjustments.biases
            self._send(self.bias[free].view(torch.int32))
        if sampler.penalized:
            self._send_counts(self._slots[free], free)
        return free

    def _count(self, slot: _SlotState, index: int, *, chained: bool) -> Sequence[int]:
        """The tokens to count before the next choice; sends all counts where they are too many, or where the device
        counted others."""
        sampler = slot.sampler
        if sampler is None:
            raise ValueError("a slot without a sequence counts nothing")
        written = sampler.written
        if chained:
            new: Sequence[int] = written[slot.counted :] if not slot.unknown and not slot.chosen else ()
            slot.counted += len(new) + 1
            slot.unknown += 1
            slot.chosen.clear()
            return new
        agreed = not slot.unknown and slot.chosen == written[slot.counted - len(slot.chosen) : slot.counted]
        slot.chosen.clear()
        if not agreed or len(written) - slot.counted > NEWEST:
            self._send_counts(slot, index)
        new = written[slot.counted :]
        slot.counted = len(written)
        return new

    def _send_counts(self, slot: _SlotState, index: int) -> None:
        sampler, row = slot.sampler, self._staged()
        if sampler is None:
            raise ValueError("a slot without a sequence has no counts")
        row[:] = 0
        np.add.at(row, [token for token in sampler.written if token < len(row)], 1)
        row[sampler.adjustments.prompt] |= IN_PROMPT
        slot.counted, slot.unknown = len(sampler.written), 0
        slot.chosen.clear()
        self._send(self.written[index])

    def _staged(self) -> np.ndarray:
        """A row of host memory, int32 [vocab], whose last copy is done. Pinned, so that its copy waits for no step."""
        if self._row is None:
            self._row = torch.zeros(self.written.shape[1], dtype=torch.int32).pin_memory()
            self._sent = torch.cuda.Event()
        elif self._sent is not None:
            self._sent.synchronize()
        return self._row.numpy()

    def _send(self, target: torch.Tensor) -> None:
        if self._row is None or self._sent is None:
            raise ValueError("nothing was staged")
        target.copy_(self._row, non_blocking=True)
        self._sent.record()
