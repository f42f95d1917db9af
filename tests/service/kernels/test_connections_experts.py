"""Hyper-connections and sparse experts in one compiled call each, against plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from onedesk.service.kernels.cpu.cpu_kernels import CpuKernels
from onedesk.service.kernels.forward_batch import FEW_ROWS, DecodeBatch, NormWeight
from onedesk.service.kernels.operands import (
    ConnectionOperands,
    ExpertOperands,
    ExpertWeights,
    HyperConnection,
    SharedWeights,
)
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.feed_forward import Experts
from onedesk.service.model.layers import Pass, Scratch, Widths
from onedesk.service.model.shape import ExpertShape
from onedesk.service.model.streams import GatedResidual
from onedesk.service.quant.formats import INT8, NVFP4, int4
from onedesk.service.quant.quantize_weights import quantize
from onedesk.service.quant.weight import Format, QuantizedWeight, Weight

EPS = 1e-6
FORMATS = ["float32", "bfloat16", "int8", "int4", "nvfp4"]
# Integer formats meet activations of 15 bits: 1 / 65534 of the largest of a span, summed over the columns.
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-5, "int8": 1e-3, "int4": 1e-3, "nvfp4": 1e-3}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def weight(name: str, rows: int, cols: int, seed: int = 0) -> Weight:
    values = numbers(rows, cols, seed=seed) * cols**-0.5
    if name == "nvfp4":
        data = torch.randint(
            0,
            256,
            (rows, NVFP4.row_bytes(cols)),
            generator=torch.Generator().manual_seed(seed + rows),
            dtype=torch.uint8,
        )
        scales = torch.rand(rows, NVFP4.groups(cols)).add_(0.5).to(torch.float8_e4m3fn)
        return QuantizedWeight(NVFP4, rows, cols, data, scales, None, torch.full((rows, 1), 0.3 * cols**-0.5))
    held = {"int8": INT8, "int4": int4(32), "int8-g16": Format("int8", 8, 16, True)}
    return quantize(values, held[name]) if name in held else values.to(getattr(torch, name))


def connection_of(name: str, hidden: int, *, inject: bool, count: int = 3, rank: int = 21) -> HyperConnection:
    wide = count * hidden
    norm = NormWeight(numbers(count, hidden).abs() + 0.5, EPS)
    matrices = weight(name, rank, wide), weight(name, wide, rank)
    return HyperConnection(count, norm, *matrices, weight("float32", count, wide, seed=2) if inject else None)


def rows_of(streams: torch.Tensor, connection: HyperConnection) -> ConnectionOperands:
    count, hidden = len(streams), streams.shape[1] // connection.count
    wide = (count, streams.shape[1])
    widths = (wide, (count, connection.down.shape[0]), wide, (count, hidden), (count, connection.count))
    return ConnectionOperands(
        streams.clone(), *(torch.full(shape, float("nan")) for shape in widths), torch.ones(count, hidden)
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("inject", [False, True])
def test_a_joint_at_once_is_its_operations(library: ctypes.CDLL, name: str, inject: bool) -> None:
    connection, kernels = connection_of(name, 48, inject=inject), CpuKernels(library, threads=2)
    streams = numbers(FEW_ROWS, 3 * 48)
    wanted = GatedResidual(connection).read(rows_of(streams, connection), ReferenceKernels())
    whole = rows_of(streams, connection)
    assert kernels.read_connection(connection, whole)
    for count in (FEW_ROWS, 5, 1):
        found = rows_of(streams[:count], connection)
        assert kernels.read_connection(connection, found)
        torch.testing.assert_close(found.read, wanted.read[:count], rtol=BOUNDS[name], atol=BOUNDS[name])
        assert torch.equal(found.read, whole.read[:count]), "not the bits of the batch"
        if inject:
            torch.testing.assert_close(found.weights, wanted.weights[:count], rtol=1e-5, atol=1e-5)
            assert not found.found.any()
            added = numbers(count, 48, seed=5)
            found.found.copy_(added)
            kernels.inject(found)
            expected = streams[:count].view(count, 3, 48) + found.weights[:, :, None] * added[:, None]
            torch.testing.assert_close(found.streams, expected.flatten(1))
        else:
            assert found.found.eq(1).all()


def test_uncompiled_connection_falls_back_and_is_logged_once(
    library: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    kernels, reference = CpuKernels(library), ReferenceKernels()
    connections = [connection_of("float32", 40, inject=True), connection_of("float32", 24, inject=True)]
    with caplog.at_level("INFO"):
        for connection in connections * 2:
            streams = numbers(2, 3 * connection.norm.weight.shape[1])
            assert not kernels.read_connection(connection, rows_of(streams, connection))
            found, wanted = (
                GatedResidual(connection).read(rows_of(streams, connection), which) for which in (kernels, reference)
            )
            torch.testing.assert_close(found.read, wanted.read)
            for at, which in ((found, kernels), (wanted, reference)):
                at.found.fill_(0.5)
                which.inject(at)
            torch.testing.assert_close(found.streams, wanted.streams)
    assert len([record for record in caplog.records if "HyperConnection" in record.getMessage()]) == 1
    connection = connection_of("float32", 48, inject=True)
    assert not kernels.read_connection(connection, rows_of(numbers(FEW_ROWS + 1, 144), connection)), (
        "more rows than a product of few"
    )


HIDDEN, WIDTH = 64, 32


def experts_of(name: str, count: int, active: int, *, normalized: bool = True, shared: bool = True) -> ExpertWeights:
    parts = [(weight(name, 2 * WIDTH, HIDDEN, seed=i), weight(name, HIDDEN, WIDTH, seed=i)) for i in range(count)]
    beside = SharedWeights(
        weight("float32", 1, HIDDEN), weight(name, 96, HIDDEN, seed=70), weight(name, HIDDEN, 48, seed=71)
    )
    router = weight("bfloat16", count, HIDDEN, seed=72)
    return ExpertWeights(
        active, normalized, router, [up for up, _ in parts], [down for _, down in parts], beside if shared else None
    )


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    widths = Widths(HIDDEN, 2, 1, 16, 0, 32, ExpertShape(8, 3, WIDTH, shared=48, normalized=True).buffers(HIDDEN))
    pool = Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))
    lease = pool.lease("test", "scratch", Scratch.nbytes(widths, FEW_ROWS + 2, 1, torch.float32))
    yield Scratch(lease, widths, FEW_ROWS + 2, 1, torch.float32)
    lease.release()


def through(experts: ExpertWeights, x: torch.Tensor, kernels: ReferenceKernels, scratch: Scratch) -> torch.Tensor:
    """What the layer adds to rows of 1."""
    out, count = torch.ones_like(x), len(x)
    batch = DecodeBatch(torch.zeros(count, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), 1)
    ids = torch.zeros(count, dtype=torch.int64)
    at = Pass(ids, batch, None, scratch, scratch.rows(count), kernels, x, out)  # pyright: ignore
    Experts(None, experts).run(at)
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("active", "normalized", "shared"), [(3, True, True), (1, False, False), (8, False, True)])
def test_experts_at_once_are_their_operations(
    library: ctypes.CDLL, scratch: Scratch, name: str, active: int, normalized: bool, shared: bool
) -> None:
    experts, kernels = experts_of(name, 8, active, normalized=normalized, shared=shared), CpuKernels(library, threads=2)
    x = numbers(FEW_ROWS, HIDDEN)
    wanted = through(experts, x, ReferenceKernels(), scratch)
    whole = through(experts, x, kernels, scratch)
    torch.testing.assert_close(whole, wanted, rtol=BOUNDS[name], atol=BOUNDS[name])
    assert (kernels.compiled, kernels.plain) == (1, 0)
    for row in (x[:1], x[3:4], x[2:7]):
        first = int(torch.nonzero((x == row[0]).all(1))[0])
        assert torch.equal(through(experts, row, kernels, scratch), whole[first : first + len(row)]), (
            "not the bits of the batch"
        )


def test_nan_scores_select_an_expert_and_propagate(library: ctypes.CDLL, scratch: Scratch) -> None:
    experts, x = experts_of("float32", 8, 3), numbers(2, HIDDEN)
    x[0, 0] = float("nan")
    found = through(experts, x, CpuKernels(library), scratch)
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1:], through(experts, x[1:], ReferenceKernels(), scratch), rtol=1e-5, atol=1e-5)


def test_equal_experts_are_selected_in_order(library: ctypes.CDLL, scratch: Scratch) -> None:
    experts, x = experts_of("float32", 8, 3), numbers(1, HIDDEN)
    assert isinstance(experts.router, torch.Tensor)
    experts.router.zero_()
    first = ExpertWeights(3, True, experts.router[:3], experts.gate_up[:3], experts.down[:3], experts.shared)
    kernels = CpuKernels(library)
    out, buffer = torch.ones_like(x), numbers(1, 3)
    views = scratch.rows(1)
    spare = views["routed"], views["expert_gated"], views["shared_gate"], views["shared_gated"], x
    assert kernels.run_experts(first, ExpertOperands(x, out, buffer, *spare))
    torch.testing.assert_close(through(experts, x, kernels, scratch), out)


def test_uncompiled_expert_format_falls_back(
    library: ctypes.CDLL, scratch: Scratch, caplog: pytest.LogCaptureFixture
) -> None:
    experts, x, kernels = experts_of("float32", 8, 3), numbers(2, HIDDEN), CpuKernels(library)
    experts.gate_up = [weight("int8-g16", 2 * WIDTH, HIDDEN, seed=i) for i in range(8)]
    with caplog.at_level("INFO"):
        for _ in range(2):
            torch.testing.assert_close(
                through(experts, x, kernels, scratch), through(experts, x, ReferenceKernels(), scratch)
            )
    assert len([record for record in caplog.records if "ExpertWeights" in record.getMessage()]) == 1
    many = numbers(FEW_ROWS + 1, HIDDEN)
    torch.testing.assert_close(
        through(experts, many, kernels, scratch), through(experts, many, ReferenceKernels(), scratch)
    )
