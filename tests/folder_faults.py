"""Model folders with a fault in one of their JSON files: a value of any type and size, at any position."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
HF_QUANT, PREPROCESSOR = "hf_quant_config.json", "preprocessor_config.json"
FILES = (CONFIG, GENERATION, TOKENIZER_CONFIG, TOKENIZER, INDEX, HF_QUANT, PREPROCESSOR)
# JSON texts: numbers at the limits of every type in use; then every other type, and sizes.
NUMBERS = (
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "-0.0",
    "0.5",
    "1e-45",
    "5e-324",
    "1e39",
    "1e308",
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "-Infinity",
    "127",
    "255",
    "1000",
    "1001",
    "65536",
    "2147483646",
    "2147483647",
    "2147483648",
    "4294967295",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "1" + "0" * 40,
    "1" + "0" * 63,
    "1" + "0" * 64,
    "1" + "0" * 307,
    "1" + "0" * 400,
    "9" * 5000,
)
OTHERS = (
    "null",
    "true",
    "false",
    '""',
    '"a"',
    '"4"',
    '"\\ud800"',
    '"\\u0000"',
    '"' + "x" * 5000 + '"',
    '"qwen3"',
    '"yarn"',
    '"gptq"',
    "[]",
    "{}",
    "[[]]",
    '{"a": 1}',
    "[1, 2]",
    "[-1]",
    '["a"]',
    "[" * 70 + "]" * 70,
    "[" * 900 + "]" * 900,
    '{"a":' * 70 + "1" + "}" * 70,
    "[" + "0," * 3000 + "0]",
    "[" + '"full_attention",' * 1500 + '"full_attention"]',
    '["re:' + "(a+)+" * 9 + '$"]',
)
# Keys that are read where they exist.
KEYS = (
    "model_type",
    "architectures",
    "text_config",
    "vision_config",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "hidden_act",
    "attention_bias",
    "layer_types",
    "full_attention_interval",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "mlp_only_layers",
    "decoder_sparse_step",
    "norm_topk_prob",
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_conv_kernel_dim",
    "output_gate_type",
    "hc_count",
    "hc_lowrank",
    "ple_layer_ids",
    "ple_embed_dim",
    "ple_conv_kernel_size",
    "ngram_size",
    "heads_per_ngram",
    "ngram_vocab_size_base",
    "make_ngram_vocab_size_divisible_by",
    "seed",
    "split_ngram_parts",
    "indexer_n_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
    "mtp_num_hidden_layers",
    "num_nextn_predict_layers",
    "mtp_use_dedicated_embeddings",
    "eos_token_id",
    "quantization_config",
    "quantization",
    "weight_map",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "chat_template",
    "eos_token",
    "added_tokens",
    "model",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "truncation",
    "padding",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "rope_type",
    "partial_rotary_factor",
    "mrope_section",
    "quant_method",
    "bits",
    "group_size",
    "sym",
    "dynamic",
    "config_groups",
    "ignore",
    "quant_algo",
    "quantized_layers",
    "weight_block_size",
    "kv_cache_scheme",
    "extra_config",
    "packing_format",
    "vocab",
    "merges",
)
# The optional ones among them.
ADDED = (
    "rope_scaling",
    "quantization_config",
    "text_config",
    "vision_config",
    "layer_types",
    "mtp_num_hidden_layers",
    "mlp_only_layers",
)
QUANTIZATIONS: tuple[dict[str, Any], ...] = (
    {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "dynamic": {"-:.*attn.*": {}, "lm_head": {}},
    },
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {},
    },
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True},
            }
        },
    },
    {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "FP8"}},
    },
)
DOCUMENTS: dict[str, dict[str, Any]] = {
    GENERATION: {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]},
    TOKENIZER_CONFIG: {
        "eos_token": "<|im_end|>",
        "chat_template": "{{ messages }}",
        "added_tokens_decoder": {"0": {"content": "a"}},
    },
    INDEX: {"metadata": {"total_size": 1}, "weight_map": {"model.norm.weight": "model.safetensors"}},
    HF_QUANT: {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    PREPROCESSOR: {"size": {"shortest_edge": 65536}, "patch_size": 16, "image_mean": [0.5, 0.5, 0.5]},
}
MARK = "\0fault\0"


def values(draw: random.Random) -> str:
    """A JSON text to insert as a value."""
    kind = draw.randrange(10)
    if kind < 5:
        return draw.choice(NUMBERS)
    if kind < 9:
        return draw.choice(OTHERS)
    return str(draw.randint(-(2 ** draw.randrange(1, 70)), 2 ** draw.randrange(1, 70)))


def changed(document: dict[str, Any], draw: random.Random) -> bytes:
    """`document` as JSON with one to three values changed, added or removed, sometimes truncated."""
    whole = json.loads(json.dumps(document))
    put: list[str] = []
    for _ in range(draw.randint(1, 3)):
        spots = list(_spots(whole))
        holder, key = draw.choice(spots) if spots and draw.random() < 0.6 else (whole, draw.choice(KEYS))
        if draw.random() < 0.1:
            if isinstance(holder, dict):
                holder.pop(key, None)
            continue
        holder[key] = f"{MARK}{len(put)}"
        put.append(values(draw))
    text = json.dumps(whole)
    for number, value in enumerate(put):
        text = text.replace(json.dumps(f"{MARK}{number}"), value)
    raw = text.encode("utf-8", "surrogatepass")
    return raw[: draw.randint(0, len(raw))] if draw.random() < 0.05 else raw


def _spots(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every position of a value in a document; of long lists and objects only the first few."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value))[:200]
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list) and depth < 6:
            yield from _spots(inner, depth + 1)


def document_of(folder: Path, name: str) -> dict[str, Any]:
    """The file of a complete folder, or a generated one where the folder has none."""
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else DOCUMENTS[name]
