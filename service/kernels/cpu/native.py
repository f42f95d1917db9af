"""Structures and functions of the compiled kernels as ctypes. The fields match the C sources."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ...quant.formats import weight_tensors
from ...quant.weight import QuantizedWeight, Weight

STORE, ADD, GATE = range(3)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_QUANTIZED = {"fp8": 3, "int8": 4, "int4": 5, "nvfp4": 6}
# The integer kernels step by groups of this many columns, or by a whole row.
_STEP = 32


def structure(name: str, pointers: str, integers: str, doubles: str = "") -> list[tuple[str, type]]:
    """Field types by name, in the order of `name`."""
    kinds: dict[str, type] = dict.fromkeys(pointers.split(), ctypes.c_void_p)
    kinds |= dict.fromkeys(integers.split(), ctypes.c_int64) | dict.fromkeys(doubles.split(), ctypes.c_double)
    return [(field, kinds[field]) for field in name.split()]


class WeightStruct(ctypes.Structure):
    """struct weight of weight.h."""

    _fields_ = structure(
        "data scales offsets rows cols group kind zero factors",
        "data scales offsets factors",
        "rows cols group kind zero",
    )


class ProductStruct(ctypes.Structure):
    """struct product of weight.h."""

    _fields_ = [
        ("w", WeightStruct),
        *structure(
            "norm eps mode x out tokens threads scratch stride",
            pointers="norm x out scratch",
            integers="mode tokens threads stride",
            doubles="eps",
        ),
    ]


class AttentionStruct(ctypes.Structure):
    """struct attention of attention.h."""

    _fields_ = structure(
        "qkv q_norm k_norm bias q_eps k_eps cos sin half keys values block_stride positions turns first_turns tables "
        "table_stride out "
        "tokens heads kv_heads dim chunk threads scratch stride chosen most ratio",
        pointers="qkv q_norm k_norm bias cos sin keys values positions turns first_turns tables out scratch chosen",
        integers="half block_stride table_stride tokens heads kv_heads dim chunk threads stride most ratio",
        doubles="q_eps k_eps",
    )


class DeltaStruct(ctypes.Structure):
    """struct delta of delta.c."""

    _fields_ = structure(
        "projected rates windows states taps decay bias norm out sources targets "
        "rows key_heads group key_dim value_dim taps_count fused sigmoid threads verify eps",
        pointers="projected rates windows states taps decay bias norm out sources targets",
        integers="rows key_heads group key_dim value_dim taps_count fused sigmoid threads verify",
        doubles="eps",
    )


class ConnectionStruct(ctypes.Structure):
    """struct connection of streams.c."""

    _fields_ = [
        *((name, ProductStruct) for name in ("down", "up", "inject")),
        *structure(
            "streams norm normed low mixed read weights found rows count hidden rank threads eps",
            pointers="streams norm normed low mixed read weights found",
            integers="rows count hidden rank threads",
            doubles="eps",
        ),
    ]


class ExpertsStruct(ctypes.Structure):
    """struct experts of experts.c."""

    _fields_ = [
        *(
            (name, ProductStruct)
            for name in ("router", "shared_gate", "shared_gate_up", "shared_down", "gate_up", "down")
        ),
        *structure(
            "gate_ups downs x out scores routed gated rows count active hidden width shared normalized",
            pointers="gate_ups downs x out scores routed gated",
            integers="rows count active hidden width shared normalized",
        ),
    ]


class IndexerStruct(ctypes.Structure):
    """struct indexer of indexer.c."""

    _fields_ = [
        ("a", AttentionStruct),
        *structure(
            "indexed q_norm k_norm tails sources targets pooled queues heads dim queue verify q_eps k_eps",
            pointers="indexed q_norm k_norm tails sources targets pooled queues",
            integers="heads dim queue verify",
            doubles="q_eps k_eps",
        ),
    ]


class NgramStruct(ctypes.Structure):
    """struct ngram of ngram.c."""

    _fields_ = [
        *((name, ProductStruct) for name in ("key", "value")),
        *structure(
            "key_norm query_norm conv_norm streams windows taps sources targets "
            "rows count hidden taps_count apart key_eps query_eps conv_eps",
            pointers="key_norm query_norm conv_norm streams windows taps sources targets",
            integers="rows count hidden taps_count apart",
            doubles="key_eps query_eps conv_eps",
        ),
    ]


class NormStruct(ctypes.Structure):
    """struct norm of step.c."""

    _fields_ = structure("x weight out rows cols period threads eps", "x weight out", "rows cols period threads", "eps")


class GatesStruct(ctypes.Structure):
    """struct gates of step.c."""

    _fields_ = structure(
        "projected qkv mixed rows heads dim kv_width", "projected qkv mixed", "rows heads dim kv_width"
    )


class InjectionStruct(ctypes.Structure):
    """struct injection of streams.c."""

    _fields_ = structure("streams weights found rows count hidden", "streams weights found", "rows count hidden")


class CallStruct(ctypes.Structure):
    """struct call of step.c."""

    _fields_ = structure("run with", "run with", "")


class Native:
    """The functions of the library, bound once. Functions that take a structure take its address."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, whole = ctypes.c_void_p, ctypes.c_long
        self.gemv = bind(library, "gemv", address)
        self.gemm = bind(library, "gemm", address)
        self.attend_rows = bind(library, "attend_rows", address)
        self.attend_chunk = bind(library, "attend_chunk", address)
        self.delta_rows = bind(library, "delta_rows", address)
        self.connection_rows = bind(library, "connection_rows", address)
        self.inject_rows = bind(library, "inject_rows", address)
        self.attend_indexed = bind(library, "attend_indexed", address)
        self.ngram_rows = bind(library, "ngram_rows", address)
        self.norm_call = bind(library, "norm_call", address)
        self.split_gates = bind(library, "split_gates", address)
        self.apply_gates = bind(library, "apply_gates", address)
        self.run_calls = bind(library, "run_calls", address, whole)
        self.expert_rows = bind(library, "expert_rows", address)
        self.norm_rows = bind(
            library, "norm_rows", address, address, address, whole, whole, whole, ctypes.c_double, whole
        )
        self.pack_rows = bind(library, "pack_rows", address, ctypes.c_int64, address, address, result=whole)
        self.embed_rows = bind(library, "embed_rows", address, address, whole, address, result=whole)
        self.read_all = bind(library, "read_all", address, whole, whole, result=whole)
        self.gemv_scratch = bind(library, "gemv_scratch", address, whole, result=whole)
        self.gemm_scratch = bind(library, "gemm_scratch", address, whole, address)
        self.attention_scratch = bind(library, "attention_scratch", whole, whole, whole, result=whole)
        self.attention_width: int = bind(library, "attention_width", result=whole)()
        self.instructions: str = bind(library, "instructions", result=ctypes.c_char_p)().decode()


def bind(library: ctypes.CDLL, symbol: str, *arguments: type, result: type | None = None) -> Callable[..., Any]:
    function = getattr(library, symbol)
    function.argtypes = arguments
    function.restype = result
    return function


def describe(weight: Weight) -> WeightStruct | None:
    """The weight as a C structure; None if the kernels do not support it. It holds addresses, not the tensors."""
    rows, cols = weight.shape
    if not isinstance(weight, QuantizedWeight):
        kind = KINDS.get(weight.dtype)
        if kind is None or not weight.is_contiguous():
            return None
        return WeightStruct(weight.data_ptr(), None, None, rows, cols, cols, kind, 0, None)
    held, group = weight.format, weight.group if weight.scales.shape[1] > 1 else cols
    if held.name not in _QUANTIZED:
        return None
    scales = weight_tensors(held, rows, cols)[1].dtype
    scale_tensors = [part for part in (weight.scales, weight.offsets) if part is not None]
    if (
        any(part.dtype != scales for part in scale_tensors)
        or not all(part.is_contiguous() for part in weight.tensors)
        or (held.name != "nvfp4" and group % _STEP and group < cols)
        or (weight.offsets is not None and held.bits != 4)
    ):
        return None
    zero = 8 if held.name == "int4" and held.symmetric else 0
    offsets, factors = (part.data_ptr() if part is not None else None for part in (weight.offsets, weight.factors))
    # A row of 16 columns or less has one scale. Its group is still that of the format.
    group = held.group if held.name == "nvfp4" else group
    addresses = weight.data.data_ptr(), weight.scales.data_ptr(), offsets
    return WeightStruct(*addresses, rows, cols, group, _QUANTIZED[held.name], zero, factors)
