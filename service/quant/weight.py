"""A quantized weight and its meaning: w = q * scale (+ offset), with one scale per row and group of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

# int4: a block of 32 columns takes 16 bytes. Byte j has column j in its low nibble and column j + 16 in its high one.
BLOCK_COLUMNS = 32
BLOCK_BYTES = 16
# The nibble that means 0 in a symmetric int4 weight.
ZERO_NIBBLE = 8
# Values of an nvfp4 nibble (E2M1): a sign, two exponent bits, one mantissa bit.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are stored: `bits` per number, `group` columns per scale (0: the whole row).

    A symmetric int4 means nibble - 8 (its scales may be negative). An asymmetric one has an offset per scale. Nibbles
    of nvfp4 mean E2M1, and each row has a factor in addition to its scales.
    """

    name: str
    bits: int
    group: int
    symmetric: bool

    def groups(self, cols: int) -> int:
        """Scales per row. The last group may be shorter than the others."""
        return 1 if self.group == 0 else -(-cols // self.group)

    def row_bytes(self, cols: int) -> int:
        """Bytes of numbers per row, without scales."""
        return -(-cols // BLOCK_COLUMNS) * BLOCK_BYTES if self.bits == 4 else cols


@dataclass(slots=True)
class QuantizedWeight:
    """A weight [rows, cols].

    data: int8 [rows, cols] (int8), float8_e4m3fn [rows, cols] (fp8) or uint8 [rows, ceil(cols / 32) * 16] (int4,
    nvfp4). scales [rows, groups]: fp32 for int8 and fp8, fp16 for int4, float8_e4m3fn for nvfp4. offsets: fp16 [rows,
    groups] for asymmetric int4, otherwise None. factors: fp32 [rows, 1] for nvfp4, otherwise None. Columns from `cols`
    on in the last block of a row of nibbles are padding and must not be used.
    """

    format: Format
    rows: int
    cols: int
    data: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def group(self) -> int:
        """Columns per scale; `cols` if a row has one scale."""
        return self.format.group or self.cols

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Numbers, scales, and offsets or factors if present."""
        return tuple(part for part in (self.data, self.scales, self.offsets, self.factors) if part is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, without alignment between them."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def row_slice(self, start: int, stop: int) -> QuantizedWeight:
        """Rows start..stop-1 as views of the same memory."""
        offsets = self.offsets[start:stop] if self.offsets is not None else None
        factors = self.factors[start:stop] if self.factors is not None else None
        data = self.data[start:stop]
        return QuantizedWeight(self.format, data.shape[0], self.cols, data, self.scales[start:stop], offsets, factors)

    def take_rows(self, rows: torch.Tensor) -> QuantizedWeight:
        """Copies of the rows [n] int64, in this order."""
        offsets = self.offsets[rows] if self.offsets is not None else None
        factors = self.factors[rows] if self.factors is not None else None
        # Not every device can gather float8, but all can gather bytes.
        data = self.data.view(torch.uint8)[rows].view(self.data.dtype)
        scales = self.scales.view(torch.uint8)[rows].view(self.scales.dtype)
        return QuantizedWeight(self.format, rows.shape[0], self.cols, data, scales, offsets, factors)

    def put_rows(self, rows: torch.Tensor, other: QuantizedWeight) -> None:
        """Copy the rows of `other`, of the same format and columns, to the rows [n] int64."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.view(torch.uint8)[rows] = theirs.view(torch.uint8)


Weight: TypeAlias = torch.Tensor | QuantizedWeight


def unpack_nibbles(data: torch.Tensor, cols: int) -> torch.Tensor:
    """Nibbles uint8 [rows, cols] from int4 blocks [rows, ceil(cols / 32) * 16], without padding."""
    rows, nbytes = data.shape
    blocks = data.view(rows, nbytes // BLOCK_BYTES, 1, BLOCK_BYTES)
    return torch.cat((blocks & 15, blocks >> 4), dim=2).view(rows, 2 * nbytes)[:, :cols]


def pack_nibbles(nibbles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """int4 blocks uint8 [rows, ceil(cols / 32) * 16] from contiguous nibbles uint8 [rows, cols], into the contiguous
    `out` if given.

    The last block is padded with the nibble 8.
    """
    rows, cols = nibbles.shape
    missing = -cols % BLOCK_COLUMNS
    if missing:
        nibbles = torch.cat((nibbles, nibbles.new_full((rows, missing), ZERO_NIBBLE)), dim=1)
    if out is None:
        out = nibbles.new_empty((rows, nibbles.shape[1] // 2))
    if not nibbles.numel():
        return out
    # Eight columns at a time as 64-bit words, four words per block: words 0 and 1 plus 16 times words 2 and 3. No byte
    # carries into the next.
    words = nibbles.view(torch.int64).view(-1)
    joined = torch.empty_like(words)
    torch.add(words[:-2], words[2:], alpha=16, out=joined[:-2])
    out.view(torch.int64).view(-1, 2).copy_(joined.view(-1, 4)[:, :2])
    return out


def dequantize(weight: QuantizedWeight, columns: slice | None = None) -> torch.Tensor:
    """The numbers of the weight, fp32 [rows, cols], or of a range of columns with step 1; `row_slice` and `take_rows`
    select rows.
    """
    start, stop, _ = (columns or slice(None)).indices(weight.cols)
    if weight.format.bits == 4:
        first = start // BLOCK_COLUMNS
        data = weight.data[:, first * BLOCK_BYTES : -(-stop // BLOCK_COLUMNS) * BLOCK_BYTES]
        begin = first * BLOCK_COLUMNS
        nibbles = unpack_nibbles(data.contiguous(), stop - begin)[:, start - begin :]
        q = _meaning(nibbles, weight.format)
    else:
        q = weight.data[:, start:stop].float()
    q *= _spread(weight.scales, weight, start, stop)
    if weight.offsets is not None:
        q += _spread(weight.offsets, weight, start, stop)
    if weight.factors is not None:
        q *= weight.factors
    return q


def _meaning(nibbles: torch.Tensor, held: Format) -> torch.Tensor:
    """Nibbles as fp32 numbers before scaling."""
    if held.name == "nvfp4":
        return torch.tensor(E2M1, device=nibbles.device)[nibbles.int()]
    q = nibbles.float()
    return q.sub_(ZERO_NIBBLE) if held.symmetric else q


def _spread(values: torch.Tensor, weight: QuantizedWeight, start: int, stop: int) -> torch.Tensor:
    """One value per group as one value per column of start..stop-1, fp32."""
    if values.shape[1] == 1:
        return values.float()
    groups = torch.arange(start, stop, device=values.device) // weight.group
    return values.float().index_select(1, groups)
