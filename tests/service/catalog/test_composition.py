"""Counting a network from its config: tensor by tensor what transformers writes, and to the byte what was published."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from onedesk.service.catalog.composition import Composition, compose
from onedesk.service.catalog.forms import WITH_TABLE, form_of_config
from onedesk.service.catalog.known_configs import PUBLISHED, published_name
from onedesk.service.engine.session import sketch
from onedesk.service.errors import ModelError
from onedesk.service.loader.checkpoint import Checkpoint, open_checkpoint
from tiny_families import FAMILIES, WITH_VISION, write_family
from tiny_vision import SEEING, write_seeing

# How a tensor's name tells its kind; the first that matches.
KINDS = {
    r"visual\.": "vision",
    r"ngram_embedding\.": "table",
    r"\.ple\.": "ngram",
    r"hyper_connection": "residual",
    r"\.indexer\.": "indexer",
    r"self_attn\.": "attention",
    r"linear_attn\.": "linear",
    r"shared_expert_gate|mlp\.gate\.": "router",
    r"shared_expert\.": "shared",
    r"mlp\.experts\.": "experts",
    r"mlp\.": "dense",
    r"embed_tokens": "embedding",
    r"lm_head": "head",
    r"norm": "norms",
}


def stored(checkpoint: Checkpoint) -> Counter[tuple[str, tuple[int, ...]]]:
    """(kind, shape) of every tensor of floats; the shards of the table are one tensor."""
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    rows = 0
    for name, info in checkpoint.tensors.items():
        kind = next(kind for pattern, kind in KINDS.items() if re.search(pattern, name))
        if info.dtype == "I64":  # multipliers and offsets of the hash
            continue
        if kind == "table":
            rows += info.shape[0]
            found[kind, (rows, info.shape[1])] += 1
            del found[kind, (rows - info.shape[0], info.shape[1])]
            found[kind, (rows, info.shape[1])] = 1
        else:
            found[kind, info.shape] += 1
    return found


def counted(network: Composition) -> Counter[tuple[str, tuple[int, ...]]]:
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for tensors in network.tensors:
        kind = tensors.kind if tensors.part == "text" else tensors.part
        found[kind, tensors.shape] += tensors.count
    return found


@pytest.mark.parametrize(("family", "vision"), [(f, False) for f in FAMILIES] + [(f, True) for f in WITH_VISION])
def test_exactly_the_tensors_of_transformers_are_counted(tmp_path: Path, family: str, vision: bool) -> None:
    checkpoint = open_checkpoint(write_family(tmp_path / "tiny", family, vision=vision))
    network = compose(checkpoint.config)
    assert network.family == family
    assert counted(network) == stored(checkpoint)
    assert network.parameters == sum(info.elements for info in checkpoint.tensors.values() if info.dtype != "I64")
    assert sum(network.kinds.values()) == network.parameters


@pytest.mark.parametrize("family", sorted(SEEING))
def test_every_tensor_of_a_model_that_sees_is_counted(tmp_path: Path, family: str) -> None:
    checkpoint = open_checkpoint(write_seeing(tmp_path / "tiny", family))
    network = compose(checkpoint.config)
    assert network.parameters == sum(info.elements for info in checkpoint.tensors.values() if info.dtype != "I64")
    towers = sum(info.elements for name, info in checkpoint.tensors.items() if "visual" in name)
    assert network.kinds["vision"] == towers


def test_other_widths_of_every_part_are_followed(tmp_path: Path) -> None:
    changes = {
        "hc_count": 2,
        "hc_lowrank": 8,
        "num_experts": 6,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 16,
        "head_dim": 16,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 8,
        "ple_layer_ids": [1, 3],
        "heads_per_ngram": 4,
        "indexer_n_heads": 3,
        "ngram_vocab_size_base": 500,
    }
    checkpoint = open_checkpoint(write_family(tmp_path / "tiny", "qwen4_exp", **changes))
    network = compose(checkpoint.config)
    assert network.parameters == sum(info.elements for info in checkpoint.tensors.values() if info.dtype != "I64")


def test_flash_next_matches_its_published_index_in_bytes():
    network = compose(PUBLISHED["Qwen3.8-Flash-Next"])
    # total_size of the BF16 checkpoint; 35 of its numbers are the hash's, I64
    assert 2 * network.parameters + 8 * 35 == 359_999_963_128
    kinds = {kind: round(count / 1e9, 3) for kind, count in network.kinds.items()}
    assert kinds["experts"] == 120.796
    assert kinds["table"] == 51.2
    assert kinds["linear"] == 2.087
    assert kinds["attention"] + kinds["indexer"] == pytest.approx(0.617, abs=0.002)
    assert (kinds["residual"], kinds["shared"], kinds["router"], kinds["ngram"]) == (0.641, 0.236, 0.063, 0.033)
    assert kinds["embedding"] + kinds["head"] == pytest.approx(1.271, abs=0.002)
    assert (kinds["vision"], round(kinds["mtp"], 2)) == (0.449, 2.61)
    assert network.active / 1e9 == pytest.approx(6.7, abs=0.05)
    routed = sum(tensors.active for tensors in network.tensors if tensors.kind == "experts" and tensors.part == "text")
    assert routed / 1e9 == pytest.approx(2.36, abs=0.005)
    assert sum(tensors.count for tensors in network.tensors if tensors.part == "vision") == 333
    # 31 with all experts of a layer in two tensors
    assert (
        sum(tensors.count for tensors in network.tensors if tensors.part == "mtp" and tensors.kind != "experts") + 2
        == 31
    )
    shape = sketch(network.module, network.config, torch.device("cuda")).kv_shape
    assert shape.token_bytes == (24 << 10) + 1536  # keys and values, and the indexer's pooled keys in fp32


def test_the_n_gram_table_has_the_published_number_of_rows():
    (table,) = (tensors for tensors in compose(PUBLISHED["Qwen3.8-Flash-Next"]).tensors if tensors.kind == "table")
    assert table.shape[0] * table.count == 320_001_536 == 128 * 2_500_012


@pytest.mark.parametrize(
    ("title", "gigabytes", "tolerance"),
    [
        ("BF16", 360.0, 1e-4),
        ("FP8 experts and table", 185.6, 1e-3),
        ("NVFP4 experts, BF16 table", 173.8 * 1.073741824, 3e-3),
        ("NVFP4 experts, FP8 table", 126 * 1.073741824, 2e-3),
        ("NVFP4 experts, 4-bit table", 109.0, 3e-3),
        ("NVFP4 experts, MXFP8 layers, 4-bit table", 105.9, 5e-3),
    ],
)
def test_file_sizes_match_each_published_form(title: str, gigabytes: float, tolerance: float):
    form = next(form for form in WITH_TABLE if form.title == title)
    assert form.file_bytes(compose(PUBLISHED["Qwen3.8-Flash-Next"])) / 1e9 == pytest.approx(gigabytes, rel=tolerance)


def test_sizes_of_the_names_are_those_of_the_names():
    for name, config in PUBLISHED.items():
        network = compose(config)
        said = re.search(r"-([\d.]+)B", name)
        text = network.parameters - network.kinds.get("vision", 0) - network.kinds.get("mtp", 0)
        if said:  # a name is rounded, and the small ones leave the embedding out
            assert text / 1e9 == pytest.approx(float(said[1]), rel=0.15), name
        assert math.isclose(sum(network.kinds.values()), network.parameters)


def test_names_are_found_for_any_publisher_and_packing():
    assert published_name("Qwen/Qwen3-4B-Instruct-2507") == "Qwen3-4B"
    assert published_name("nvidia/Qwen3-30B-A3B-NVFP4") == "Qwen3-30B-A3B"
    assert published_name("qwen3.8-27b") == "Qwen3.5-27B"
    assert published_name("RadixArk/Qwen3.8-Flash-Next-NVFP4") == "Qwen3.8-Flash-Next"
    assert published_name("Qwen3-4BX") is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: qwen2, "),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_experts": -8}, "num_experts = -8"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types that are not 4"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types that are not 4"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000"),
        ({"ple_layer_ids": [True]}, "ple_layer_ids = "),
        ({"ngram_vocab_size_base": 2**31 - 1, "heads_per_ngram": 2**20}, "the rows must divide the width, at most 256"),
    ],
)
def test_a_config_that_says_nonsense_is_refused_by_its_key(changes: dict[str, object], told: str):
    config = {"model_type": "qwen4_exp"} | FAMILIES["qwen4_exp"][2] | changes
    with pytest.raises(ModelError, match=re.escape(told)):
        compose(config)


def test_an_alias_of_the_model_type_is_the_same_model():
    config = {"model_type": "qwen3_8_flash_next"} | FAMILIES["qwen4_exp"][2]
    assert compose(config).family == "qwen4_exp"
    assert form_of_config(config, 4).title == "BF16"
