"""Scales that no quantizer writes are refused with their tensor and index; blocks of zeros under a scale of 0 are
accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.engine.session import draw_blueprint
from onedesk.service.errors import ModelError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.arrival import WeightArrival
from onedesk.service.quant import damage
from onedesk.service.quant.formats import FP8_BLOCKS, FP8_ROWS, MXFP8, NVFP4, weight_of
from onedesk.service.quant.weight import dequantize, pack_nibbles
from published import CASES, change_tensors, write_published

BY_NAME = {case.name: case for case in CASES}
UP = "model.layers.1.mlp.up_proj."
OVER_ZERO = (
    r"tensor model\.layers\.1\.mlp\.up_proj\.weight has numbers other than 0 under a scale of 0 at row 0, column 0"
)


@settings(max_examples=60, deadline=None)
@given(
    held=st.sampled_from([FP8_ROWS, FP8_BLOCKS, MXFP8, NVFP4]),
    rows=st.integers(1, 9),
    cols=st.integers(1, 300),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 999),
)
def test_first_zeroed_group_is_found(
    monkeypatch_module: pytest.MonkeyPatch, held: object, rows: int, cols: int, zeros: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    allocate = lambda shape, dtype: torch.zeros(shape, dtype=dtype)  # noqa: E731
    weight = weight_of(held, rows, cols, allocate)  # pyright: ignore[reportArgumentType]
    groups = weight.scales.shape[1]
    numbers = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    numbers[torch.rand(rows, cols, generator=generator) < zeros] = 0
    if held is NVFP4:
        numbers &= 15
        pack_nibbles(numbers, weight.data)
        meaning = numbers & 7
        factors = (torch.rand(rows, 1, generator=generator) > 0.1).float()
        weight.factors = factors  # pyright: ignore[reportAttributeAccessIssue]
    else:
        weight.data.view(torch.uint8).copy_(numbers)
        meaning = numbers & 127
    weight.scales.copy_((torch.rand(rows, groups, generator=generator) > 0.3).float())
    size = cols if groups == 1 else weight.group
    live = torch.stack([meaning[:, at : at + size].ne(0).any(1) for at in range(0, cols, size)], dim=1)
    scale = weight.scales.float() * (weight.factors if weight.factors is not None else 1)
    wrong = (live & (scale == 0)).nonzero()
    assert damage.zero_scaled(weight) == (tuple(wrong[0].tolist()) if len(wrong) else None)
    if not len(wrong) and held is NVFP4:
        assert torch.equal(dequantize(weight) == 0, meaning == 0)


@pytest.fixture(scope="module")
def monkeypatch_module() -> object:
    """A few rows at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(damage, "SCALES_AT_ONCE", 8)
        patch.setattr(damage, "NUMBERS_AT_ONCE", 300)
        yield patch


def load(folder: Path) -> None:
    plan = draw_blueprint(open_checkpoint(folder), torch.device("cpu"), 64).plan
    pool = Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))
    lease = pool.lease("test", "weights", plan.nbytes)
    try:
        WeightArrival(plan, lease, None, None).start().finish()
    finally:
        lease.release()


def first(suffix: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    """Replace the first number of a scale."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        scales = tensors[UP + suffix].float()
        scales.view(-1)[0] = value
        tensors[UP + suffix] = scales.to(tensors[UP + suffix].dtype)

    return change


SCALES = [("fp8-channel", "weight_scale"), ("fp8-scale-inv", "weight_scale_inv"), ("modelopt-fp8", "weight_scale")]
SMALL = [("modelopt-nvfp4", "weight_scale"), ("modelopt-nvfp4", "weight_scale_2"), ("nvfp4-packed", "weight_scale")]


@pytest.mark.parametrize(("name", "suffix"), [*SCALES, *SMALL])
def test_zero_scale_over_numbers_is_refused(tmp_path: Path, name: str, suffix: str) -> None:
    folder, _ = write_published(tmp_path / "model", BY_NAME[name])
    change_tensors(folder, first(suffix, 0.0))
    with pytest.raises(ModelError, match=OVER_ZERO):
        load(folder)


@pytest.mark.parametrize(("name", "suffix"), [*SCALES, *SMALL])
def test_a_scale_below_zero_is_named_with_its_place(tmp_path: Path, name: str, suffix: str) -> None:
    folder, _ = write_published(tmp_path / "model", BY_NAME[name])
    change_tensors(folder, first(suffix, -0.5))
    with pytest.raises(
        ModelError,
        match=rf"tensor .*up_proj\.{suffix} has a scale below zero at \[0.*\] \(-0\.5\); the checkpoint is damaged",
    ):
        load(folder)


@pytest.mark.parametrize(("name", "suffix"), SCALES[:2])
def test_zeros_under_zero_scale_are_accepted(tmp_path: Path, name: str, suffix: str) -> None:
    folder, _ = write_published(tmp_path / "model", BY_NAME[name])

    def change(tensors: dict[str, torch.Tensor]) -> None:
        first(suffix, 0.0)(tensors)
        tensors[UP + "weight"].view(torch.uint8)[:128, : 128 if "inv" in suffix else None] = 0
        if suffix == "weight_scale":
            tensors[UP + suffix][:128] = 0

    change_tensors(folder, change)
    load(folder)
