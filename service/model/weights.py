"""From a family's list of tensors and a checkpoint's header to tensors in leased memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..errors import ModelError
from ..loader.checkpoint import Checkpoint
from ..loader.header import TensorInfo
from .spec import Destination, Source

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
ALIGNMENT = 256
# Buffers that some exporters store and that are recomputed, and what a tied head may be stored as again.
RECOMPUTED = re.compile(r".*rotary_emb\.inv_freq$|^lm_head\.weight$")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the network: its place (`destination`), how it is stored, and the parts of the checkpoint it is read from."""

    destination: Destination
    stored: torch.dtype
    parts: tuple[TensorInfo, ...]

    @property
    def held(self) -> torch.dtype:
        return torch.float32 if self.destination.wide else self.stored


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """All tensors of a network, checked against the checkpoint, before anything is allocated."""

    tensors: tuple[PlannedTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights lease."""
        return sum(-(-t.destination.elements * t.held.itemsize // ALIGNMENT) * ALIGNMENT for t in self.tensors)

    @property
    def parameters(self) -> int:
        return sum(t.destination.elements for t in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The type that most weights are stored in."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.tensors:
            sizes[tensor.stored] = sizes.get(tensor.stored, 0) + tensor.destination.elements
        return max(sizes, key=lambda dtype: sizes[dtype])

    def formats(self) -> list[str]:
        """Names of the stored types as in the file's header, sorted."""
        return sorted({part.dtype for tensor in self.tensors for part in tensor.parts})


def plan_weights(wanted: Iterable[Destination], checkpoint: Checkpoint) -> WeightPlan:
    """Match `wanted` with the checkpoint; ModelError names the first tensor that is missing, of another shape or type, or not known.

    `wanted` is followed only as far as the checkpoint has its tensors: a config may ask for any number of layers.
    """
    planned = tuple(_planned(destination, checkpoint) for destination in wanted)
    known = {source.name for tensor in planned for source in tensor.destination.sources}
    unknown = sorted(name for name in checkpoint.tensors if name not in known and not RECOMPUTED.match(name))
    if unknown:
        raise ModelError(
            f"{checkpoint.name} has {len(unknown)} tensors that its config.json does not account for, the first is {unknown[0]}; "
            "the config and the weights belong to different models"
        )
    return WeightPlan(planned)


def _planned(destination: Destination, checkpoint: Checkpoint) -> PlannedTensor:
    parts = tuple(_part(source, checkpoint) for source in destination.sources)
    kinds = sorted({part.dtype for part in parts})
    if len(kinds) > 1:
        names = ", ".join(f"{part.name} {part.dtype}" for part in parts)
        raise ModelError(f"{checkpoint.name} stores tensors that belong together in different types ({names}); store them in one type")
    return PlannedTensor(destination, STORED[kinds[0]], parts)


def _part(source: Source, checkpoint: Checkpoint) -> TensorInfo:
    found = checkpoint.tensors.get(source.name)
    if found is None:
        raise ModelError(f"{checkpoint.name} lacks the tensor {source.name}, wanted {list(source.shape)}; the checkpoint is incomplete")
    if tuple(found.shape) != source.shape:
        raise ModelError(
            f"{checkpoint.name}: tensor {source.name}: wanted {list(source.shape)} by config.json, found {list(found.shape)} in the file"
        )
    if found.dtype not in STORED:
        raise ModelError(f"{checkpoint.name}: tensor {source.name} is stored as {found.dtype}; supported: {', '.join(STORED)}")
    return found
