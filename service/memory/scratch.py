"""Scratch: small blocks of one lease, given out and taken back many times a step without touching the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import MemoryFull, RequestError
from .arena import Arena
from .lease import Lease

# In a steady loop the same few tensors come back; past this many something is not steady, and keeping them would be a leak.
_KEPT_VIEWS = 4096


class Scratch:
    """Blocks with counted references over a scratch lease. For one thread: each session has its own.

    The tensor for a place, shape and dtype is made once and kept, so that a steady step makes no new tensors.
    """

    def __init__(self, lease: Lease, *, granule: int = 64) -> None:
        self._lease = lease
        self._tensor = lease.tensor
        self._base = self._tensor.data_ptr()
        self._arena = Arena(granule)
        self._origin = self._arena.add_slab(lease.nbytes // granule * granule).base
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._counts: dict[int, int] = {}
        self.peak = 0

    @property
    def used(self) -> int:
        """Bytes that are given out now."""
        return self._arena.used

    @property
    def allocations(self) -> int:
        """How many blocks were given out since the start."""
        return self._arena.allocations

    def take(self, shape: Sequence[int], dtype: torch.dtype, *, align: int = 64) -> torch.Tensor:
        """Give out a tensor of `shape` and `dtype` with one reference; its content is whatever the bytes hold.

        An empty tensor takes no block and counts no references. Raises MemoryFull if no free block is large enough.
        """
        shape = tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return self._tensor[:0].view(dtype).view(shape)
        address = self._arena.allocate(nbytes, align)
        if address is None:
            raise MemoryFull(
                f"{self._lease.title} of {self._lease.nbytes} bytes has no block of {nbytes} left ({self.used} are given out, the "
                f"largest free one has {self._arena.largest_free}); lease more scratch or read the prompt in smaller chunks"
            )
        offset = address - self._origin
        view = self._views.get((offset, shape, dtype))
        if view is None:
            view = self._make_view(offset, nbytes, shape, dtype)
        self._counts[offset] = 1
        return view

    def hold(self, tensor: torch.Tensor) -> None:
        """Add a reference to a tensor that is given out."""
        if not tensor.numel():
            return
        self._counts[self._offset_of(tensor)] += 1

    def give_back(self, tensor: torch.Tensor) -> None:
        """Drop a reference; with the last one the block is free. Raises RequestError if the tensor is not given out."""
        if not tensor.numel():
            return
        offset = self._offset_of(tensor)
        count = self._counts.pop(offset)
        if count > 1:
            self._counts[offset] = count - 1
        else:
            self._arena.free(offset + self._origin)

    def reset(self) -> None:
        """Take every block back, at the end of a step or after an error."""
        for offset in self._counts:
            self._arena.free(offset + self._origin)
        self._counts.clear()

    def check(self) -> None:
        """Raise BrokenInvariantError if the bookkeeping contradicts itself."""
        self._arena.check()

    def _offset_of(self, tensor: torch.Tensor) -> int:
        offset = tensor.data_ptr() - self._base
        if offset not in self._counts:
            raise RequestError(f"a tensor that is not given out was returned to {self._lease.title}")
        return offset

    def _make_view(self, offset: int, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._lease.released:
            raise RequestError(f"{self._lease.title} was returned; lease scratch again")
        if len(self._views) >= _KEPT_VIEWS:
            self._views.clear()
        view = self._tensor[offset : offset + nbytes].view(dtype).view(shape)
        self._views[offset, shape, dtype] = view
        self.peak = max(self.peak, offset + nbytes)
        return view
