"""Reads the quantization_config of a checkpoint. Unsupported settings that change the arithmetic are refused by their
field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import ModelError, brief
from .compressed import read_compressed
from .fields import Fields
from .mixed import Packings, plain_name, safe_pattern
from .modelopt import read_modelopt
from .packings import BLOCK, Awq, Fp8Blocks, Gptq, Packing

KEY = "quantization_config"
AUTO_ROUND = ("auto_round:auto_gptq", "auto_round:auto_awq")
FLOAT_BITS = 16
_NAME = re.compile(r"[\w.\-]+")


def read_packings(config: Mapping[str, Any]) -> Packings | None:
    """The packings of config.json's quantization_config, None without one. Raises ModelError with the field and the
    supported values.
    """
    value = config.get(KEY)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json has {KEY} = {brief(value)}; an object is needed")
    fields = Fields(value, KEY)
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        fields.refuse("quant_method", ", ".join(_METHODS))
    return _METHODS[method](fields)


def _fp8(fields: Fields) -> Packings:
    fields.one_of("fmt", ("e4m3",), "e4m3")
    if fields.get("weight_block_size") != [BLOCK, BLOCK]:
        fields.refuse("weight_block_size", f"[{BLOCK}, {BLOCK}]")
    return Packings(Fp8Blocks("FP8", "weight_scale_inv"))


def _gptq(fields: Fields) -> Packings:
    layout = "checkpoint_format" if fields.get("checkpoint_format") else "format"
    version = fields.one_of(layout, ("gptq", "gptq_v2"), "gptq")
    fields.one_of("pack_dtype", ("int32",), "int32")
    fields.absent("is_marlin_format", "Marlin's order of the words")
    fields.absent("rotation", "rotated weights")
    usual = _gptq_packing(fields, "GPTQ", 1 if version == "gptq" else 0)
    return Packings(usual, patterned=tuple(_dynamic(fields, usual)))


def _gptq_packing(fields: Fields, title: str, bias: int) -> Gptq:
    bits = fields.one_of("bits", (4, 8))
    symmetric = fields.one_of("sym", (True, False), True)
    if bits == 8 and not symmetric:
        fields.refuse("sym", "true with bits = 8")
    return Gptq(title, bits, fields.group("group_size"), symmetric, bias)


def _dynamic(fields: Fields, usual: Gptq) -> Iterator[tuple[re.Pattern[str], Gptq | None]]:
    """GPTQModel's settings for some modules, by expressions of which the first match counts.

    "-:" excludes modules. An unsupported expression with it is ignored, since the files say what is stored as floats.
    """
    if fields.get("dynamic") is None:
        return
    for text, own in fields.each("dynamic"):
        excluded = text.startswith("-:")
        pattern = safe_pattern(text.removeprefix("-:").removeprefix("+:"))
        if pattern is None and not excluded:
            fields.refuse("dynamic", f"expressions of names, points, alternatives and .*, not {brief(text)}")
        if pattern is not None:
            yield pattern, None if excluded else _gptq_packing(own.over(fields), usual.title, usual.bias)


def _auto_round(fields: Fields) -> Packings:
    """AutoRound's own exports in the layouts of GPTQ (zero points stored less one) and AWQ. `extra_config` is about
    single modules.
    """
    fields.one_of("data_type", ("int",), "int")
    if fields.get("act_bits") is not None:
        fields.one_of("act_bits", (16, 32))
    kind = fields.one_of("packing_format", AUTO_ROUND, AUTO_ROUND[0])

    def packing(own: Fields) -> Packing | None:
        if type(own.get("bits")) is int and own.get("bits") >= FLOAT_BITS:
            return None
        if kind == AUTO_ROUND[0]:
            return _gptq_packing(own, "AutoRound GPTQ", 1)
        own.one_of("bits", (4,))
        return Awq("AutoRound AWQ", own.group("group_size"))

    named: dict[str, Packing | None] = {}
    patterned: list[tuple[re.Pattern[str], Packing | None]] = []
    for text, own in fields.each("extra_config") if fields.get("extra_config") is not None else ():
        if _NAME.fullmatch(text):
            named[plain_name(text)] = packing(own.over(fields))
            continue
        pattern, found = safe_pattern(text.removeprefix("re:")), packing(own.over(fields))
        if pattern is None and found is not None:
            fields.refuse(
                "extra_config", f"names, and expressions of names, points, alternatives and .*, not {brief(text)}"
            )
        if pattern is not None:
            patterned.append((pattern, found))
    return Packings(packing(fields), named, patterned=tuple(patterned))


def _awq(fields: Fields) -> Packings:
    fields.one_of("w_bit" if fields.get("bits") is None else "bits", (4,))
    fields.one_of("zero_point", (True,), True)
    version = fields.get("version", "format")
    if version is not None and str(version).lower() != "gemm":
        fields.refuse("version" if fields.get("version") else "format", "gemm")
    return Packings(Awq("AWQ", fields.group("group_size" if fields.get("q_group_size") is None else "q_group_size")))


_METHODS: Mapping[str, Callable[[Fields], Packings]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "compressed-tensors": read_compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "intel/auto-round": _auto_round,
    "modelopt": read_modelopt,
}
