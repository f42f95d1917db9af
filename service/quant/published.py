"""Which packing a checkpoint's quantization_config means. What would change the arithmetic and is not supported is refused by its field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import ModelError
from .packings import BLOCK, Awq, Fp8Blocks, Gptq, PackedRows, Packing, Rows8

KEY = "quantization_config"


def read_packing(config: Mapping[str, Any]) -> Packing | None:
    """The packing of config.json's quantization_config, None without one. Raises ModelError naming the field and what is supported."""
    value = config.get(KEY)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json has {KEY} = {value!r}; an object is needed")
    fields = _Fields(value, KEY)
    method = fields.get("quant_method")
    if method not in _METHODS:
        fields.refuse("quant_method", ", ".join(_METHODS))
    return _METHODS[method](fields)


class _Fields:
    """The fields of one object of the config; `path` is how messages name it."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values = values
        self._path = path

    def get(self, *keys: str) -> Any:
        """The first of `keys` that is there and is not null."""
        return next((self._values[key] for key in keys if self._values.get(key) is not None), None)

    def refuse(self, key: str, supported: str) -> NoReturn:
        raise ModelError(f"config.json has {self._path}.{key} = {self._values.get(key)!r}, which is not supported; supported: {supported}")

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """The value of `key`, which must be one of `allowed`; `default` where it is absent, which must be one of them too."""
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) != any(isinstance(known, bool) for known in allowed) or value not in allowed:
            self.refuse(key, ", ".join(repr(known) for known in allowed))
        return value

    def absent(self, key: str, meaning: str) -> None:
        """Refuse `key` unless it is empty."""
        if self.get(key):
            self.refuse(key, f"none ({meaning})")

    def group(self, key: str) -> int:
        """Columns under one scale, 0 for all of a row (-1 in the file)."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or (value > 0 and value % 32 == 0)):
            self.refuse(key, "-1 (all columns of a row) and multiples of 32")
        return max(0, value)

    def inner(self, key: str) -> _Fields:
        value = self.get(key)
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return _Fields(value, f"{self._path}.{key}")

    def only(self, key: str) -> _Fields:
        """The only object in the object `key`."""
        inner = self.inner(key)
        if len(inner._values) != 1:
            names = ", ".join(map(str, inner._values)) or "none"
            raise ModelError(f"config.json has {len(inner._values)} {self._path}.{key} ({names}); supported is one for all layers")
        return inner.inner(next(iter(inner._values)))


def _fp8(fields: _Fields) -> Packing:
    fields.one_of("fmt", ("e4m3",), "e4m3")
    if fields.get("weight_block_size") != [BLOCK, BLOCK]:
        fields.refuse("weight_block_size", f"[{BLOCK}, {BLOCK}]")
    return Fp8Blocks("FP8", "weight_scale_inv")


def _gptq(fields: _Fields) -> Packing:
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
    return Gptq("GPTQ", bits, fields.group("group_size"), symmetric, 1 if version == "gptq" else 0)


def _awq(fields: _Fields) -> Packing:
    fields.one_of("w_bit" if fields.get("bits") is None else "bits", (4,))
    fields.one_of("zero_point", (True,), True)
    version = fields.get("version", "format")
    if version is not None and str(version).lower() != "gemm":
        fields.refuse("version" if fields.get("version") else "format", "gemm")
    return Awq("AWQ", fields.group("group_size" if fields.get("q_group_size") is None else "q_group_size"))


def _compressed(fields: _Fields) -> Packing:
    fields.absent("transform_config", "rotated weights")
    fields.absent("kv_cache_scheme", "quantized keys and values")
    sparsity = fields.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") in (None, "dense")):
        fields.refuse("sparsity_config", "none, or format dense")
    group = fields.only("config_groups")
    own = group if group.get("format") else fields
    kinds = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    kind = own.one_of("format", kinds)
    weights = group.inner("weights")
    number = weights.one_of("type", ("int", "float"), "int")
    title = f"compressed-tensors {kind}"
    if kind == "pack-quantized":
        weights.one_of("type", ("int",), "int")
        return _packed(weights, title)
    weights.one_of("num_bits", (8,), 8)
    weights.one_of("symmetric", (True,), True)
    wanted = str({"int-quantized": "int", "float-quantized": "float"}.get(kind, number))
    weights.one_of("type", (wanted,), "int")
    return _rows(weights, title, wanted)


def _packed(weights: _Fields, title: str) -> Packing:
    bits = weights.one_of("num_bits", (4, 8))
    symmetric = weights.one_of("symmetric", (True, False), True)
    if bits == 8 and not symmetric:
        weights.refuse("symmetric", "true with num_bits = 8")
    strategy = weights.one_of("strategy", ("group", "channel"))
    return PackedRows(title, bits, weights.group("group_size") if strategy == "group" else 0, symmetric)


def _rows(weights: _Fields, title: str, number: str) -> Packing:
    strategies = ("channel", "tensor", "group") if number == "int" else ("channel", "tensor", "block")
    strategy = weights.one_of("strategy", strategies)
    if strategy == "block":
        if weights.get("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            weights.refuse("block_structure", f"[{BLOCK}, {BLOCK}]")
        return Fp8Blocks(title, "weight_scale")
    group = weights.group("group_size") if strategy == "group" else 0
    return Rows8(title, "F8_E4M3" if number == "float" else "I8", strategy == "tensor", group)


_METHODS = {"awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8, "gptq": _gptq}
