"""From a family's required tensors and a checkpoint's header to a plan: the memory layout and the way each tensor is
read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import torch

from ..errors import ModelError
from ..loader.checkpoint import Checkpoint
from ..loader.files import SourceFile
from ..loader.header import TensorInfo
from ..loader.readers import default_readers
from ..loader.rows import is_all_zero
from ..quant.damage import refuse_zero_scales
from ..quant.formats import (
    CHOICES,
    INT8,
    Carve,
    aligned_bytes,
    title,
    weight_of,
)
from ..quant.microscaled import Nvfp4
from ..quant.mixed import Packings
from ..quant.packings import Packing, StoredPart
from ..quant.published import KEY, read_packings
from ..quant.quantize_weights import Quantizer, padded_columns, quantize_into, tile_elements
from ..quant.weight import BLOCK_COLUMNS, Format, QuantizedWeight, Weight
from .by_columns import as_stored, read_by_columns
from .reading import Reading, Settle, widen
from .spec import FLOATING, Destination, Source, Turn
from .tables import PlannedTable, scale_name

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NAMES = {dtype: name for name, dtype in STORED.items()}
ALIGNMENT = 256
# Scales of quantized keys and values; here these are held unquantized.
CACHE_SCALES = re.compile(
    r".*\.self_attn\.(?:[qkv]_proj\.)?(?:[qkv]_(?:scale|zero_point)|output_(?:scale|zero_point))$"
)
# Unpacking a part briefly takes about seven times its bytes.
UNPACK_BYTES = 1 << 20
# Buffers that some exporters store although they are recomputed, and the copy of a tied head.
RECOMPUTED = re.compile(
    r".*rotary_emb\.inv_freq$|^lm_head\.weight$|.*\.ple_embedding\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)$"
)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the network: its `destination`, the type it is held in, and the stored tensors it is read from.

    `stored` is the floating type of the checkpoint's numbers, None where they are quantized. `settle` is called when
    all of it has been read.
    """

    destination: Destination
    held: torch.dtype | Format
    stored: torch.dtype | None
    readings: tuple[Reading, ...]
    settle: Settle | None = None

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        return tuple(reading.info for reading in self.readings)

    @property
    def nbytes(self) -> int:
        """Bytes in the lease, alignment included."""
        return _held_bytes(self.destination, self.held)

    @property
    def form(self) -> str:
        """The name of the held type in tables."""
        return title(self.held) if isinstance(self.held, Format) else NAMES[self.held]

    def carve(self, carve: Carve) -> Weight:
        """Its memory, from a `carve(shape, dtype)` that aligns to ALIGNMENT; the content is uninitialized."""
        if isinstance(self.held, Format):
            rows, cols = self.destination.shape
            return weight_of(self.held, rows, cols, carve)
        return carve(self.destination.shape, self.held)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """All tensors of a network, checked against the checkpoint before any allocation. `aim`: the requested target
    format.

    `tables` stay in their files and count in no figure here but `parameters`.
    """

    tensors: tuple[PlannedTensor, ...]
    aim: Format | None = None
    tables: tuple[PlannedTable, ...] = ()
    sources: frozenset[SourceFile] = field(
        init=False, repr=False, compare=False
    )  # the files that all of it is read from

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "sources", frozenset(info.source for one in (*self.tensors, *self.tables) for info in one.parts)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the weights lease."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        return sum(tensor.destination.elements for tensor in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The most frequent floating type of the checkpoint's numbers; BF16 where there is none."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in self.tensors:
            if tensor.stored is not None:
                sizes[tensor.stored] += tensor.destination.elements
        return sizes.most_common(1)[0][0] if sizes else torch.bfloat16

    @property
    def form(self) -> str:
        """The types of the matrices, by bytes: "BF16", "int4-g128+int8"."""
        sizes: Counter[str] = Counter()
        for tensor in (one for one in self.tensors if not one.destination.wide):
            sizes[tensor.form] += tensor.nbytes
        return "+".join(form for form, _ in sizes.most_common())

    @property
    def note(self) -> str:
        """A message for the user about the plan; may be empty."""
        aim = self.aim
        if aim is None or aim.bits > 4:
            return ""
        fell = [
            one
            for one in self.tensors
            if one.stored is not None and one.held == INT8 and one.destination.bits <= aim.bits
        ]
        if not fell:
            return ""
        shape = list(fell[0].destination.shape)
        return (
            f"{len(fell)} tensors are held in int8 instead of {title(aim)}: their columns are no multiple of"
            f" {BLOCK_COLUMNS} ({shape})"
        )

    @property
    def weights_of(self) -> Mapping[str, int]:
        """Bytes of the weights lease per quantization option; empty where the weights are already converted or stored
        quantized.
        """
        if self.aim is not None or all(tensor.stored is None for tensor in self.tensors if not tensor.destination.wide):
            return MappingProxyType({})
        return MappingProxyType(
            {name: sum(_turned_bytes(tensor, aim) for tensor in self.tensors) for name, aim in CHOICES.items()}
        )

    def changed(self) -> bool:
        """Whether a file to be read was changed or deleted since the plan was made."""
        return any(not source.unchanged() for source in self.sources)

    def staging(self, device: torch.device) -> tuple[int, int, int]:
        """How many staging buffers the conversion needs, and the bytes of each one's raw buffer and workspace; zeros
        for none.
        """
        taken = [tensor for tensor in self.tensors if any(reading.take for reading in tensor.readings)]
        if not taken:
            return 0, 0, 0
        raw = max(reading.staging_bytes for tensor in taken for reading in tensor.readings)
        rows = [
            padded_columns(tensor.held, tensor.destination.shape[1])
            for tensor in taken
            if isinstance(tensor.held, Format)
        ]
        tile = min(tile_elements(device), max(tensor.destination.elements for tensor in taken))
        return default_readers(), _aligned(raw), _aligned(4 * max(*rows, 1, tile))

    def staging_bytes(self, device: torch.device) -> int:
        """Bytes that are needed only while the weights are read."""
        count, raw, work = self.staging(device)
        return count * (raw + work)


def plan_weights(wanted: Iterable[Destination], checkpoint: Checkpoint, aim: Format | None = None) -> WeightPlan:
    """Match `wanted` with the checkpoint; floating matrices become `aim` on load, or stay unchanged (None).

    ModelError names the first tensor that is missing, unknown, or of another shape or type. `wanted` is followed only
    as far as the checkpoint has its tensors: a config may ask for any number of layers.
    """
    packings = read_packings(checkpoint.config)
    found = [_planned_table(d, checkpoint) if d.in_file else _planned(d, checkpoint, packings, aim) for d in wanted]
    planned = tuple(tensor for tensor in found if isinstance(tensor, PlannedTensor))
    tables = tuple(table for table in found if isinstance(table, PlannedTable))
    known = {info.name for tensor in found for info in tensor.parts} | set(_ignored(planned, packings))
    known |= {info.name for table in tables for info in (*table.groups, table.scale) if info is not None}
    if packings is not None:
        known |= set(_zero_biases(planned, checkpoint))
        known |= {name for name in checkpoint.tensors if CACHE_SCALES.match(name)}
    unknown = sorted(
        name
        for name, info in checkpoint.tensors.items()
        if info.named and name not in known and not RECOMPUTED.match(name)
    )
    if unknown:
        raise ModelError(
            f"{checkpoint.name} has {len(unknown)} tensors that its config.json does not account for, the first is"
            f" {unknown[0]}; the config and the weights belong to different models"
        )
    return WeightPlan(planned, aim, tables)


def _zero_biases(planned: Iterable[PlannedTensor], checkpoint: Checkpoint) -> Iterator[str]:
    """Biases that quantizers store with every matrix, which are 0 in these families. ModelError for a nonzero one."""
    for source in (source for tensor in planned for source in tensor.destination.sources):
        bias = checkpoint.tensors.get(f"{_module(source)}.bias")
        if bias is None or bias.shape != source.shape[:1] or bias.dtype not in STORED:
            continue
        if not is_all_zero(bias):
            raise ModelError(
                f"{checkpoint.name}: tensor {bias.name} has numbers other than 0; the family has no biases: get another"
                " model"
            )
        yield bias.name


def _planned_table(destination: Destination, checkpoint: Checkpoint) -> PlannedTable:
    """A table with rows in a floating type, in FP8 with one scale, or in NVFP4."""
    destination = _as_stored(destination, checkpoint)
    name, groups = scale_name(destination.sources[0].name), ()
    scale = checkpoint.tensors.get(f"{name}_2")
    if scale is not None:
        parts, groups = (_table_parts(destination, checkpoint, which) for which in (0, 1))
    else:
        scale = checkpoint.tensors.get(name)
        kinds = STORED if scale is None else {"F8_E4M3": torch.float8_e4m3fn}
        parts = tuple(_part(source, checkpoint, kinds) for source in destination.sources)
    if scale is not None and (scale.elements != 1 or scale.dtype not in STORED):
        raise ModelError(
            f"{checkpoint.name}: tensor {scale.name} is {scale.dtype} {list(scale.shape)}; one floating number is"
            " needed"
        )
    return PlannedTable(destination, parts, None if scale is None else replace(scale, shape=(1,)), groups)


def _table_parts(destination: Destination, checkpoint: Checkpoint, which: int) -> tuple[TensorInfo, ...]:
    """The numbers (0) or the scales (1) of every part of an NVFP4 table."""
    packing = Nvfp4("NVFP4")
    found = (
        _packed_part(source, packing.layout(source.shape[0], source.shape[1]).parts[which], checkpoint, packing)
        for source in destination.sources
    )
    return tuple(info for info in found if info is not None)


def _packing(destination: Destination, packings: Packings | None) -> Packing | None:
    return packings.of_all(_module(source) for source in destination.sources) if packings is not None else None


def _ignored(planned: Iterable[PlannedTensor], packings: Packings | None) -> Iterator[str]:
    for tensor in planned:
        packing = _packing(tensor.destination, packings) if tensor.stored is None else None
        suffixes = packing.ignored if packing is not None else packings.extras if packings is not None else ()
        yield from (f"{_module(source)}.{suffix}" for source in tensor.destination.sources for suffix in suffixes)


def _planned(
    destination: Destination, checkpoint: Checkpoint, packings: Packings | None, aim: Format | None
) -> PlannedTensor:
    destination = _as_stored(destination, checkpoint)
    packing = _packing(destination, packings)
    packed = [packing is not None and _is_packed(source, checkpoint, packing) for source in destination.sources]
    if packing is not None and all(packed):
        return _planned_packed(destination, checkpoint, packing)
    if any(packed):
        is_so, is_not = (destination.sources[packed.index(wanted)].name for wanted in (True, False))
        raise ModelError(
            f"{checkpoint.name} stores only some of the tensors that belong together quantized ({is_so}, but not"
            f" {is_not}); store all of them so"
        )
    parts = tuple(_part(source, checkpoint) for source in destination.sources)
    kinds = sorted({part.dtype for part in parts})
    if len(kinds) > 1:
        one, other = (next(part for part in parts if part.dtype == kind) for kind in kinds[:2])
        raise ModelError(
            f"{checkpoint.name} stores tensors that belong together in different types "
            f"({one.name} {one.dtype}, {other.name} {other.dtype}); store them in one type"
        )
    stored = STORED[kinds[0]]
    turned = turned_into(destination, aim)
    if destination.sources[0].by_columns:
        return PlannedTensor(
            destination, turned or stored, stored, *read_by_columns(destination.sources[0], parts[0], turned)
        )
    if turned is not None:
        readings = [_quantizing(part, row) for part, row in _stacked(parts)]
        return PlannedTensor(destination, turned, stored, tuple(readings))
    readings = [Reading(part, row, part.shape[0]) for part, row in _stacked(parts)]
    held = torch.float32 if destination.wide else stored
    settle = partial(_widen_and_turn, stored, destination.turn) if held != stored or destination.turn else None
    return PlannedTensor(destination, held, stored, tuple(readings), settle)


def _as_stored(destination: Destination, checkpoint: Checkpoint) -> Destination:
    """The destination with the one tensor that replaces all its sources, where the checkpoint has it. ModelError if it
    has both.
    """
    joined = destination.joined
    if joined is None or joined.name not in checkpoint.tensors:
        return destination
    twice = next((source.name for source in destination.sources if source.name in checkpoint.tensors), None)
    if twice is not None:
        raise ModelError(
            f"{checkpoint.name} stores the same weights twice, as {joined.name} and as {twice}; keep one of them, or"
            " get the model again"
        )
    return replace(destination, sources=(as_stored(joined, checkpoint.tensors[joined.name]),))


def _widen_and_turn(stored: torch.dtype, turn: Turn, target: Weight) -> None:
    """Widen the `stored` type to fp32, then apply the network's transform."""
    if not isinstance(target, torch.Tensor):
        return
    if target.dtype != stored:
        widen(stored, target)
    if turn == "plus_one":
        target.add_(1)
    elif turn == "minus_exp":
        target.exp_().neg_()
    elif turn == "taps_first":
        channels, _, taps = target.shape
        target.view(taps, channels).copy_(target.view(channels, taps).t().clone())


def turned_into(destination: Destination, aim: Format | None) -> Format | None:
    """The format of a floating tensor where matrices become `aim`; None where it stays unchanged."""
    if aim is None or destination.wide or len(destination.shape) != 2 or destination.bits >= FLOATING:
        return None
    unsuited = aim.bits == 4 and destination.shape[1] % BLOCK_COLUMNS
    return INT8 if aim.bits < destination.bits or unsuited else aim


def _stacked(parts: Iterable[TensorInfo]) -> Iterator[tuple[TensorInfo, int]]:
    """Each part with its first row."""
    row = 0
    for part in parts:
        yield part, row
        row += part.shape[0]


def _quantizing(part: TensorInfo, row: int) -> Reading:
    name = f"{part.source.shown}: tensor {part.name}"

    def take(
        values: torch.Tensor, first: int, target: QuantizedWeight, work: torch.Tensor, faster: Quantizer | None
    ) -> None:
        quantize_into(target.row_slice(first, first + values.shape[0]), values, name, work, faster)

    return Reading(part, row, part.shape[0], take=take)


def _module(source: Source) -> str:
    return source.name.removesuffix(".weight")


def _is_packed(source: Source, checkpoint: Checkpoint, packing: Packing) -> bool:
    """Whether the checkpoint stores this matrix packed rather than in a floating type."""
    found = checkpoint.tensors.get(source.name)
    if len(source.shape) != 2 or (found is not None and found.dtype in STORED):
        return False
    rows, cols = source.shape
    return any(f"{_module(source)}.{part.suffix}" in checkpoint.tensors for part in packing.layout(rows, cols).parts)


def _planned_packed(destination: Destination, checkpoint: Checkpoint, packing: Packing) -> PlannedTensor:
    readings: list[Reading] = []
    layout, row = None, 0
    for source in destination.sources:
        rows, cols = source.shape
        layout = packing.layout(rows, cols)
        for part in layout.parts:
            info = _packed_part(source, part, checkpoint, packing)
            if info is not None:
                readings.append(_unpacking(info, part, row, rows))
        row += rows
    if layout is None:
        raise ValueError(f"{destination.key} has no sources")
    finish, name = layout.finish, f"{checkpoint.name}: {destination.sources[0].name}"

    def settle(weight: Weight) -> None:
        if not isinstance(weight, QuantizedWeight):
            return
        if finish is not None:
            finish(weight, name)
        if layout.held.name in ("fp8", "nvfp4"):
            refuse_zero_scales(
                weight,
                [(f"{checkpoint.name}: tensor {source.name}", source.shape[0]) for source in destination.sources],
            )

    return PlannedTensor(destination, layout.held, None, tuple(readings), settle)


def _packed_part(source: Source, part: StoredPart, checkpoint: Checkpoint, packing: Packing) -> TensorInfo | None:
    name = f"{_module(source)}.{part.suffix}"
    found = checkpoint.tensors.get(name)
    if found is None:
        if part.optional:
            return None
        raise ModelError(
            f"{checkpoint.name} lacks the tensor {name} of {packing.title}, wanted {list(part.shape)}; get it again"
        )
    if found.dtype not in part.dtypes:
        raise ModelError(
            f"{checkpoint.name}: tensor {name} is stored as {found.dtype}, but config.json has a {KEY} of"
            f" {packing.title}, which stores {', '.join(part.dtypes)}; the config and the weights belong to different"
            " models"
        )
    if found.shape != part.shape and not (found.shape == () and part.shape == (1,)):
        raise ModelError(
            f"{checkpoint.name}: tensor {name}: wanted {list(part.shape)} for {list(source.shape)} by {KEY}"
            f" ({packing.title}), found {list(found.shape)} in the file"
        )
    return found


def _unpacking(info: TensorInfo, part: StoredPart, row: int, rows: int) -> Reading:
    part_take, name = part.take, f"{info.source.shown}: tensor {info.name}"
    if part_take is None:
        return Reading(info, row, rows, part.piece)

    def take(
        values: torch.Tensor, first: int, target: QuantizedWeight, work: torch.Tensor, faster: Quantizer | None
    ) -> None:
        part_take(values, first, target, name)

    return Reading(info, row, rows, take=take, step=part.step, most=UNPACK_BYTES, rowwise=False)


def _part(source: Source, checkpoint: Checkpoint, kinds: Mapping[str, torch.dtype] = STORED) -> TensorInfo:
    found = checkpoint.tensors.get(source.name)
    if found is None:
        module = f"{_module(source)}."
        packed = (
            next((name for name in checkpoint.tensors if name.startswith(module)), None)
            if checkpoint.config.get(KEY) is None
            else None
        )
        why = (
            f"it has {packed}, but config.json has no {KEY} that says what that is"
            if packed
            else "the checkpoint is incomplete"
        )
        raise ModelError(f"{checkpoint.name} lacks the tensor {source.name}, wanted {list(source.shape)}; {why}")
    if tuple(found.shape) != source.in_file:
        raise ModelError(
            f"{checkpoint.name}: tensor {source.name}: wanted {list(source.in_file)} by config.json, found"
            f" {list(found.shape)} in the file"
        )
    if found.dtype not in kinds:
        raise ModelError(
            f"{checkpoint.name}: tensor {source.name} is stored as {found.dtype}; supported: {', '.join(kinds)}"
        )
    return replace(found, shape=source.shape) if source.stored else found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _held_bytes(destination: Destination, held: torch.dtype | Format) -> int:
    if isinstance(held, Format):
        rows, cols = destination.shape
        return aligned_bytes(held, rows, cols, ALIGNMENT)
    return _aligned(destination.elements * held.itemsize)


def _turned_bytes(tensor: PlannedTensor, aim: Format) -> int:
    turned = turned_into(tensor.destination, aim) if tensor.stored is not None else None
    return _held_bytes(tensor.destination, turned or tensor.held)
