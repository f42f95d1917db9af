"""The fused operations of the reference against their formulas, row by row, over a cache with shuffled blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.kernels.forward_batch import (
    BLOCK,
    DecodeBatch,
    ForwardBatch,
    HeadShape,
    NormWeight,
    PrefillChunk,
    RotaryTable,
)
from onedesk.service.kernels.operands import AttentionHeads, AttentionOperands
from onedesk.service.kernels.reference import TILE_ELEMENTS, ReferenceKernels
from onedesk.service.quant.weight import Format, QuantizedWeight, Weight, dequantize, pack_nibbles

FORMATS = [
    Format("int8", 8, 0, True),
    Format("int8", 8, 32, True),
    Format("fp8", 8, 128, True),
    Format("int4", 4, 32, True),
    Format("int4", 4, 128, False),
]
EPS = 1e-6


def random_weight(held: Format | None, rows: int, cols: int, generator: torch.Generator) -> Weight:
    if held is None:
        return torch.randn(rows, cols, generator=generator).bfloat16()
    scales = torch.rand(rows, held.groups(cols), generator=generator) / 8 + 0.01
    if held.bits == 8:
        q = torch.randint(-127, 128, (rows, cols), generator=generator, dtype=torch.int8)
        return QuantizedWeight(
            held, rows, cols, q if held.name == "int8" else q.float().to(torch.float8_e4m3fn), scales
        )
    data = pack_nibbles(torch.randint(0, 16, (rows, cols), generator=generator, dtype=torch.uint8))
    offsets = None if held.symmetric else (-8 * scales).half()
    return QuantizedWeight(held, rows, cols, data, scales.half(), offsets)


def wide(weight: Weight) -> torch.Tensor:
    return dequantize(weight).double() if isinstance(weight, QuantizedWeight) else weight.double()


def normed(x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.double()


@pytest.mark.parametrize(
    "held", [None, *FORMATS], ids=lambda held: "bf16" if held is None else f"{held.name}-{held.group}"
)
@pytest.mark.parametrize(("rows", "cols"), [(6, 32), (10, 200), (34, 129), (TILE_ELEMENTS // 300 + 5, 300)])
def test_products_match_dequantized_weight(held: Format | None, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(rows + cols)
    kernels, weight = ReferenceKernels(), random_weight(held, rows, cols, generator)
    x, norm = torch.randn(3, cols, generator=generator), NormWeight(torch.rand(cols, generator=generator), EPS)
    product, product_of_normed = x.double() @ wide(weight).t(), normed(x, norm) @ wide(weight).t()

    def buffer(width: int) -> torch.Tensor:
        return torch.full((3, width), float("nan"))

    def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))

    same(kernels.linear(x, weight, buffer(rows)), product)
    same(kernels.norm_linear(x, norm, weight, buffer(rows), buffer(cols)), product_of_normed)
    residual = torch.randn(3, rows, generator=generator)
    wanted = residual.double() + product
    assert kernels.linear_add(x, weight, residual, buffer(rows)) is residual
    same(residual, wanted)
    gate, up = product_of_normed.chunk(2, -1)
    same(
        kernels.norm_gate_up(x, norm, weight, buffer(rows // 2), buffer(cols), buffer(rows)),
        gate * torch.sigmoid(gate) * up,
    )
    ids = torch.tensor([rows - 1, 0, 2])
    same(kernels.embed(ids, weight, buffer(cols)), wide(weight)[ids])


def test_a_weight_is_never_widened_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = random_weight(FORMATS[0], 3000, 300, generator)
    tiles: list[int] = []

    def watched(part: QuantizedWeight) -> torch.Tensor:
        tiles.append(part.rows * part.cols)
        return dequantize(part)

    monkeypatch.setattr("onedesk.service.kernels.reference.dequantize", watched)
    ReferenceKernels().linear(torch.randn(1, 300), weight, torch.empty(1, 3000))
    assert sum(tiles) == 3000 * 300
    assert max(tiles) <= TILE_ELEMENTS


class Scene:
    """A paged cache of one layer with sequences of random past, and the attention over plain lists of rows."""

    def __init__(self, shape: HeadShape, pasts: list[int], count: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        self.pasts = pasts
        width = max(pasts) // BLOCK + count // BLOCK + 2
        total = len(pasts) * width + 1
        self.tables = (
            torch.randperm(total, generator=self.generator)[: len(pasts) * width].view(len(pasts), width).int()
        )
        # Unwritten slots may hold anything and must not be read.
        self.keys, self.values = (
            torch.full((total, shape.kv_heads, BLOCK, shape.head_dim), float("nan")) for _ in range(2)
        )
        angles = torch.rand(width * BLOCK, shape.head_dim // 2, generator=self.generator) * 6
        self.rotary = RotaryTable(angles.cos(), angles.sin())
        self.norms = [NormWeight(torch.rand(shape.head_dim, generator=self.generator) + 0.5, EPS) for _ in range(2)]
        self.past = []
        for row, past in enumerate(pasts):
            k, v = (torch.randn(past, shape.kv_heads, shape.head_dim, generator=self.generator) for _ in range(2))
            for position in range(past):
                block, slot = int(self.tables[row, position // BLOCK]), position % BLOCK
                self.keys[block, :, slot], self.values[block, :, slot] = k[position], v[position]
            self.past.append(([*k.double()], [*v.double()]))

    def rotated(self, x: torch.Tensor, norm: NormWeight, position: int) -> torch.Tensor:
        """x [heads, dim] normed and rotated, pairs as complex numbers."""
        half = self.shape.head_dim // 2
        x = normed(x, norm)
        pairs = torch.complex(x[:, :half], x[:, half:]) * torch.complex(
            self.rotary.cos[position].double(), self.rotary.sin[position].double()
        )
        return torch.cat((pairs.real, pairs.imag), dim=1)

    def expected(self, sequence: int, position: int, qkv: torch.Tensor) -> torch.Tensor:
        """The mixed row of one token, which is added to the sequence."""
        shape = self.shape
        split = qkv.view(-1, shape.head_dim).split((shape.heads, shape.kv_heads, shape.kv_heads))
        q, k = (self.rotated(part, norm, position) for part, norm in zip(split[:2], self.norms, strict=True))
        keys, values = self.past[sequence]
        keys.append(k)
        values.append(split[2].double())
        group, rows = shape.heads // shape.kv_heads, []
        for head in range(shape.heads):
            seen = torch.stack([key[head // group] for key in keys])
            weights = (seen @ q[head] * shape.head_dim**-0.5).softmax(0)
            rows.append(weights @ torch.stack([value[head // group] for value in values]))
        return torch.cat(rows)

    def check(self, batch: ForwardBatch, sequences: list[int], positions: list[int], reserve: bool) -> None:
        kernels, shape = ReferenceKernels(), self.shape
        if reserve:
            wanted = kernels.workspace_spec(shape, self.tables.shape[1] * BLOCK, torch.float32, 1)
            kernels.reserve([torch.empty(size, dtype=dtype) for size, dtype in wanted])
        qkv = torch.randn(len(positions), shape.qkv, generator=self.generator)
        expected = [self.expected(*place, row) for *place, row in zip(sequences, positions, qkv.clone(), strict=True)]
        out = torch.full((len(positions), shape.queries), float("nan"))
        heads = AttentionHeads(shape, *self.norms, self.rotary)
        assert kernels.attend(heads, AttentionOperands(qkv, self.keys, self.values, batch, out)) is out
        torch.testing.assert_close(out.double(), torch.stack(expected), rtol=1e-4, atol=1e-5)
        for sequence, position in zip(sequences, positions, strict=True):
            block, slot = int(self.tables[sequence, position // BLOCK]), position % BLOCK
            torch.testing.assert_close(
                self.keys[block, :, slot].double(), self.past[sequence][0][position], rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(self.values[block, :, slot].double(), self.past[sequence][1][position])


SHAPES = st.builds(
    lambda kv_heads, group, half: HeadShape(kv_heads * group, kv_heads, 2 * half),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 12),
)


@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, past=st.integers(0, 70), count=st.integers(1, 40), seed=st.integers(0, 999), reserve=st.booleans())
def test_a_chunk_sees_its_past_and_itself(shape: HeadShape, past: int, count: int, seed: int, reserve: bool) -> None:
    scene = Scene(shape, [past], count, seed)
    positions = list(range(past, past + count))
    chunk = PrefillChunk(torch.tensor(positions, dtype=torch.int32), scene.tables, past + count, start=past)
    scene.check(chunk, [0] * count, positions, reserve)


@settings(max_examples=25, deadline=None)
@given(
    shape=SHAPES,
    pasts=st.lists(st.integers(0, 70), min_size=1, max_size=8),
    more=st.integers(0, 40),
    seed=st.integers(0, 999),
)
def test_a_step_sees_each_sequence_by_itself(shape: HeadShape, pasts: list[int], more: int, seed: int) -> None:
    scene = Scene(shape, pasts, 1, seed)
    batch = DecodeBatch(torch.tensor(pasts, dtype=torch.int32), scene.tables, max(pasts) + 1 + more)
    scene.check(batch, list(range(len(pasts))), pasts, reserve=True)
