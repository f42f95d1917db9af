"""Compiled calls: structures that are filled once and kept, the workspace of products, and captured sequences of calls
that are replayed as one.
"""

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
    CallStruct,
    Native,
    ProductStruct,
    WeightStruct,
    describe,
)

# Limit of kept calls. A decode step has a few hundred per batch size, an expert of a sparse layer two; each takes about
# 1 KB.
KEPT = 1 << 15
# A session has one or two per number of rows.
KEPT_SEQUENCES = 64


@dataclass(slots=True)
class NativeCall:
    """A filled structure, and the function that takes its address.

    A decode step makes the same calls repeatedly, with the same objects. Each call is kept under their identities, and
    `held` keeps the objects alive.
    """

    run: Callable[[int], None]
    structure: ctypes.Structure
    address: int
    held: tuple[object, ...]

    @classmethod
    def of(cls, run: Callable[[int], None], structure: ctypes.Structure, *held: object) -> NativeCall:
        return cls(run, structure, ctypes.addressof(structure), held)


class CapturedSequence:
    """Calls that run one after another, in one call."""

    def __init__(self, calls: Sequence[NativeCall]) -> None:
        self.held = tuple(calls)
        pairs = [(_address_of(call.run), call.address) for call in calls]
        self._calls = (CallStruct * len(calls))(*pairs)
        self.address, self.count = ctypes.addressof(self._calls), len(calls)


class CallCache:
    """What is kept between calls: weights as C structures, calls by their objects, captured sequences, and the
    workspace of products.
    """

    def __init__(self, native: Native, threads: int) -> None:
        self.native = native
        self.threads = threads
        self.compiled = self.plain = 0
        self._weights: dict[int, tuple[WeightStruct, Weight]] = {}
        self._kept: dict[tuple[int, ...], NativeCall] = {}
        # By owner and index. None: something in the sequence is not compiled.
        self._sequences: dict[tuple[int, int], tuple[CapturedSequence | None, object]] = {}
        self._recorded: list[NativeCall] | None = None
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._shared = self._each = self._moves = 0

    def use(self, workspace: torch.Tensor) -> None:
        """Use `workspace` from now on."""
        self._workspace = workspace
        self.forget()

    def forget(self) -> None:
        """Drop everything that points into the workspace."""
        self._kept.clear()
        self._sequences.clear()
        self._moves += 1

    def make(self, key: tuple[int, ...] | None, build: Callable[[], NativeCall | None]) -> bool:
        """Make the call kept under `key` (None: not kept), built if absent. False if it could not be built."""
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

    def run_captured(self, owner: object, index: int, work: Callable[[], None]) -> None:
        """Do `work`, which makes only calls of this cache unless one cannot be built. The first time it is recorded,
        then replayed.
        """
        key = (id(owner), index)
        known = self._sequences.get(key)
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
            if moves == self._moves:  # else some calls point into an old workspace; record next time
                if len(self._sequences) >= KEPT_SEQUENCES:
                    self._sequences.clear()
                self._sequences[key] = (CapturedSequence(self._recorded) if plain == self.plain else None, owner)
        finally:
            self._recorded = None

    def stored(self, weight: Weight) -> WeightStruct | None:
        """The result of `describe`, computed once per weight."""
        found = self._weights.get(id(weight))
        if found is None:
            stored = describe(weight)
            if stored is None:
                return None
            if len(self._weights) >= KEPT:
                self._weights.clear()
            found = self._weights[id(weight)] = stored, weight
        return found[0]

    def all_stored(self, *weights: Weight) -> list[WeightStruct] | None:
        """`stored` of each weight; None if one has none."""
        found = [self.stored(weight) for weight in weights]
        known = [stored for stored in found if stored is not None]
        return known if len(known) == len(found) else None

    def product(
        self, mode: int, x: torch.Tensor, stored: WeightStruct, out: torch.Tensor, scratch: tuple[int, int]
    ) -> ProductStruct:
        """A product without a norm. Raises ValueError for shapes that do not fit."""
        count, cols = x.shape
        outputs = stored.rows // 2 if mode == GATE else stored.rows
        if cols != stored.cols or out.numel() != count * outputs:
            weight = f"({stored.rows}, {stored.cols})"
            raise ValueError(f"{tuple(x.shape)} times a weight {weight} does not give {tuple(out.shape)}")
        product = ProductStruct(
            w=stored, mode=mode, x=x.data_ptr(), out=out.data_ptr(), tokens=count, threads=self.threads
        )
        product.scratch, product.stride = scratch
        return product

    def scratch_of(self, stored: Sequence[WeightStruct]) -> tuple[int, int]:
        """`scratch` for products with any of the weights."""
        needs = [self._needs(one) for one in stored]
        return self.scratch(max(shared for shared, _ in needs), max(each for _, each in needs))

    def _needs(self, stored: WeightStruct) -> tuple[int, int]:
        """Bytes that any product with this weight needs: shared by all threads, and per thread."""
        address, many = ctypes.addressof(stored), (ctypes.c_int64 * 2)()
        self.native.gemm_scratch(address, MANY_ROWS, ctypes.addressof(many))
        return many[0], max(many[1], self.native.gemv_scratch(address, FEW_ROWS))

    def scratch(self, shared: int, each: int) -> tuple[int, int]:
        """Address of the workspace, and its bytes per thread. Allocates if the reserved workspace is too small."""
        self._shared, self._each = max(self._shared, shared), -(-max(self._each, each) // ALIGNMENT) * ALIGNMENT
        needed = self._shared + self.threads * self._each + ALIGNMENT
        if self._workspace.numel() < needed:
            self.use(torch.empty(needed, dtype=torch.uint8))
        return -(-self._workspace.data_ptr() // ALIGNMENT) * ALIGNMENT, self._each


def _address_of(function: Callable[[int], None]) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # pyright: ignore[reportArgumentType]


def plain_rows(rows: torch.Tensor) -> bool:
    """Whether the C code can take it: fp32 without gaps."""
    return rows.dtype == torch.float32 and rows.is_contiguous()
