"""Reads the quantization_config of compressed-tensors: groups of settings, each for certain modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .fields import Fields
from .formats import MXFP8, NVFP4
from .microscaled import CACHE_SCALES, Mxfp8, Nvfp4
from .mixed import Modules, Packings, plain_name, safe_pattern
from .packings import BLOCK, Fp8Blocks, PackedRows, Packing, Rows8

KINDS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp8-quantized",
)
LINEAR = "Linear"  # the target that means every matrix


def read_compressed(fields: Fields) -> Packings:
    """The packings of a quantization_config of compressed-tensors. Raises ModelError."""
    fields.absent("transform_config", "rotated weights")
    if fields.get("kv_cache_scheme") is not None:  # keys and values stay unquantized: these scales are not used
        fields.inner("kv_cache_scheme")
    sparsity = fields.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") in (None, "dense")):
        fields.refuse("sparsity_config", "none, or format dense")
    groups = list(fields.each("config_groups"))
    if not groups:
        fields.refuse("config_groups", "at least one")
    left_out = _modules(fields.texts("ignore"))
    if len(groups) == 1:  # whatever its targets: the stored tensors say the rest
        return Packings(_group(fields, groups[0][1]), left_out=left_out)
    usual, patterned = None, []
    for _, group in groups:
        packing = _group(fields, group)
        for target in group.texts("targets"):
            pattern = None if target == LINEAR else _pattern(target)
            if pattern is not None:
                patterned.append((pattern, packing))
            elif target != LINEAR:
                group.refuse("targets", "names, and expressions of names, points and .*")
            else:
                usual = usual or packing
    return Packings(usual, patterned=tuple(patterned), left_out=left_out)


def _modules(texts: tuple[str, ...]) -> Modules:
    """The modules that a list of targets names, as far as its expressions are supported."""
    endings = [plain_name(text) for text in texts if not text.startswith("re:")]
    patterns = [pattern.pattern for text in texts if text.startswith("re:") and (pattern := _pattern(text)) is not None]
    return Modules.of(endings=endings, patterns=patterns)


def _pattern(target: str) -> re.Pattern[str] | None:
    """A target as a pattern of module names: "re:" and a regular expression from the start of a name, or the end of a
    name.

    None for an expression that may take forever on some name.
    """
    if not target.startswith("re:"):
        return re.compile(f"(.*\\.)?{re.escape(plain_name(target))}")
    return safe_pattern(target[3:])


def _group(fields: Fields, group: Fields) -> Packing:
    own = group if group.get("format") else fields
    kind = own.one_of("format", KINDS)
    weights = group.inner("weights")
    number = weights.one_of("type", ("int", "float"), "int")
    title = f"compressed-tensors {kind}"
    if kind == "nvfp4-pack-quantized":
        _exactly(weights, num_bits=4, type="float", group_size=NVFP4.group)
        return Nvfp4(
            title, "weight_packed", "weight_global_scale", True, ("input_global_scale", "weight_shape", *CACHE_SCALES)
        )
    if kind == "mxfp8-quantized":
        _exactly(weights, num_bits=8, type="float", group_size=MXFP8.group)
        return Mxfp8(title)
    if kind == "pack-quantized":
        weights.one_of("type", ("int",), "int")
        return _packed(weights, title)
    weights.one_of("num_bits", (8,), 8)
    weights.one_of("symmetric", (True,), True)
    wanted = str({"int-quantized": "int", "float-quantized": "float"}.get(kind, number))
    weights.one_of("type", (wanted,), "int")
    return _rows(weights, title, wanted)


def _exactly(weights: Fields, **wanted: Any) -> None:
    """These fields have these values, and the numbers are symmetric."""
    for key, value in wanted.items():
        weights.one_of(key, (value,))
    weights.one_of("symmetric", (True,), True)


def _packed(weights: Fields, title: str) -> Packing:
    bits = weights.one_of("num_bits", (4, 8))
    symmetric = weights.one_of("symmetric", (True, False), True)
    if bits == 8 and not symmetric:
        weights.refuse("symmetric", "true with num_bits = 8")
    strategy = weights.one_of("strategy", ("group", "channel"))
    return PackedRows(title, bits, weights.group("group_size") if strategy == "group" else 0, symmetric)


def _rows(weights: Fields, title: str, number: str) -> Packing:
    strategies = ("channel", "tensor", "group") if number == "int" else ("channel", "tensor", "block")
    strategy = weights.one_of("strategy", strategies)
    if strategy == "block":
        if weights.get("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            weights.refuse("block_structure", f"[{BLOCK}, {BLOCK}]")
        return Fp8Blocks(title, "weight_scale")
    group = weights.group("group_size") if strategy == "group" else 0
    return Rows8(title, "F8_E4M3" if number == "float" else "I8", strategy == "tensor", group)
