"""Checkpoints whose matrices are not all in one format: each is read as what its name says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.service.catalog.plan import plan_model
from onedesk.service.engine import session
from onedesk.service.errors import ModelError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.arrival import WeightArrival
from onedesk.service.model.weights import WeightPlan
from onedesk.service.quant.mixed import Packings, plain_name
from onedesk.service.quant.published import read_packings
from onedesk.service.quant.weight import QuantizedWeight, Weight, dequantize
from published import MIXED_KINDS, MODELOPT, change_config, change_tensors, compressed, mixed_layers, write_mixed

CPU = torch.device("cpu")


def plan_of(folder: Path) -> WeightPlan:
    return session.draw_blueprint(open_checkpoint(folder), CPU, 64).plan


def loaded(plan: WeightPlan) -> dict[str, Weight]:
    pool = Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))
    arrival = WeightArrival(plan, pool.lease("test", "weights", plan.nbytes), None, None).start()
    arrival.finish()
    return arrival.tensors


def check(folder: Path, wanted: dict[str, torch.Tensor]) -> dict[str, str]:
    """Every matrix means what it means on disk; returns the format of each."""
    plan = plan_of(folder)
    tensors = loaded(plan)
    for tensor in plan.tensors:
        merged = torch.cat([wanted[source.name] for source in tensor.destination.sources])
        weight = tensors[tensor.destination.key]
        assert torch.equal(dequantize(weight) if isinstance(weight, QuantizedWeight) else weight.float(), merged), (
            tensor.destination.key
        )
    return {tensor.destination.key: tensor.form for tensor in plan.tensors}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
def test_named_layers_use_their_format_and_others_stay_plain(tmp_path: Path, prefix: str) -> None:
    config = MODELOPT | {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": mixed_layers(prefix),
        "kv_cache_scheme": {"num_bits": 8},
    }
    folder, wanted = write_mixed(tmp_path / "model", config, MIXED_KINDS)
    forms = check(folder, wanted)
    assert {forms[f"{i}.{key}"] for i in range(2) for key in ("qkv", "output")} == {"fp8"}
    assert (forms["0.gate_up"], forms["0.down"], forms["1.gate_up"], forms["1.down"]) == (
        "nvfp4",
        "nvfp4",
        "BF16",
        "fp8",
    )
    assert forms["embedding"] == "BF16"


def test_groups_say_it_where_no_layer_is_named(tmp_path: Path) -> None:
    def group(bits: int, size: int | None, *targets: str) -> dict[str, Any]:
        return {
            "weights": {"num_bits": bits, "type": "float", "group_size": size, "dynamic": False},
            "targets": list(targets),
        }

    config = MODELOPT | {
        "quant_algo": "MIXED_PRECISION",
        "config_groups": {
            "group_mxfp8_attention": group(8, 32, "model.layers.0.self_attn", "model.layers.1.self_attn"),
            "group_nvfp4": group(4, 16, "model.layers.0.mlp"),
            "group_fp8": group(8, None, "model.layers.1.mlp.down_proj"),
        },
    }
    folder, wanted = write_mixed(tmp_path / "model", config, MIXED_KINDS)
    assert set(check(folder, wanted).values()) == {"fp8", "nvfp4", "BF16", "F32"}


def test_compressed_tensors_groups_are_chosen_by_target(tmp_path: Path) -> None:
    config = compressed("mixed-precision", strategy="channel")
    eight = compressed("float-quantized", type="float", strategy="channel")["config_groups"]["group_0"]
    four = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)[
        "config_groups"
    ]["group_0"]
    config["config_groups"] = {
        "group_0": eight | {"targets": ["re:.*self_attn.*"], "format": "float-quantized"},
        "group_1": four | {"targets": [r"re:^model\.layers\.0\.mlp\..*_proj$"], "format": "nvfp4-pack-quantized"},
        "group_2": eight | {"targets": ["model.layers.1.mlp.down_proj"], "format": "float-quantized"},
    }
    kinds = {"self_attn": "fp8-channel", "layers.0.mlp": "nvfp4-packed", "layers.1.mlp.down": "fp8-channel"}
    folder, wanted = write_mixed(tmp_path / "model", config, kinds)
    forms = check(folder, wanted)
    assert (forms["0.qkv"], forms["0.gate_up"], forms["1.gate_up"], forms["1.down"]) == ("fp8", "nvfp4", "BF16", "fp8")


def test_an_older_export_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder, wanted = write_mixed(tmp_path / "model", MODELOPT, MIXED_KINDS)
    change_config(folder, quantization_config=None)
    settings = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "quantized_layers": mixed_layers("model."),
    }
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": settings})
    )
    assert check(folder, wanted)["0.gate_up"] == "nvfp4"
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": 7}))
    with pytest.raises(ModelError, match=r"hf_quant_config\.json has quantization = 7; an object is needed"):
        open_checkpoint(folder)


def test_kv_cache_scales_are_ignored_next_to_floats(tmp_path: Path) -> None:
    named = {"model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 16}}
    config = MODELOPT | {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": named,
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    folder, wanted = write_mixed(tmp_path / "model", config, {"layers.0.mlp": "modelopt-nvfp4"})

    def scales(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {
            f"model.layers.{i}.self_attn.{part}_proj.{part}_scale": torch.tensor(1.0) for i in range(2) for part in "kv"
        }

    change_tensors(folder, scales)
    assert check(folder, wanted)["0.qkv"] == "BF16"


def test_a_layer_that_is_stored_otherwise_than_named_is_refused(tmp_path: Path) -> None:
    named = mixed_layers("model.")
    config = MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": named}
    folder, _ = write_mixed(tmp_path / "model", config, MIXED_KINDS)
    change_config(
        folder,
        quantization_config=config | {"quantized_layers": named | {"model.layers.0.mlp": {"quant_algo": "MXFP8"}}},
    )
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp\.gate_proj\.weight is stored as U8, .* ModelOpt MXFP8, which stores F8_E4M3"
    ):
        plan_of(folder)
    left = {name: entry for name, entry in named.items() if "layers.0.mlp" not in name}
    change_config(folder, quantization_config=config | {"quantized_layers": left})
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp\.gate_proj\.weight: wanted \[256, 128\] by config\.json, found \[256, 64\]"
    ):
        plan_of(folder)
    change_config(folder, quantization_config=config)
    change_tensors(
        folder, lambda tensors: tensors.update({"model.layers.0.mlp.gate_proj.pre_quant_scale": torch.ones(128)})
    )
    with pytest.raises(
        ModelError, match=r"1 tensors that its config\.json does not account for, the first is .*pre_quant_scale"
    ):
        plan_of(folder)


def test_layer_names_are_compared_without_prefix():
    assert plain_name("model.language_model.layers.3.mlp.experts") == plain_name("language_model.layers.3.mlp.experts")
    assert plain_name("lm_head") == "lm_head"
    packings = read_packings(
        {
            "quantization_config": MODELOPT
            | {"quant_algo": "MIXED_PRECISION", "quantized_layers": mixed_layers("model.")}
        }
    )
    assert isinstance(packings, Packings)
    found = packings.of("model.language_model.layers.0.mlp.experts.7.gate_proj")
    assert found is not None
    assert found.title == "ModelOpt NVFP4"
    assert packings.of("model.layers.1.mlp.gate_proj") is packings.of("mtp.layers.0.mlp.gate_proj") is None


def test_a_plan_of_a_mixed_folder_counts_each_kind_as_it_is_said(tmp_path: Path) -> None:
    from onedesk.service.catalog.known_configs import FLASH_NEXT
    from onedesk.service.config import Config

    named: dict[str, Any] = {
        f"model.language_model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(48)
    }
    named["model.language_model.layers.1.ple.ple_embedding.ngram_embedding"] = {"quant_algo": "FP8"}
    named["mtp.layers.0.mlp.experts"] = {"quant_algo": "FP8_PB_WO", "group_size": 128}
    quantized = MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": named}
    (tmp_path / "config.json").write_text(json.dumps(FLASH_NEXT | {"quantization_config": quantized}))
    mine = plan_model(str(tmp_path), Config(), memory=121 << 30)["forms"]
    published = plan_model("Qwen3.8-Flash-Next", Config(), memory=121 << 30)["forms"]
    same = next(row for row in published if row["format"] == "NVFP4 experts, FP8 table and draft; table in its file")
    assert [row["bytes"]["weights"] for row in mine] == [same["bytes"]["weights"]] * 2
    # as RadixArk writes it: one algorithm, and patterns of what it is not for
    patterns = [
        "*.self_attn.*",
        "*.linear_attn.*",
        "*.mlp.gate*",
        "*.mlp.shared_expert.*",
        "*hyper_connection*",
        "*.ple.*",
        "mtp.*",
        "lm_head",
    ]
    quantized = MODELOPT | {"quant_algo": "NVFP4", "ignore": patterns}
    (tmp_path / "config.json").write_text(json.dumps(FLASH_NEXT | {"quantization_config": quantized}))
    mine = plan_model(str(tmp_path), Config(), memory=121 << 30)["forms"]
    same = next(row for row in published if row["format"] == "NVFP4 experts, BF16 table; table in its file")
    assert mine[0]["bytes"]["weights"] == same["bytes"]["weights"]
