"""Writes tiny quantized Qwen3 checkpoints in the published formats, each built with plain torch from the format's
description.

Every function makes random numbers and scales of a matrix [rows, cols] and returns the stored tensors by suffix and the
matrix itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_qwen3 import write_tiny_qwen3

Stored = dict[str, torch.Tensor]
Made = tuple[Stored, torch.Tensor]


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n * bits / 32] of non-negative numbers [..., n]: the first in the lowest bits; the last word is
    padded with 0.
    """
    count = 32 // bits
    numbers = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[-1] % count))
    grouped = numbers.view(*numbers.shape[:-1], -1, count)
    joined = (grouped << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(joined >= 2**31, joined - 2**32, joined).to(torch.int32)


def spread(values: torch.Tensor, group: int, cols: int) -> torch.Tensor:
    """One value per column from one value per group."""
    return values.float().repeat_interleave(group, 1)[:, :cols]


def factors(rows: int, groups: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return (torch.rand(rows, groups, generator=generator) * 0.02 + 0.002).to(dtype)


@dataclass(frozen=True)
class Case:
    """One published format: quantization_config, and how a matrix is made. `exact`: no offset is rounded."""

    name: str
    config: dict[str, Any]
    make: Callable[[int, int, torch.Generator], Made]
    form: str
    exact: bool = True
    hidden: int = 256
    wide: int = 384


def gptq(
    bits: int, group: int, symmetric: bool, version: int, order: bool
) -> Callable[[int, int, torch.Generator], Made]:
    def make(rows: int, cols: int, generator: torch.Generator) -> Made:
        size = cols if group < 0 else group
        groups, top = -(-cols // size), 1 << bits
        q = torch.randint(0, top, (rows, cols), generator=generator)
        middle = torch.full((rows, groups), top // 2)
        zero = middle if symmetric else torch.randint(0, top, (rows, groups), generator=generator)
        scale = factors(rows, groups, torch.float16, generator)
        kept = (zero - (1 if version == 1 else 0)) % top
        stored = {"qweight": words(q, bits).t(), "scales": scale.t(), "qzeros": words(kept.t(), bits)}
        # words(q) packs along columns; the published tensor stacks a column's words
        if order:
            stored["g_idx"] = (torch.arange(cols) // size).to(torch.int32)
        wanted = (q - zero.repeat_interleave(size, 1)[:, :cols]).float() * spread(scale, size, cols)
        return stored, wanted

    return make


def awq(group: int) -> Callable[[int, int, torch.Generator], Made]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(numbers: torch.Tensor) -> torch.Tensor:
        return words(numbers.view(numbers.shape[0], -1, 8)[:, :, order].reshape(numbers.shape[0], -1), 4)

    def make(rows: int, cols: int, generator: torch.Generator) -> Made:
        q = torch.randint(0, 16, (rows, cols), generator=generator)
        zero = torch.randint(0, 16, (rows, cols // group), generator=generator)
        scale = factors(rows, cols // group, torch.float16, generator)
        wanted = (q - zero.repeat_interleave(group, 1)).float() * spread(scale, group, cols)
        return {"qweight": packed(q.t()), "qzeros": packed(zero.t()), "scales": scale.t()}, wanted

    return make


def packed_rows(bits: int, group: int, symmetric: bool) -> Callable[[int, int, torch.Generator], Made]:
    def make(rows: int, cols: int, generator: torch.Generator) -> Made:
        size, half = group or cols, 1 << (bits - 1)
        groups = -(-cols // size)
        q = torch.randint(-half, half, (rows, cols), generator=generator)
        scale = factors(rows, groups, torch.bfloat16, generator)
        stored = {
            "weight_packed": words(q + half, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, cols]),
        }
        if symmetric:
            return stored, q.float() * spread(scale, size, cols)
        zero = torch.randint(-half, half, (rows, groups), generator=generator)
        stored["weight_zero_point"] = words((zero + half).t(), bits).t()
        return stored, (q - zero.repeat_interleave(size, 1)[:, :cols]).float() * spread(scale, size, cols)

    return make


def numbers8(kind: str, strategy: str, scale_name: str = "weight_scale") -> Callable[[int, int, torch.Generator], Made]:
    def make(rows: int, cols: int, generator: torch.Generator) -> Made:
        if kind == "int":
            q = torch.randint(-128, 128, (rows, cols), generator=generator).to(torch.int8)
        else:
            q = (torch.randn(rows, cols, generator=generator) * 100).to(torch.float8_e4m3fn)
        if strategy == "block":
            scale = factors(-(-rows // 128), -(-cols // 128), torch.bfloat16, generator)
            full = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
        elif strategy == "tensor":
            scale = factors(1, 1, torch.float32, generator)[0]
            full = scale.view(1, 1)
        else:
            size = 128 if strategy == "group" else cols
            scale = factors(rows, -(-cols // size), torch.bfloat16, generator)
            full = spread(scale, size, cols)
        return {"weight": q, scale_name: scale}, q.float() * full

    return make


def e2m1(rows: int, cols: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random E2M1 numbers, two per byte with the earlier column in the low nibble; and their values."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    nibbles = torch.randint(0, 16, (rows, cols), generator=generator)
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8), values[nibbles]


def nvfp4(*, divides: bool) -> Callable[[int, int, torch.Generator], Made]:
    """As compressed-tensors (`divides`) and ModelOpt store it. The scale is a power of two, so no product is
    rounded.
    """

    def make(rows: int, cols: int, generator: torch.Generator) -> Made:
        packed, values = e2m1(rows, cols, generator)
        scale = (torch.rand(rows, cols // 16, generator=generator) * 400 + 1).to(torch.float8_e4m3fn)
        wanted = values * spread(scale, 16, cols) * 2**-13
        if divides:
            stored = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([2.0**13])}
            return stored | {"input_global_scale": torch.tensor([3.0])}, wanted
        stored = {"weight": packed, "weight_scale": scale, "weight_scale_2": torch.tensor(2.0**-13)}
        return stored | {"input_scale": torch.tensor(0.1), "k_scale": torch.tensor(1.0)}, wanted

    return make


def mxfp8(rows: int, cols: int, generator: torch.Generator) -> Made:
    q = (torch.randn(rows, cols, generator=generator) * 100).to(torch.float8_e4m3fn)
    exponents = torch.randint(112, 124, (rows, -(-cols // 32)), generator=generator).to(torch.uint8)
    return {"weight": q, "weight_scale": exponents}, q.float() * spread(2.0 ** (exponents.float() - 127), 32, cols)


def scalar8(rows: int, cols: int, generator: torch.Generator) -> Made:
    """FP8 with one scalar scale."""
    stored, wanted = numbers8("float", "tensor")(rows, cols, generator)
    return stored | {"weight_scale": stored["weight_scale"].view(()), "input_scale": torch.tensor(1.0)}, wanted


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    given = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "group_size": None,
        "dynamic": False,
        "actorder": None,
    } | weights
    group = {"targets": ["Linear"], "weights": given, "input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }
    return config | {"ignore": ["lm_head"], "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}}


def _gptq(
    name: str, form: str, bits: int, group: int, symmetric: bool, *, version: int = 1, order: bool = True, **more: Any
) -> Case:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": False,
        "lm_head": False,
    }
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    return Case(name, config, gptq(bits, group, symmetric, version, order), form, exact=symmetric, **more)


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.44.0"}, "ignore": ["lm_head"]}
CASES = [
    _gptq("gptq-sym-128", "int4-g128", 4, 128, True, hidden=160, wide=288),
    _gptq("gptq-sym-32-no-order", "int4-g32", 4, 32, True, order=False, hidden=160, wide=272),
    _gptq("gptq-asym-128", "int4-g128-asym", 4, 128, False),
    _gptq("gptq-asym-64-v2", "int4-g64-asym", 4, 64, False, version=2),
    _gptq("gptq-whole-rows", "int4-g128", 4, -1, True, hidden=160, wide=288),
    _gptq("gptq-8-bits", "int8-g128", 8, 128, True, hidden=160, wide=288),
    Case("awq-128", AWQ | {"group_size": 128}, awq(128), "int4-g128-asym", exact=False),
    Case(
        "awq-32",
        AWQ | {"group_size": 32, "version": "GEMM"},
        awq(32),
        "int4-g32-asym",
        exact=False,
        hidden=160,
        wide=288,
    ),
    Case(
        "packed-sym-128",
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=128, actorder="weight"),
        packed_rows(4, 128, True),
        "int4-g128",
        hidden=160,
        wide=288,
    ),
    Case(
        "packed-asym-32",
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        packed_rows(4, 32, False),
        "int4-g32-asym",
        exact=False,
        hidden=160,
        wide=272,
    ),
    Case(
        "packed-channel",
        compressed("pack-quantized", num_bits=4, strategy="channel"),
        packed_rows(4, 0, True),
        "int4-g128",
    ),
    Case(
        "packed-8-bits",
        compressed("pack-quantized", strategy="channel"),
        packed_rows(8, 0, True),
        "int8",
        hidden=160,
        wide=276,
    ),
    Case(
        "int8-channel",
        compressed("int-quantized", strategy="channel"),
        numbers8("int", "channel"),
        "int8",
        hidden=80,
        wide=77,
    ),
    Case("int8-tensor", compressed("naive-quantized", strategy="tensor"), numbers8("int", "tensor"), "int8"),
    Case(
        "int8-group",
        compressed("int-quantized", strategy="group", group_size=128),
        numbers8("int", "group"),
        "int8-g128",
    ),
    Case(
        "fp8-channel",
        compressed("float-quantized", type="float", strategy="channel"),
        numbers8("float", "channel"),
        "fp8",
        hidden=80,
    ),
    Case(
        "fp8-tensor", compressed("float-quantized", type="float", strategy="tensor"), numbers8("float", "tensor"), "fp8"
    ),
    Case(
        "fp8-block",
        compressed("float-quantized", type="float", strategy="block", block_structure=[128, 128]),
        numbers8("float", "block"),
        "fp8",
        hidden=160,
        wide=288,
    ),
    Case(
        "nvfp4-packed",
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4(divides=True),
        "nvfp4",
        hidden=80,
        wide=176,
    ),
    Case(
        "mxfp8-packed",
        compressed("mxfp8-quantized", type="float", strategy="group", group_size=32),
        mxfp8,
        "fp8",
        hidden=96,
        wide=160,
    ),
    Case("modelopt-nvfp4", MODELOPT | {"quant_algo": "NVFP4"}, nvfp4(divides=False), "nvfp4", hidden=80, wide=176),
    Case("modelopt-w4a16", MODELOPT | {"quant_algo": "W4A16_NVFP4", "group_size": 16}, nvfp4(divides=False), "nvfp4"),
    Case("modelopt-mxfp8", MODELOPT | {"quant_algo": "MXFP8"}, mxfp8, "fp8", hidden=96, wide=160),
    Case("modelopt-fp8", MODELOPT | {"quant_algo": "FP8"}, scalar8, "fp8", hidden=80, wide=77),
    Case(
        "modelopt-fp8-blocks",
        MODELOPT | {"quant_algo": "FP8_PB_WO"},
        numbers8("float", "block", "weight_scale_inv"),
        "fp8",
    ),
    Case("fp8-scale-inv", BLOCKS, numbers8("float", "block", "weight_scale_inv"), "fp8", hidden=160, wide=300),
]


def is_projection(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and "layers" in name


def write_published(
    folder: Path, case: Case, *, dtype: str = "bfloat16", **shape: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint in the case's format, and the values of its tensors by their unquantized names, fp32."""
    sizes = {"hidden": case.hidden, "intermediate": case.wide, "layers": 2, "vocab": 300} | shape
    write_tiny_qwen3(folder, dtype=dtype, **sizes)
    plain = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    stored: dict[str, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in plain.items():
        if is_projection(name, tensor):
            made, wanted[name] = case.make(*tensor.shape, generator)
            stored |= {f"{name.removesuffix('weight')}{suffix}": value.contiguous() for suffix, value in made.items()}
        else:
            stored[name], wanted[name] = tensor, tensor.float()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=case.config)
    return folder, wanted


# The case of each projection of a mixed checkpoint, by a part of its name.
MIXED_KINDS = {"self_attn": "modelopt-mxfp8", "layers.0.mlp": "modelopt-nvfp4", "layers.1.mlp.down": "modelopt-fp8"}


def mixed_layers(prefix: str) -> dict[str, Any]:
    """ModelOpt's settings for MIXED_KINDS."""
    named: dict[str, Any] = {
        f"{prefix}layers.{i}.self_attn": {"quant_algo": "MXFP8", "group_size": 32} for i in range(2)
    }
    named[f"{prefix}layers.0.mlp"] = {"quant_algo": "NVFP4", "group_size": 16}
    named[f"{prefix}layers.1.mlp.down_proj"] = {"quant_algo": "FP8"}
    return named | {f"{prefix}layers.1.mlp.gate_proj": {"quant_algo": "UNQUANTIZED"}}


def write_mixed(
    folder: Path, config: dict[str, Any], kinds: dict[str, str], **shape: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint whose projections use the cases that `kinds` gives by parts of their names; the others are BF16."""
    write_tiny_qwen3(
        folder, dtype="bfloat16", **{"hidden": 128, "intermediate": 256, "layers": 2, "vocab": 300} | shape
    )
    makers = {case.name: case.make for case in CASES}
    generator = torch.Generator().manual_seed(6)
    stored: dict[str, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        kind = next((kind for part, kind in kinds.items() if part in name and is_projection(name, tensor)), None)
        if kind is None:
            stored[name], wanted[name] = tensor, tensor.float()
        else:
            made, wanted[name] = makers[kind](*tensor.shape, generator)
            stored |= {f"{name.removesuffix('weight')}{suffix}": value.contiguous() for suffix, value in made.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=config)
    return folder, wanted


def write_meaning(folder: Path, published: Path, wanted: dict[str, torch.Tensor]) -> Path:
    """The same model unquantized: the values of the published tensors, in fp32."""
    shutil.copytree(published, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in wanted.items()}, folder / "model.safetensors")
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Replace keys of config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Let `change` edit the tensors of model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def quantize_embedding(tensors: dict[str, torch.Tensor]) -> None:
    """Store the embedding in 8 bits with one scale per row, as int8-channel stores matrices."""
    name = "model.embed_tokens.weight"
    factor = tensors[name].float().abs().amax(1, keepdim=True) / 127
    tensors[name] = (tensors[name].float() / factor).round().to(torch.int8)
    tensors["model.embed_tokens.weight_scale"] = factor
