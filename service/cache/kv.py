"""Keys and values of one sequence, reserved once at their full length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import RequestError
from ..memory.pool import Lease

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class KVShape:
    """The size of one layer's keys (and, the same again, values) a token, and how many layers there are."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize

    def nbytes(self, capacity: int) -> int:
        """Bytes of a cache for `capacity` tokens, alignment included."""
        part = math.prod((self.heads, capacity, self.head_dim)) * self.dtype.itemsize
        return 2 * self.layers * (-(-part // ALIGNMENT) * ALIGNMENT)


class KVCache:
    """keys(layer), values(layer): [heads, length, head_dim] views that grow as tokens are written. See SequenceCache."""

    def __init__(self, lease: Lease, shape: KVShape, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._shape = shape
        size = (shape.heads, capacity, shape.head_dim)
        self._keys = [lease.carve(size, shape.dtype) for _ in range(shape.layers)]
        self._values = [lease.carve(size, shape.dtype) for _ in range(shape.layers)]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys, values [tokens, heads, head_dim] behind the sequence; return all of the layer's, the new ones included."""
        end = self.length + keys.shape[0]
        if end > self.capacity:
            raise RequestError(
                f"{end} tokens do not fit a context of {self.capacity}; shorten the prompt or open the model with more context"
            )
        held_keys, held_values = self._keys[layer], self._values[layer]
        held_keys[:, self.length : end].copy_(keys.transpose(0, 1))
        held_values[:, self.length : end].copy_(values.transpose(0, 1))
        return held_keys[:, :end], held_values[:, :end]

    def advance(self, tokens: int) -> None:
        self.length += tokens
        self.check()

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        self.length = length

    def nbytes(self) -> int:
        return self._shape.nbytes(self.capacity)

    def check(self) -> None:
        assert 0 <= self.length <= self.capacity, f"length {self.length} of {self.capacity}"  # noqa: S101 - an invariant of ours
