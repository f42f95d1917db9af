"""What was published in small floats becomes int8 or int4 by `onedesk quantize`: as if its meaning had been rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kept_kernels import keep_kernels
from onedesk.service.cli.quantize import quantize_model
from onedesk.service.config import Config
from onedesk.service.engine.session import draw_blueprint
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model import convert as convert_module
from onedesk.service.model.arrival import WeightArrival
from onedesk.service.model.converted import WEIGHTS
from onedesk.service.model.weights import WeightPlan
from onedesk.service.quant.formats import CHOICES, INT8
from onedesk.service.quant.quantize_weights import quantize
from onedesk.service.quant.weight import QuantizedWeight, dequantize
from published import CASES, MIXED_KINDS, MODELOPT, mixed_layers, write_mixed, write_published

BY_NAME = {case.name: case for case in CASES}
CPU = torch.device("cpu")


def config_of(tmp_path: Path) -> Config:
    """A tree with the compiled kernels, which choose the way of rounding."""
    if not (tmp_path / "cache").exists():  # a library that is loaded must not be written over
        keep_kernels(tmp_path / "cache")
    return Config(tree=tmp_path, model_roots=(tmp_path / "models",))


def plan_of(folder: Path, cache: Path, quant: str) -> WeightPlan:
    return draw_blueprint(open_checkpoint(folder), CPU, 64, quant, cache).plan


def check(folder: Path, cache: Path, quant: str, wanted: dict[str, torch.Tensor]) -> None:
    """Every matrix is read from the cache, and is its meaning rounded."""
    plan = plan_of(folder, cache, quant)
    assert {info.source.path.name for tensor in plan.tensors for info in tensor.parts} == {WEIGHTS}
    pool = Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))
    arrival = WeightArrival(plan, pool.lease("test", "weights", plan.nbytes), None, None).start()
    arrival.finish()
    for tensor in plan.tensors:
        weight = arrival.tensors[tensor.destination.key]
        merged = torch.cat([wanted[source.name] for source in tensor.destination.sources])
        if not isinstance(weight, QuantizedWeight):
            assert torch.equal(weight.float(), merged)
            continue
        aim = INT8 if tensor.destination.bits == 8 else CHOICES[quant]
        assert weight.format == (INT8 if merged.shape[1] % 32 else aim)
        values = merged.bfloat16() if tensor.destination.key == "embedding" else merged
        assert torch.equal(dequantize(weight), dequantize(quantize(values, weight.format))), tensor.destination.key


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("name", ["fp8-scale-inv", "modelopt-fp8", "modelopt-nvfp4", "nvfp4-packed", "modelopt-mxfp8"])
def test_it_is_the_meaning_rounded(tmp_path: Path, name: str, quant: str) -> None:
    folder, wanted = write_published(tmp_path / "models" / "model", BY_NAME[name])
    stored = plan_of(folder, tmp_path / "cache", quant).form
    done = quantize_model("model", quant, None, True, config_of(tmp_path))
    assert done.written
    assert done.format != stored
    check(folder, tmp_path / "cache", quant, wanted)
    assert not quantize_model("model", quant, None, True, config_of(tmp_path)).written


def test_tiles_and_a_mixed_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onedesk.service.model.requantize.tile_elements", lambda device: 700)
    config = MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": mixed_layers("model.")}
    folder, wanted = write_mixed(tmp_path / "models" / "model", config, MIXED_KINDS)
    quantize_model("model", "int8", None, True, config_of(tmp_path))
    check(folder, tmp_path / "cache", "int8", wanted)


def test_the_stated_need_has_room_for_both_forms(tmp_path: Path) -> None:
    folder, _ = write_published(tmp_path / "models" / "model", BY_NAME["modelopt-nvfp4"])
    seen: list[int] = []
    made = convert_module._ConversionBuffers.carve

    def carve(self: convert_module._ConversionBuffers, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = made(self, shape, dtype)
        seen.append(self._bytes.numel() - self._cursor)
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(convert_module._ConversionBuffers, "carve", carve)
        quantize_model("model", "int8", None, True, config_of(tmp_path))
    assert 0 <= min(seen) < 1 << 20  # what the debug zones and the alignment leave
    assert folder.is_dir()


def test_integers_are_not_rounded_to_other_integers(tmp_path: Path) -> None:
    folder, _ = write_published(tmp_path / "models" / "model", BY_NAME["gptq-sym-32-no-order"], tied=False)
    quantize_model("model", "int8", None, True, config_of(tmp_path))
    assert plan_of(folder, tmp_path / "cache", "int8").form == "int4-g32+int8"
