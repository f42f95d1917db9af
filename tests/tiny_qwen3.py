"""Writes a tiny random Qwen3 checkpoint, tokenizer and template, in sizes that a test chooses. Nothing is
downloaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISIBLE = ("<think>", "</think>")
EOS_WITHOUT_TOKENIZER = 2

# A Qwen3 template in the fewest lines: turns, earlier reasoning dropped, and an empty think block when thinking is off.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: ids 0..255 are bytes, then a few merges, then the control and think tokens; 277 ids."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    merges: list[tuple[str, str]] = []
    for word in ("Ġthe", "Ġred", "Ġcat", "Ġsky", "Ġblue"):
        left = word[0]
        for right in word[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            left += right
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in VISIBLE])
    return tokenizer


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of a dense Qwen3, 4 layers of 64; `changes` replace or add keys."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": EOS_WITHOUT_TOKENIZER,
        "torch_dtype": "float32",
    }
    return config | changes


def tiny_tensors(config: Mapping[str, Any], dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Random tensors by their names on disk; projections have variance 1 / inputs, norms are near 1."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    hidden, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": norm(hidden),
            at + "self_attn.q_proj.weight": matrix(queries, hidden),
            at + "self_attn.k_proj.weight": matrix(keys, hidden),
            at + "self_attn.v_proj.weight": matrix(keys, hidden),
            at + "self_attn.o_proj.weight": matrix(hidden, queries),
            at + "self_attn.q_norm.weight": norm(head),
            at + "self_attn.k_norm.weight": norm(head),
            at + "post_attention_layernorm.weight": norm(hidden),
            at + "mlp.gate_proj.weight": matrix(wide, hidden),
            at + "mlp.up_proj.weight": matrix(wide, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, wide),
        }
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return tensors


def write_tiny_qwen3(
    folder: Path | str,
    *,
    dtype: str = "float32",
    layers: int = 4,
    hidden: int = 64,
    intermediate: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 512,
    context: int = 4096,
    tied: bool = True,
    tokenizer: bool = True,
    template: bool = True,
    generation: Mapping[str, Any] | None = None,
    shards: int = 1,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write the checkpoint into `folder` (made if absent) and return it.

    `dtype` is float32, bfloat16 or float16. With a tokenizer a turn ends with its <|im_end|>, else with token 2.
    `generation` is merged into generation_config.json; `changes` go into config.json unchanged. More than one shard
    writes an index.json.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = tiny_tokenizer()
    ends = (
        [words.token_to_id("<|im_end|>"), words.token_to_id("<|endoftext|>")] if tokenizer else [EOS_WITHOUT_TOKENIZER]
    )
    config = tiny_config(
        **{
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
            "max_position_embeddings": context,
            "tie_word_embeddings": tied,
            "torch_dtype": dtype,
            "eos_token_id": ends[0],
        }
        | changes
    )
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 0.7, "eos_token_id": ends} | dict(generation or {}),
    )
    _write_tensors(folder, tiny_tensors(config, DTYPES[dtype], seed), shards)
    if tokenizer:
        words.save(str(folder / "tokenizer.json"))
    if template:
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def _write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    places: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
