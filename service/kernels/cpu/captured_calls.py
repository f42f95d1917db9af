"""Compiled calls: structures that are filled in once and kept, the room that they work in, and stretches of a step that are made as one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...quant.weight import Weight
from ..forward_batch import FEW_ROWS
from .cpu_limits import ALIGNMENT, MANY_ROWS
from .native import (
    GATE,
    Native,
    Product,
    StepCall,
    StoredWeight,
    describe,
)

# Calls are kept of so many places: a decode step has some hundred for each batch, and each expert of a sparse layer two (about 1 KB each).
KEPT = 1 << 15
# A session has one or two for each number of rows.
KEPT_STRETCHES = 64


@dataclass(slots=True)
class Call:
    """A structure that is filled in, and the function that takes its address.

    A decode step makes the same calls again and again, with the same objects at the same places: each call is kept by their identities,
    and `held` keeps them alive.
    """

    run: Callable[[int], None]
    structure: ctypes.Structure
    address: int
    held: tuple[object, ...]

    @classmethod
    def of(cls, run: Callable[[int], None], structure: ctypes.Structure, *held: object) -> Call:
        return cls(run, structure, ctypes.addressof(structure), held)


class Stretch:
    """Calls that are made one behind the other, in one call."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.held = tuple(calls)
        places = [(ctypes.cast(call.run, ctypes.c_void_p).value, call.address) for call in calls]  # pyright: ignore[reportArgumentType]
        self._calls = (StepCall * len(calls))(*places)
        self.address, self.count = ctypes.addressof(self._calls), len(calls)


class Calls:
    """What is kept between calls: the weights as the C sees them, calls by their objects, stretches, and the room that products work in."""

    def __init__(self, native: Native, threads: int) -> None:
        self.native = native
        self.threads = threads
        self.compiled = self.plain = 0
        self._weights: dict[int, tuple[StoredWeight, Weight]] = {}
        self._kept: dict[tuple[int, ...], Call] = {}
        # By an object that it was made for and its place there; None: something in it is not compiled.
        self._stretches: dict[tuple[int, int], tuple[Stretch | None, object]] = {}
        self._recorded: list[Call] | None = None
        self._room = torch.empty(0, dtype=torch.uint8)
        self._shared = self._each = self._moves = 0

    def use(self, room: torch.Tensor) -> None:
        """Work in `room` from now on."""
        self._room = room
        self.forget()

    def forget(self) -> None:
        """Let go of all that points into the room."""
        self._kept.clear()
        self._stretches.clear()
        self._moves += 1

    def make(self, key: tuple[int, ...] | None, build: Callable[[], Call | None]) -> bool:
        """Make the call that is kept under `key` (None: it is not kept), built where there is none; False where nothing could be built."""
        call = self._kept.get(key) if key is not None else None
        if call is None:
            call = build()
            if call is None:
                self.plain += 1
                return False
            if key is not None:
                if len(self._kept) >= KEPT:
                    self._kept.clear()
                self._kept[key] = call
        call.run(call.address)
        self.compiled += 1
        if self._recorded is not None:
            self._recorded.append(call)
        return True

    def stretch(self, owner: object, place: int, work: Callable[[], None]) -> None:
        """What `work` does, which must be calls of these and nothing else unless one could not be built: the first time it is recorded."""
        key = (id(owner), place)
        known = self._stretches.get(key)
        if known is None or known[0] is None:
            if known is None:
                self._record(key, owner, work)
            else:
                work()
            return
        self.native.run_calls(known[0].address, known[0].count)
        self.compiled += known[0].count

    def _record(self, key: tuple[int, int], owner: object, work: Callable[[], None]) -> None:
        plain, moves, self._recorded = self.plain, self._moves, []
        try:
            work()
            if moves == self._moves:  # else some of the calls point into another room: the next time
                if len(self._stretches) >= KEPT_STRETCHES:
                    self._stretches.clear()
                self._stretches[key] = (Stretch(self._recorded) if plain == self.plain else None, owner)
        finally:
            self._recorded = None

    def stored(self, weight: Weight) -> StoredWeight | None:
        """What `describe` says, once a weight."""
        found = self._weights.get(id(weight))
        if found is None:
            stored = describe(weight)
            if stored is None:
                return None
            if len(self._weights) >= KEPT:
                self._weights.clear()
            found = self._weights[id(weight)] = stored, weight
        return found[0]

    def all_stored(self, *weights: Weight) -> list[StoredWeight] | None:
        """`stored` of each; None where there is nothing for one of them."""
        found = [self.stored(weight) for weight in weights]
        known = [stored for stored in found if stored is not None]
        return known if len(known) == len(found) else None

    def product(self, mode: int, x: torch.Tensor, stored: StoredWeight, out: torch.Tensor, scratch: tuple[int, int]) -> Product:
        """A product without a norm. ValueError for shapes that do not fit."""
        count, cols = x.shape
        outputs = stored.rows // 2 if mode == GATE else stored.rows
        if cols != stored.cols or out.numel() != count * outputs:
            weight = f"({stored.rows}, {stored.cols})"
            raise ValueError(f"{tuple(x.shape)} times a weight {weight} does not give {tuple(out.shape)}")
        product = Product(w=stored, mode=mode, x=x.data_ptr(), out=out.data_ptr(), tokens=count, threads=self.threads)
        product.scratch, product.stride = scratch
        return product

    def scratch_of(self, stored: Sequence[StoredWeight]) -> tuple[int, int]:
        """`scratch` for products with any of the weights."""
        needs = [self._needs(one) for one in stored]
        return self.scratch(max(shared for shared, _ in needs), max(each for _, each in needs))

    def _needs(self, stored: StoredWeight) -> tuple[int, int]:
        """Bytes that any product with this weight takes: shared by all threads, and of each."""
        address, many = ctypes.addressof(stored), (ctypes.c_int64 * 2)()
        self.native.gemm_scratch(address, MANY_ROWS, ctypes.addressof(many))
        return many[0], max(many[1], self.native.gemv_scratch(address, FEW_ROWS))

    def scratch(self, shared: int, each: int) -> tuple[int, int]:
        """Address of the room and bytes of it for each thread; memory of our own where none was reserved that is large enough."""
        self._shared, self._each = max(self._shared, shared), -(-max(self._each, each) // ALIGNMENT) * ALIGNMENT
        needed = self._shared + self.threads * self._each + ALIGNMENT
        if self._room.numel() < needed:
            self.use(torch.empty(needed, dtype=torch.uint8))
        return -(-self._room.data_ptr() // ALIGNMENT) * ALIGNMENT, self._each


def plain_rows(rows: torch.Tensor) -> bool:
    """Whether the C can take it: fp32 without gaps."""
    return rows.dtype == torch.float32 and rows.is_contiguous()
