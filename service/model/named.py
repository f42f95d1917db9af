"""The weights of a network, or of one layer, by their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..kernels.forward_batch import NormWeight
from ..loader.table import FileTable
from ..quant.weight import QuantizedWeight, Weight


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """`tensors` by the keys of their destinations, which start with `prefix`; `tables` by their full keys."""

    tensors: Mapping[str, Weight]
    tables: Mapping[str, FileTable]
    prefix: str = ""

    def of(self, layer: int) -> NamedWeights:
        """The weights of one block."""
        return NamedWeights(self.tensors, self.tables, f"{layer}.")

    def __getitem__(self, key: str) -> Weight:
        return self.tensors[self.prefix + key]

    def table(self, key: str) -> FileTable:
        """A table that stays in its file."""
        return self.tables[self.prefix + key]

    def plain(self, key: str) -> torch.Tensor:
        """A weight that is never quantized. TypeError for a quantized one."""
        weight = self[key]
        if isinstance(weight, QuantizedWeight):
            raise TypeError(f"{self.prefix}{key} is quantized; it is held in a floating type")
        return weight

    def norm(self, key: str, eps: float) -> NormWeight:
        return NormWeight(self.plain(key), eps)

    def parts(self, key: str, count: int) -> list[Weight]:
        """The weight cut into `count` weights with equal row counts."""
        whole = self[key]
        rows = whole.shape[0] // count
        cuts = [(at, at + rows) for at in range(0, rows * count, rows)]
        return [whole.row_slice(*cut) if isinstance(whole, QuantizedWeight) else whole[cut[0] : cut[1]] for cut in cuts]
