"""Checkpoints that others published quantized: each format, built from its description, means in memory what it
means on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.service.engine import session
from onedesk.service.errors import ModelError
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.loader import chunks
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.arrival import WeightArrival
from onedesk.service.model.weights import ALIGNMENT, WeightPlan
from onedesk.service.quant.weight import QuantizedWeight, Weight, dequantize
from published import (
    AWQ,
    BLOCKS,
    CASES,
    MODELOPT,
    Case,
    change_config,
    change_tensors,
    compressed,
    quantize_embedding,
    write_meaning,
    write_published,
)
from tiny_qwen3 import write_tiny_qwen3

CPU = torch.device("cpu")
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture
def pool() -> Pool:
    return Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))


def plan_of(folder: Path, quant: str = "none") -> WeightPlan:
    return session.draw_blueprint(open_checkpoint(folder), CPU, 64, quant).plan


def loaded(plan: WeightPlan, pool: Pool) -> dict[str, Weight]:
    """All tensors of the plan, read; the lease's bytes are those of the plan."""
    lease = pool.lease("test", "weights", plan.nbytes)
    arrival = WeightArrival(plan, lease, None, None).start()
    arrival.finish()
    assert lease.free < ALIGNMENT
    return arrival.tensors


def values(weight: Weight) -> torch.Tensor:
    return dequantize(weight) if isinstance(weight, QuantizedWeight) else weight.float()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of every tensor, of as few rows as they allow."""
    monkeypatch.setattr("onedesk.service.model.weights.UNPACK_BYTES", 3000)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 5000)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_format_means_what_it_means_on_disk(tmp_path: Path, pool: Pool, case: Case) -> None:
    folder, wanted = write_published(tmp_path / "model", case)
    plan = plan_of(folder)
    assert plan.form in (f"{case.form}+BF16", f"BF16+{case.form}")
    tensors = loaded(plan, pool)
    for tensor in plan.tensors:
        merged = torch.cat([wanted[source.name] for source in tensor.destination.sources])
        found = values(tensors[tensor.destination.key])
        if case.exact:
            assert torch.equal(found, merged), tensor.destination.key
        else:  # offset = -zero * scale, zero at most 15 and scale at most 0.022, in half precision
            assert (found - merged).abs().max() <= 15 * 0.022 * 2**-11, tensor.destination.key


@pytest.mark.parametrize("name", ["gptq-asym-128", "packed-sym-128", "fp8-scale-inv", "nvfp4-packed", "modelopt-mxfp8"])
def test_it_computes_as_the_same_weights_unquantized(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(session, "choose_kernels", lambda *_: ReferenceKernels())
    folder, wanted = write_published(tmp_path / "model", BY_NAME[name])
    plain = write_meaning(tmp_path / "plain", folder, wanted)
    ids = [5, 17, 3, 250, 99, 17]
    ours, theirs = (logprobs(path, ids, pool) for path in (folder, plain))
    assert (ours - theirs).abs().max() <= 2e-3


def logprobs(folder: Path, ids: list[int], pool: Pool) -> torch.Tensor:
    opened = session.open_session(
        folder.name, session.draw_blueprint(open_checkpoint(folder), CPU, 64), session.Opening(pool, folder)
    )
    opened.settle()
    found = [one.token for one in opened.runner.logprobs(ids)]
    opened.release()
    return torch.tensor(found)


def test_float_matrices_are_still_quantized_on_request(tmp_path: Path, pool: Pool) -> None:
    """The embedding beside GPTQ matrices: 8 bits are the fewest for it."""
    folder, wanted = write_published(tmp_path / "model", BY_NAME["gptq-sym-128"])
    assert plan_of(folder).form == "int4-g128+BF16"
    plan = plan_of(folder, "int4")
    assert plan.form == "int4-g128+int8"
    assert plan.weights_of == {}
    embedding = loaded(plan, pool)["embedding"]
    name = "model.embed_tokens.weight"
    assert (values(embedding) - wanted[name]).abs().max() <= wanted[name].abs().max() / 253


def test_layers_excluded_from_quantization_stay_plain(tmp_path: Path, pool: Pool) -> None:
    folder, wanted = write_published(tmp_path / "model", BY_NAME["awq-32"], tied=False)

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("o_proj",):
            for name in [name for name in tensors if f"layers.1.self_attn.{part}" in name]:
                del tensors[name]
            tensors[f"model.layers.1.self_attn.{part}.weight"] = wanted[
                f"model.layers.1.self_attn.{part}.weight"
            ].bfloat16()

    change_tensors(folder, restore)
    tensors = loaded(plan_of(folder), pool)
    assert isinstance(tensors["0.output"], QuantizedWeight)
    assert isinstance(tensors["1.output"], torch.Tensor)
    assert isinstance(tensors["head"], torch.Tensor)


def test_a_whole_quantized_head_is_read_too(tmp_path: Path, pool: Pool) -> None:
    folder, _ = write_published(tmp_path / "model", BY_NAME["gptq-sym-128"], tied=False)
    made, wanted = BY_NAME["gptq-sym-128"].make(300, 160, torch.Generator().manual_seed(1))

    def quantized_head(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors.update({f"lm_head.{suffix}": value for suffix, value in made.items()})

    change_tensors(folder, quantized_head)
    assert torch.equal(values(loaded(plan_of(folder), pool)["head"]), wanted)


def test_a_prompt_waits_for_a_quantized_embedding(tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "choose_kernels", lambda *_: ReferenceKernels())
    folder, wanted = write_published(tmp_path / "model", BY_NAME["int8-channel"])
    change_tensors(folder, quantize_embedding)
    name = "model.embed_tokens.weight"
    assert (values(loaded(plan_of(folder), pool)["embedding"]) - wanted[name]).abs().max() <= wanted[
        name
    ].abs().max() / 253
    plain = write_meaning(tmp_path / "plain", folder, wanted)
    unsettled = session.open_session(
        "model", session.draw_blueprint(open_checkpoint(folder), CPU, 64), session.Opening(pool, tmp_path)
    )
    ours = torch.tensor([one.token for one in unsettled.runner.logprobs([5, 17, 3, 250])])
    unsettled.settle()
    unsettled.release()
    assert (ours - logprobs(plain, [5, 17, 3, 250], pool)).abs().max() <= 0.2


Change = Callable[[dict[str, torch.Tensor]], None]


def mixed(layers: dict[str, Any]) -> dict[str, Any]:
    return MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def groups(targets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A compressed-tensors config with a group for each target; settings beside those of INT8 by channel."""
    config = compressed("int-quantized", strategy="channel")
    given = config["config_groups"]["group_0"]["weights"]
    made = {
        f"group_{i}": {"targets": [target], "weights": given | own} for i, (target, own) in enumerate(targets.items())
    }
    return config | {"config_groups": made}


def configs() -> Iterator[tuple[dict[str, Any] | str, str]]:
    gptq = BY_NAME["gptq-sym-128"].config
    packed = compressed("pack-quantized", num_bits=4, strategy="group", group_size=128)
    yield "gptq", r"quantization_config = 'gptq'; an object is needed"
    yield (
        {"quant_method": "bitsandbytes"},
        (
            r"quant_method = 'bitsandbytes', which is not supported; supported: auto-round, awq, compressed-tensors,"
            r" fp8, gptq"
        ),
    )
    yield {"bits": 4}, r"quant_method = None, which is not supported"
    yield gptq | {"bits": 3}, r"bits = 3, which is not supported; supported: 4, 8"
    yield gptq | {"group_size": 48}, r"group_size = 48.*multiples of 32"
    yield gptq | {"group_size": "128"}, r"group_size = '128'"
    yield gptq | {"group_size": True}, r"group_size = True"
    yield gptq | {"sym": 1}, r"sym = 1, which is not supported; supported: True, False"
    yield gptq | {"bits": 8, "sym": False}, r"sym = False, which is not supported; supported: true with bits = 8"
    yield gptq | {"checkpoint_format": "marlin"}, r"checkpoint_format = 'marlin'"
    yield gptq | {"dynamic": ["lm_head"]}, r"dynamic = \['lm_head'\], which is not supported; supported: an object"
    yield (
        gptq | {"dynamic": {"+:.*down.*": {"bits": 3}}},
        r"quantization_config.*bits = 3, which is not supported; supported: 4, 8",
    )
    yield (
        gptq | {"dynamic": {"(a|a)*b": {"bits": 8}}},
        r"dynamic = .*, which is not supported; supported: expressions of names",
    )
    yield (
        AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"},
        r"packing_format = 'auto_round:llm_compressor', which is not supp",
    )
    yield AUTO_ROUND | {"data_type": "fp"}, r"data_type = 'fp', which is not supported"
    yield AUTO_ROUND | {"bits": 2}, r"bits = 2, which is not supported; supported: 4, 8"
    yield AUTO_ROUND | {"act_bits": 8}, r"act_bits = 8, which is not supported; supported: 16, 32"
    yield (
        AUTO_ROUND | {"extra_config": {"lm_head": 16}},
        r"extra_config.lm_head = 16, which is not supported; supported: an object",
    )
    yield (
        AUTO_ROUND | {"extra_config": {"(a|a)*b": {"bits": 8}}},
        r"extra_config = .*, which is not supported; supported: names, and expr",
    )
    yield gptq | {"pack_dtype": "int8"}, r"pack_dtype = 'int8'"
    yield AWQ | {"group_size": 128, "version": "gemv"}, r"version = 'gemv', which is not supported; supported: gemm"
    yield AWQ | {"group_size": 128, "zero_point": False}, r"zero_point = False"
    yield AWQ | {"group_size": 128, "bits": 8}, r"bits = 8"
    yield (
        BLOCKS | {"weight_block_size": [64, 64]},
        r"weight_block_size = \[64, 64\], which is not supported; supported: \[128, 128\]",
    )
    yield BLOCKS | {"fmt": "e5m2"}, r"fmt = 'e5m2'"
    yield (
        packed | {"format": "nvfp4-pack-quantized"},
        r"weights.num_bits|weights.type = 'int', which is not supported; supported: 'float'",
    )
    yield (
        packed | {"format": "mxfp4-pack-quantized"},
        r"format = 'mxfp4-pack-quantized', which is not supported; supported: 'pack-quantized'",
    )
    yield packed | {"config_groups": {}}, r"config_groups = {}, which is not supported; supported: at least one"
    yield packed | {"transform_config": {"config_groups": {"R1": {}}}}, r"transform_config = .*rotated weights"
    yield packed | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config"
    yield packed | {"kv_cache_scheme": 8}, r"kv_cache_scheme = 8, which is not supported; supported: an object"
    yield MODELOPT, r"quant_algo = None, which is not supported; supported: 'NVFP4', 'W4A16_NVFP4', 'MXFP8', 'FP8'"
    yield MODELOPT | {"quant_algo": "NVFP4_AWQ"}, r"quant_algo = 'NVFP4_AWQ'"
    yield (
        MODELOPT | {"quant_algo": "NVFP4", "group_size": 32},
        r"group_size = 32, which is not supported; supported: 16",
    )
    yield (
        MODELOPT | {"quant_algo": "MXFP8", "group_size": 16},
        r"group_size = 16, which is not supported; supported: 32",
    )
    yield (
        MODELOPT | {"quant_algo": "NVFP4", "ignore": "lm_head"},
        r"ignore = 'lm_head', which is not supported; supported: a list of at most",
    )
    yield (
        mixed({"model.layers.0.mlp": 3}),
        r"quantized_layers.model.layers.0.mlp = 3, which is not supported; supported: an object",
    )
    yield (
        mixed({"model.layers.0.mlp": {"quant_algo": "INT4_AWQ"}}),
        r"layers.0.mlp.quant_algo = 'INT4_AWQ', which is not supported; supp",
    )
    yield (
        mixed({"model.layers.0.mlp": {"quant_algo": "FP8_PB_WO", "group_size": 64}}),
        r"group_size = 64, which is not supported",
    )
    yield (
        mixed({"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}),
        r"different formats for tensors that are stored as one \(.*q_proj Mod",
    )
    yield (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        r"group_size = 32, which is not supported; supported: 16",
    )
    yield (
        groups({"re:(a|a)*b": {}, "Linear": {}}),
        r"config_groups\.group_0\.targets = \['re:\(a\|a\)\*b'\], which is not supported; supp",
    )
    yield (
        compressed("pack-quantized", num_bits=4, strategy="tensor"),
        r"config_groups.group_0.weights.strategy = 'tensor'",
    )
    yield compressed("pack-quantized", num_bits=2, strategy="group", group_size=64), r"weights.num_bits = 2"
    yield compressed("int-quantized", strategy="channel", symmetric=False), r"weights.symmetric = False"
    yield (
        compressed("int-quantized", strategy="channel", type="float"),
        r"weights.type = 'float', which is not supported; supported: 'int'",
    )
    yield compressed("float-quantized", type="float", strategy="group", group_size=32), r"weights.strategy = 'group'"
    yield (
        compressed("float-quantized", type="float", strategy="block", block_structure=[32, 32]),
        r"block_structure = \[32, 32\]",
    )


@pytest.mark.parametrize(("config", "message"), list(configs()))
def test_a_config_that_is_not_understood_is_refused_by_its_field(tmp_path: Path, config: Any, message: str) -> None:
    folder = write_tiny_qwen3(tmp_path / "tiny")
    change_config(folder, quantization_config=config)
    with pytest.raises(ModelError, match=message):
        plan_of(folder)


def values_are(folder: Path, wanted: dict[str, torch.Tensor], pool: Pool) -> WeightPlan:
    """Check that every tensor of the plan means what is wanted, but for rounded offsets; returns the plan."""
    plan = plan_of(folder)
    tensors = loaded(plan, pool)
    for tensor in plan.tensors:
        merged = torch.cat([wanted[source.name] for source in tensor.destination.sources])
        assert (values(tensors[tensor.destination.key]) - merged).abs().max() <= 15 * 0.022 * 2**-11, (
            tensor.destination.key
        )
    return plan


def unpacked(part: str, wanted: dict[str, torch.Tensor]) -> Change:
    """Store the matrices with `part` in their names in BF16, and let them mean that."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in wanted if part in name and wanted[name].ndim == 2]:
            for stored in [stored for stored in tensors if stored.startswith(name.removesuffix("weight"))]:
                del tensors[stored]
            tensors[name] = wanted[name].bfloat16()
            wanted[name] = tensors[name].float()

    return change


# As in Qwen's own repositories of Qwen3.5 in GPTQ.
EXCLUSIONS = {
    "lm_head": {},
    "model.language_model.embed_tokens": {},
    "-:.*attn.*": {},
    "-:.*shared_expert.*": {},
    "-:.*mtp.*": {},
}


def test_gptq_with_exclusions_reads_what_they_leave_in_floats(tmp_path: Path, pool: Pool) -> None:
    folder, wanted = write_published(tmp_path / "model", BY_NAME["gptq-sym-128"])
    change_tensors(folder, unpacked("self_attn", wanted))
    change_config(folder, quantization_config=BY_NAME["gptq-sym-128"].config | {"dynamic": EXCLUSIONS})
    assert values_are(folder, wanted, pool).form == "BF16+int4-g128"


def test_gptq_reads_bits_per_matrix(tmp_path: Path, pool: Pool) -> None:
    config = BY_NAME["gptq-sym-128"].config
    folder, wanted = write_published(tmp_path / "model", BY_NAME["gptq-sym-128"], hidden=256, intermediate=384)
    generator = torch.Generator().manual_seed(9)

    def wider(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in wanted if ".down_proj." in name]:
            made, wanted[name] = BY_NAME["gptq-8-bits"].make(*wanted[name].shape, generator)
            tensors.update({name.removesuffix("weight") + suffix: value for suffix, value in made.items()})

    change_tensors(folder, wider)
    change_config(folder, quantization_config=config | {"dynamic": {r"+:.*\.(?:down|other)_proj": {"bits": 8}}})
    assert set(values_are(folder, wanted, pool).form.split("+")) == {"int4-g128", "int8-g128", "BF16"}


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("gptq-sym-128", {"packing_format": "auto_round:auto_gptq"}),
        ("gptq-sym-128", {"quant_method": "intel/auto-round"}),
        ("gptq-asym-128", {"packing_format": "auto_round:auto_gptq", "sym": False}),
        ("awq-128", {"packing_format": "auto_round:auto_awq"}),
        ("awq-32", {"packing_format": "auto_round:auto_awq", "group_size": 32, "sym": False}),
    ],
)
def test_autoround_s_layouts_are_those_of_gptq_and_awq(
    tmp_path: Path, pool: Pool, case: str, config: dict[str, Any]
) -> None:
    folder, wanted = write_published(tmp_path / "model", BY_NAME[case], hidden=256, intermediate=384)
    change_tensors(folder, unpacked("layers.1.self_attn.o_proj", wanted))
    extra = {"model.layers.1.self_attn.o_proj": {"bits": 16, "data_type": "float"}, "re:.*mtp.*": {"bits": 16}}
    change_config(
        folder,
        quantization_config=AUTO_ROUND | config | {"extra_config": extra, "block_name_to_quantize": "model.layers"},
    )
    values_are(folder, wanted, pool)


@pytest.mark.parametrize("case", ["gptq-sym-128", "awq-128"])
def test_biases_of_zero_that_a_quantizer_stores_are_left_out(tmp_path: Path, pool: Pool, case: str) -> None:
    folder, wanted = write_published(tmp_path / "model", BY_NAME[case])

    def with_biases(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in wanted if "_proj.weight" in name]:
            tensors[name.removesuffix("weight") + "bias"] = torch.zeros(wanted[name].shape[0], dtype=torch.float16)
        tensors["model.layers.0.mlp.up_proj.bias"][3] = -0.0

    change_tensors(folder, with_biases)
    values_are(folder, wanted, pool)

    def changed(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.bias"][-1] = 0.5

    change_tensors(folder, changed)
    with pytest.raises(
        ModelError, match=r"tensor model.layers.1.mlp.up_proj.bias has numbers other than 0; the family has no biases"
    ):
        plan_of(folder)


def test_scales_of_quantized_keys_and_values_are_left_alone(tmp_path: Path, pool: Pool) -> None:
    folder, wanted = write_published(tmp_path / "model", BY_NAME["packed-sym-128"])

    def with_scales(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("k_scale", "v_scale", "q_scale", "k_zero_point", "k_proj.output_scale"):
            tensors[f"model.layers.0.self_attn.{part}"] = torch.ones(1, dtype=torch.bfloat16)

    change_tensors(folder, with_scales)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    change_config(folder, quantization_config=BY_NAME["packed-sym-128"].config | {"kv_cache_scheme": scheme})
    values_are(folder, wanted, pool)


def without(suffix: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"model.layers.1.mlp.up_proj.{suffix}"]

    return change


def replaced(suffix: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.layers.1.mlp.up_proj.{suffix}"] = make(tensors[f"model.layers.1.mlp.up_proj.{suffix}"])

    return change


def nan_first(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8)[0, 0] = 0x7F
    else:
        tensor.view(-1)[0] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gptq-sym-128",
            without("scales"),
            r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.scales of GPTQ, wanted \[2, 288\]",
        ),
        (
            "gptq-sym-128",
            replaced("qweight", lambda t: t[:-1]),
            r"up_proj\.qweight: wanted \[20, 288\] for \[288, 160\].*found \[19, 288\]",
        ),
        (
            "gptq-sym-128",
            replaced("qweight", lambda t: t.short()),
            r"up_proj\.qweight is stored as I16, but config\.json has .* GPTQ, which stores I32",
        ),
        (
            "fp8-scale-inv",
            replaced("weight", lambda t: t.view(torch.int8)),
            r"up_proj\.weight is stored as I8, .* FP8, which stores F8_E4M3",
        ),
        (
            "modelopt-nvfp4",
            without("weight_scale"),
            r"lacks the tensor .*up_proj\.weight_scale of ModelOpt NVFP4, wanted \[176, 5\]",
        ),
        (
            "modelopt-nvfp4",
            without("weight_scale_2"),
            r"lacks the tensor .*up_proj\.weight_scale_2 of ModelOpt NVFP4, wanted \[1\]",
        ),
        (
            "nvfp4-packed",
            without("weight_global_scale"),
            r"lacks the tensor .*up_proj\.weight_global_scale of compressed-tensors nvfp4",
        ),
        (
            "modelopt-nvfp4",
            replaced("weight_scale", lambda t: t[:, :-1]),
            r"up_proj\.weight_scale: wanted \[176, 5\] for \[176, 80\].*found \[176, 4\]",
        ),
        (
            "modelopt-nvfp4",
            replaced("weight_scale_2", lambda t: t.expand(176)),
            r"weight_scale_2: wanted \[1\] .*found \[176\]",
        ),
        (
            "modelopt-nvfp4",
            replaced("weight", lambda t: t[:, 1:]),
            r"up_proj\.weight: wanted \[176, 40\] .*found \[176, 39\]",
        ),
        (
            "modelopt-mxfp8",
            replaced("weight_scale", lambda t: t.float()),
            r"weight_scale is stored as F32, .* which stores U8, F8_E8M0",
        ),
        (
            "modelopt-fp8",
            without("weight_scale"),
            r"lacks the tensor .*up_proj\.weight_scale of ModelOpt FP8, wanted \[1\]",
        ),
        (
            "fp8-scale-inv",
            without("weight_scale_inv"),
            r"lacks the tensor .*up_proj\.weight_scale_inv of FP8, wanted \[3, 2\]",
        ),
        (
            "int8-channel",
            replaced("weight", lambda t: t.bfloat16()),
            r"stores only some of the tensors that belong together quantized",
        ),
        (
            "packed-sym-128",
            lambda t: t.update({"model.layers.0.mlp.up_proj.extra": torch.ones(1)}),
            r"1 tensors that its config\.json",
        ),
    ],
)
def test_tensors_that_do_not_belong_to_the_config_are_named(
    tmp_path: Path, name: str, change: Change, message: str
) -> None:
    folder, _ = write_published(tmp_path / "model", BY_NAME[name])
    change_tensors(folder, change)
    with pytest.raises(ModelError, match=message):
        plan_of(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gptq-sym-128",
            replaced("g_idx", lambda t: t.flip(0)),
            r"up_proj\.g_idx groups the columns by activation \(desc_act\)",
        ),
        (
            "gptq-sym-128",
            replaced("qzeros", lambda t: t + 1),
            r"up_proj\.qzeros has zero points other than 7, but .*sym = true",
        ),
        (
            "gptq-sym-128",
            replaced("scales", nan_first),
            r"up_proj\.scales has scales that are NaN or infinite, or beyond a 16-bit",
        ),
        (
            "packed-sym-128",
            replaced("weight_scale", lambda t: t * 1e9),
            r"up_proj\.weight_scale has scales .* beyond a 16-bit float's 65,504",
        ),
        (
            "fp8-scale-inv",
            replaced("weight_scale_inv", nan_first),
            r"model\.safetensors: tensor .*weight_scale_inv has scales that are NaN or inf",
        ),
        (
            "modelopt-nvfp4",
            replaced("weight_scale", nan_first),
            r"tensor .*up_proj\.weight_scale has scales that are NaN",
        ),
        (
            "modelopt-nvfp4",
            replaced("weight_scale_2", nan_first),
            r"up_proj\.weight_scale_2 is a factor that is NaN or infinite \(nan\)",
        ),
        (
            "nvfp4-packed",
            replaced("weight_global_scale", torch.zeros_like),
            r"global_scale is a factor that is zero, NaN or inf.*\(0\)",
        ),
        (
            "modelopt-mxfp8",
            replaced("weight_scale", lambda t: t | 255),
            r"up_proj\.weight_scale has scales that are NaN; the",
        ),
        (
            "modelopt-fp8",
            replaced("weight_scale", nan_first),
            r"up_proj\.weight_scale has scales that are NaN or infinite",
        ),
        (
            "awq-128",
            replaced("scales", lambda t: torch.full_like(t, 6e4)),
            r"model: model\.layers\.1\.mlp\.gate_proj\.weight has zero points whose",
        ),
    ],
)
def test_what_only_the_bytes_show_is_told_while_they_are_read(
    tmp_path: Path, pool: Pool, name: str, change: Change, message: str
) -> None:
    folder, _ = write_published(tmp_path / "model", BY_NAME[name])
    change_tensors(folder, change)
    plan = plan_of(folder)
    with pytest.raises(ModelError, match=message):
        loaded(plan, pool)


def test_packed_tensors_without_a_config_are_named(tmp_path: Path) -> None:
    folder, _ = write_published(tmp_path / "model", BY_NAME["gptq-sym-128"])
    change_config(folder, quantization_config=None)
    with pytest.raises(
        ModelError,
        match=r"lacks the tensor .*q_proj\.weight.*; it has .*q_proj\.\w+, but config\.json has no quantization_config",
    ):
        plan_of(folder)
