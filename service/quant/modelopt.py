"""Reads the quantization_config of NVIDIA's ModelOpt: one algorithm for all modules, or one per named module.

Sources: the configs of checkpoints by nvidia and local-inference-lab (config.json, and hf_quant_config.json of older
exports).
"""

from __future__ import annotations

from .fields import Fields
from .formats import MXFP8, NVFP4
from .microscaled import CACHE_SCALES, Mxfp8, Nvfp4
from .mixed import Packings, globs, plain_name
from .packings import BLOCK, Fp8Blocks, Packing, Rows8

MIXED = "MIXED_PRECISION"
UNQUANTIZED = "UNQUANTIZED"
_NVFP4 = ("NVFP4", "W4A16_NVFP4")
_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
ALGORITHMS = (*_NVFP4, "MXFP8", "FP8", *_BLOCKS)


def read_modelopt(fields: Fields) -> Packings:
    """The packings of a quantization_config of ModelOpt. Raises ModelError."""
    left_out = globs((*fields.texts("ignore"), *fields.texts("exclude_modules")))
    if fields.one_of("quant_algo", (*ALGORITHMS, MIXED)) != MIXED:
        return Packings(_packing(fields), left_out=left_out, extras=CACHE_SCALES)
    layers = fields.each("quantized_layers") if fields.get("quantized_layers") is not None else iter(())
    named = {plain_name(module): _packing(own) for module, own in layers}
    if not named:
        for _, group in fields.each("config_groups"):
            packing = _by_numbers(group.inner("weights"))
            named.update((plain_name(module), packing) for module in group.texts("targets"))
    return Packings(None, named, left_out=left_out, extras=CACHE_SCALES)


def _packing(fields: Fields) -> Packing | None:
    algorithm = fields.one_of("quant_algo", (*ALGORITHMS, UNQUANTIZED))
    if algorithm == UNQUANTIZED:
        return None
    if algorithm in _NVFP4:
        fields.one_of("group_size", (NVFP4.group,), NVFP4.group)
        return Nvfp4(f"ModelOpt {algorithm}")
    if algorithm == "MXFP8":
        fields.one_of("group_size", (MXFP8.group,), MXFP8.group)
        return Mxfp8("ModelOpt MXFP8")
    if algorithm in _BLOCKS:
        fields.one_of("group_size", (BLOCK,), BLOCK)
        return Fp8Blocks(f"ModelOpt {algorithm}", "weight_scale_inv")
    return Rows8("ModelOpt FP8", "F8_E4M3", whole=True, ignored=("input_scale", *CACHE_SCALES))


def _by_numbers(weights: Fields) -> Packing:
    """The packing of a group that only says how its numbers are coded."""
    weights.one_of("type", ("float",))
    bits, group = weights.one_of("num_bits", (4, 8)), weights.get("group_size")
    if bits == 4:
        weights.one_of("group_size", (NVFP4.group,))
        return Nvfp4("ModelOpt NVFP4")
    if group is not None:
        weights.one_of("group_size", (MXFP8.group,))
        return Mxfp8("ModelOpt MXFP8")
    return Rows8("ModelOpt FP8", "F8_E4M3", whole=True, ignored=("input_scale", *CACHE_SCALES))
