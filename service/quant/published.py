"""Reads the quantization_config of a checkpoint. Unsupported settings that change the arithmetic are refused by their
field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ModelError
from .compressed import read_compressed
from .fields import Fields
from .mixed import Packings
from .modelopt import read_modelopt
from .packings import BLOCK, Awq, Fp8Blocks, Gptq

KEY = "quantization_config"


def read_packings(config: Mapping[str, Any]) -> Packings | None:
    """The packings of config.json's quantization_config, None without one. Raises ModelError with the field and the
    supported values.
    """
    value = config.get(KEY)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json has {KEY} = {value!r}; an object is needed")
    fields = Fields(value, KEY)
    method = fields.get("quant_method")
    if method not in _METHODS:
        fields.refuse("quant_method", ", ".join(_METHODS))
    return _METHODS[method](fields)


def _fp8(fields: Fields) -> Packings:
    fields.one_of("fmt", ("e4m3",), "e4m3")
    if fields.get("weight_block_size") != [BLOCK, BLOCK]:
        fields.refuse("weight_block_size", f"[{BLOCK}, {BLOCK}]")
    return Packings(Fp8Blocks("FP8", "weight_scale_inv"))


def _gptq(fields: Fields) -> Packings:
    bits = fields.one_of("bits", (4, 8))
    symmetric = fields.one_of("sym", (True, False), True)
    if bits == 8 and not symmetric:
        fields.refuse("sym", "true with bits = 8")
    layout = "checkpoint_format" if fields.get("checkpoint_format") else "format"
    version = fields.one_of(layout, ("gptq", "gptq_v2"), "gptq")
    fields.one_of("pack_dtype", ("int32",), "int32")
    fields.absent("is_marlin_format", "Marlin's order of the words")
    fields.absent("dynamic", "other settings for some layers")
    fields.absent("rotation", "rotated weights")
    return Packings(Gptq("GPTQ", bits, fields.group("group_size"), symmetric, 1 if version == "gptq" else 0))


def _awq(fields: Fields) -> Packings:
    fields.one_of("w_bit" if fields.get("bits") is None else "bits", (4,))
    fields.one_of("zero_point", (True,), True)
    version = fields.get("version", "format")
    if version is not None and str(version).lower() != "gemm":
        fields.refuse("version" if fields.get("version") else "format", "gemm")
    return Packings(Awq("AWQ", fields.group("group_size" if fields.get("q_group_size") is None else "q_group_size")))


_METHODS: Mapping[str, Callable[[Fields], Packings]] = {
    "awq": _awq,
    "compressed-tensors": read_compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": read_modelopt,
}
