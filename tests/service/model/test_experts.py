"""Experts as they are published: all of a layer in one tensor or each by itself, in floats or quantized; and what is
wrong with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.service.engine import session
from onedesk.service.errors import FileError, ModelError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.arrival import WeightArrival
from onedesk.service.model.weights import WeightPlan
from onedesk.service.quant.weight import QuantizedWeight, Weight, dequantize
from published import BLOCKS, CASES, MODELOPT, change_config, change_tensors
from safetensors.torch import load_file, save_file
from tiny_families import write_family

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}
EXPERT = re.compile(r"(?P<layer>.*\.mlp)\.experts\.(?P<number>\d+)\.(?P<which>gate|up|down)_proj\.weight")
COUNT, WIDTH, HIDDEN = 8, 32, 64
LAYER = "model.layers.0.mlp"
NVFP4_EXPERTS = MODELOPT | {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"model.language_model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(4)
    },
}

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In BF16, each expert by itself, as transformers writes them."""
    folder = write_family(tmp_path_factory.mktemp("experts") / "model", "qwen3_moe", mlp_only_layers=[])
    change_tensors(
        folder, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})
    )
    return folder


def copy(original: Path, folder: Path, change: Callable[[Tensors], None] = lambda tensors: None, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((original / "config.json").read_text())
    tensors = load_file(original / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    change_config(folder, **config)
    return folder


def join(tensors: Tensors) -> None:
    """All experts of a layer in two tensors, gate above up."""
    for layer in sorted({match["layer"] for name in tensors if (match := EXPERT.fullmatch(name))}):
        each = [
            [tensors.pop(f"{layer}.experts.{i}.{which}_proj.weight") for which in ("gate", "up", "down")]
            for i in range(COUNT)
        ]
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in each])
        tensors[f"{layer}.experts.down_proj"] = torch.stack([down for _, _, down in each])


def plan_of(folder: Path, quant: str = "none") -> WeightPlan:
    return session.draw_blueprint(open_checkpoint(folder), CPU, 64, quant).plan


def loaded(folder: Path, quant: str = "none") -> dict[str, Weight]:
    plan = plan_of(folder, quant)
    pool = Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))
    arrival = WeightArrival(plan, pool.lease("test", "weights", plan.nbytes), None, None).start()
    arrival.finish()
    return arrival.tensors


def values(weight: Weight) -> torch.Tensor:
    return dequantize(weight) if isinstance(weight, QuantizedWeight) else weight.float()


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_both_layouts_are_the_same_in_memory(original: Path, tmp_path: Path, quant: str) -> None:
    apart, together = loaded(original, quant), loaded(copy(original, tmp_path / "joined", join), quant)
    assert apart.keys() == together.keys()
    for key, weight in apart.items():
        assert torch.equal(values(weight), values(together[key])), key
    gate_up = apart["0.experts_gate_up"]
    assert gate_up.shape == (COUNT * 2 * WIDTH, HIDDEN)
    if quant == "none":
        tensors = load_file(original / "model.safetensors")
        assert torch.equal(
            values(gate_up)[2 * WIDTH : 3 * WIDTH], tensors[f"{LAYER}.experts.1.gate_proj.weight"].float()
        )
        assert torch.equal(values(gate_up)[3 * WIDTH : 4 * WIDTH], tensors[f"{LAYER}.experts.1.up_proj.weight"].float())
    assert isinstance(apart["0.router"], torch.Tensor)


@pytest.mark.parametrize(
    ("name", "config", "form"),
    [
        ("fp8-scale-inv", BLOCKS, "fp8"),
        ("modelopt-nvfp4", NVFP4_EXPERTS, "nvfp4"),
        ("modelopt-nvfp4", MODELOPT | {"quant_algo": "NVFP4"}, "nvfp4"),
        ("modelopt-mxfp8", MODELOPT | {"quant_algo": "MXFP8"}, "fp8"),
        ("gptq-sym-32-no-order", BY_NAME["gptq-sym-32-no-order"].config, "int4-g32"),
    ],
)
def test_experts_quantized_one_by_one_keep_their_values(
    original: Path, tmp_path: Path, name: str, config: dict[str, Any], form: str
) -> None:
    """Only the experts, as Qwen's FP8 and the NVFP4 checkpoints of Qwen3.8-Flash-Next have it; everything else in
    BF16.
    """
    wanted: Tensors = {}

    def quantize(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(3)
        for expert in [expert for expert in tensors if EXPERT.fullmatch(expert)]:
            stored, wanted[expert] = BY_NAME[name].make(*tensors.pop(expert).shape, generator)
            tensors |= {expert.removesuffix("weight") + suffix: value for suffix, value in stored.items()}

    folder = copy(original, tmp_path / "model", quantize, quantization_config=config)
    forms = {tensor.destination.key: tensor.form for tensor in plan_of(folder).tensors}
    assert {forms[f"{i}.{part}"] for i in range(4) for part in ("experts_gate_up", "experts_down")} == {form}
    assert {forms[f"{i}.{part}"] for i in range(4) for part in ("qkv", "output", "router")} == {"BF16"}
    tensors = loaded(folder)
    for layer in range(4):
        start = f"model.layers.{layer}.mlp.experts."
        gate_up = torch.cat(
            [wanted[f"{start}{i}.{which}_proj.weight"] for i in range(COUNT) for which in ("gate", "up")]
        )
        down = torch.cat([wanted[f"{start}{i}.down_proj.weight"] for i in range(COUNT)])
        assert torch.equal(values(tensors[f"{layer}.experts_gate_up"]), gate_up)
        assert torch.equal(values(tensors[f"{layer}.experts_down"]), down)


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name) if name in tensors else None


def joined_and(change: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    def both(tensors: Tensors) -> None:
        join(tensors)
        change(tensors)

    return both


def cut(name: str, *place: slice) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name][place].clone()})


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (
            joined_and(
                lambda t: t.update({f"{LAYER}.experts.3.up_proj.weight": torch.zeros(WIDTH, HIDDEN).bfloat16()})
            ),
            {},
            (
                r"stores the same weights twice, as .*layers\.0\.mlp\.experts\.gate_up_proj and as"
                r" .*experts\.3\.up_proj\.weight; keep one"
            ),
        ),
        (lambda t: None, {"num_local_experts": 9}, r"gate\.weight: wanted \[9, 64\] by config\.json, found \[8, 64\]"),
        (lambda t: None, {"num_local_experts": 6}, r"gate\.weight: wanted \[6, 64\] by config\.json, found \[8, 64\]"),
        (
            lambda t: None,
            {"num_experts": 7, "num_local_experts": 8},
            r"has num_experts = 7 and num_local_experts = 8; get the one",
        ),
        (
            drop(f"{LAYER}.experts.7.down_proj.weight"),
            {},
            r"lacks the tensor .*experts\.7\.down_proj\.weight, wanted \[64, 32\]",
        ),
        (
            lambda t: t.update({f"{LAYER}.experts.8.up_proj.weight": torch.zeros(WIDTH, HIDDEN).bfloat16()}),
            {},
            r"1 tensors that its config\.json does not account for, the first is .*experts\.8\.up_proj\.weight",
        ),
        (
            joined_and(cut(f"{LAYER}.experts.gate_up_proj", slice(0, 7))),
            {},
            r"experts\.gate_up_proj: wanted \[8, 64, 64\] by config\.json, found \[7, 64, 64\]",
        ),
        (
            joined_and(cut(f"{LAYER}.experts.down_proj", slice(None), slice(None), slice(0, 16))),
            {},
            r"experts\.down_proj: wanted \[8, 64, 32\] by config\.json, found \[8, 64, 16\]",
        ),
        (joined_and(drop(f"{LAYER}.experts.down_proj")), {}, r"lacks the tensor .*experts\.0\.down_proj\.weight"),
        (
            lambda t: t.update({f"{LAYER}.experts.2.up_proj.weight": torch.zeros(WIDTH, HIDDEN)}),
            {},
            r"stores tensors that belong together in different types",
        ),
        (
            lambda t: None,
            {"moe_intermediate_size": 16},
            r"experts\.0\.gate_proj\.weight: wanted \[16, 64\] by config\.json, found \[32, 64\]",
        ),
    ],
)
def test_experts_and_config_that_disagree_are_refused_by_name(
    original: Path, tmp_path: Path, change: Callable[[Tensors], None], config: dict[str, Any], message: str
) -> None:
    folder = copy(original, tmp_path / "model", change, **config)
    with pytest.raises(ModelError, match=message) as refused:
        plan_of(folder)
    assert len(str(refused.value)) < 300


def test_an_expert_that_lacks_its_scale_is_named(original: Path, tmp_path: Path) -> None:
    def quantize(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(3)
        for expert in [expert for expert in tensors if EXPERT.fullmatch(expert)]:
            stored, _ = BY_NAME["modelopt-nvfp4"].make(*tensors.pop(expert).shape, generator)
            tensors |= {expert.removesuffix("weight") + suffix: value for suffix, value in stored.items()}
        del tensors[f"{LAYER}.experts.5.up_proj.weight_scale_2"]

    folder = copy(original, tmp_path / "model", quantize, quantization_config=NVFP4_EXPERTS)
    with pytest.raises(
        ModelError, match=r"lacks the tensor .*experts\.5\.up_proj\.weight_scale_2 of ModelOpt NVFP4, wanted \[1\]"
    ):
        plan_of(folder)


def test_a_partial_download_names_its_missing_shards(original: Path, tmp_path: Path) -> None:
    folder = copy(original, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    index = {name: names[i % 4] for i, name in enumerate(sorted(tensors))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for file in names[:2]:
        save_file({name: tensors[name].contiguous() for name, own in index.items() if own == file}, folder / file)
    (folder / f"{names[2]}.incomplete").write_bytes(b"\0" * 100)
    with pytest.raises(
        FileError, match=r"2 of 4 shards are missing in 'model': .*00003.*, .*00004.*; a download was not"
    ):
        plan_of(folder)
    # and one of which the end is missing
    save_file({name: tensors[name].contiguous() for name, own in index.items() if own == names[3]}, folder / names[3])
    save_file({name: tensors[name].contiguous() for name, own in index.items() if own == names[2]}, folder / names[2])
    whole = (folder / names[2]).read_bytes()
    (folder / names[2]).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match=names[2]):
        plan_of(folder)
