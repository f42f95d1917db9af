"""The number types of safetensors as torch knows them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
# An older torch lacks the smallest float types: they are omitted here, and read as uint8.
TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, attribute) for name, attribute in _TORCH_NAMES.items() if hasattr(torch, attribute)}
)


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype; uint8 for the raw bytes of types that torch lacks (6-bit floats)."""
    return TORCH_DTYPES.get(dtype, torch.uint8)
