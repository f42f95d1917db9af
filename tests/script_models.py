"""Tiny models that write a given text: each token determines the next, so a text is a chain of distinct tokens.

A chain starts after a line feed, which ends every prompt. Its parts are added tokens of the model's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import qwen3_shapes, random_tensors, small_tokenizer
from tokenizers import AddedToken, processors

TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATES = Path(__file__).parent / "service" / "text" / "templates"
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 256, 64, 1, 2, 1, 32


def write_script_model(
    folder: Path,
    chain: Sequence[str],
    *,
    template: str = "coder",
    context: int = 4096,
    pools_end: bool = False,
    head: bool = True,
) -> Path:
    """Write a checkpoint that answers with the texts of `chain`, then ends its turn; returns `folder`.

    `template` names one of TEMPLATES. `pools_end`: the tokenizer puts <|endoftext|> after a text, as for embedding
    models. Without `head` there is no output matrix and no "model." prefix, as embedding models are published.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in dict.fromkeys((*TAGS, *chain))])
    end, turn = (tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>"))
    if pools_end:
        closing = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), closing])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    shapes = qwen3_shapes(HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD, vocabulary)
    tensors = random_tensors(shapes, torch.float32, seed=1)
    tensors["model.embed_tokens.weight"] = torch.randn(vocabulary, HIDDEN, generator=torch.Generator().manual_seed(2))
    if head:
        for name in (
            f"model.layers.{layer}.{part}.weight"
            for layer in range(LAYERS)
            for part in ("self_attn.o_proj", "mlp.down_proj")
        ):
            tensors[name].zero_()  # earlier tokens must not affect the scores
        ids = [tokenizer.token_to_id("Ċ"), *(tokenizer.token_to_id(text) for text in chain), turn]
        assert len(set(ids)) == len(ids), "a token comes twice"
        output = torch.randn(vocabulary, HIDDEN, generator=torch.Generator().manual_seed(3)) * 0.02
        for token, after in pairwise(ids):
            row = tensors["model.embed_tokens.weight"][token]
            output[after] += 4 * row / row.norm()
        tensors["lm_head.weight"] = output
    else:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": turn,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [turn, end]})
    )
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8"))
    return folder
