"""Tiny random model files that ComfyUI's stock loaders and our own loader accept: the right shapes, random content."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Shapes = dict[str, tuple[int, ...]]

# ComfyUI counts a Flux network's heads as width // 128, so nothing smaller is accepted.
PAINTER_HEAD = PAINTER_WIDTH = 128
PICTURE_CHANNELS = 16
# Overrides for ComfyUI's own Qwen3 text encoder; its head size (128) and vocabulary (151,936) cannot be changed.
ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ENCODER_HEAD = 128
ENCODER_VOCABULARY = 151_936

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>")
TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif -%}"
)


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Norm weights are ones, biases zeros, all others normal with variance 1 / fan-in. Made on `device`, returned on
    the CPU.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            tensor = torch.ones(shape)
        elif name.endswith("bias"):
            tensor = torch.zeros(shape)
        else:
            tensor = torch.randn(shape, generator=generator, device=device) / math.sqrt(math.prod(shape[1:]))
        tensors[name] = tensor.to("cpu", dtype)
    return tensors


def _dense(shapes: Shapes, name: str, out: int, into: int) -> None:
    shapes[f"{name}.weight"] = (out, into)
    shapes[f"{name}.bias"] = (out,)


def painter_shapes(context_width: int, *, width: int = PAINTER_WIDTH, double: int = 1, single: int = 1) -> Shapes:
    """A Flux-style transformer of `double` and `single` blocks that reads a context of `context_width` features per
    token.
    """
    shapes = Shapes()
    patch = PICTURE_CHANNELS * 4
    for name, out, into in (
        ("img_in", width, patch),
        ("txt_in", width, context_width),
        ("time_in.in_layer", width, 256),
        ("time_in.out_layer", width, width),
        ("final_layer.linear", patch, width),
        ("final_layer.adaLN_modulation.1", 2 * width, width),
    ):
        _dense(shapes, name, out, into)
    for index in range(single):
        block = f"single_blocks.{index}"
        for part, out, into in (("linear1", 7, 1), ("linear2", 1, 5), ("modulation.lin", 3, 1)):
            _dense(shapes, f"{block}.{part}", out * width, into * width)
        shapes[f"{block}.norm.query_norm.weight"] = shapes[f"{block}.norm.key_norm.weight"] = (PAINTER_HEAD,)
    for block in (f"double_blocks.{index}.{side}" for index in range(double) for side in ("img", "txt")):
        for part, out, into in (
            ("_mod.lin", 6, 1),
            ("_attn.qkv", 3, 1),
            ("_attn.proj", 1, 1),
            ("_mlp.0", 4, 1),
            ("_mlp.2", 1, 4),
        ):
            _dense(shapes, block + part, out * width, into * width)
        for norm in ("query_norm", "key_norm"):
            shapes[f"{block}_attn.norm.{norm}.weight"] = (PAINTER_HEAD,)
    return shapes


def picture_coder_shapes() -> Shapes:
    """Encoder and decoder of a 16-channel TAESD: three stages of residual blocks between resampling convolutions."""
    shapes = Shapes()

    def convolution(name: str, out: int, into: int, *, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, into, 3, 3)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def residual(name: str) -> None:
        for layer in (0, 2, 4):
            convolution(f"{name}.conv.{layer}", 64, 64)

    convolution("taesd_encoder.0", 64, 3)
    residual("taesd_encoder.1")
    convolution("taesd_decoder.1", 64, PICTURE_CHANNELS)
    for stage in range(3):
        down, up = 2 + 4 * stage, 3 + 5 * stage
        convolution(f"taesd_encoder.{down}", 64, 64, bias=False)
        for block in range(3):
            residual(f"taesd_encoder.{down + 1 + block}")
            residual(f"taesd_decoder.{up + block}")
        convolution(f"taesd_decoder.{up + 4}", 64, 64, bias=False)
    convolution("taesd_encoder.14", PICTURE_CHANNELS, 64)
    residual("taesd_decoder.18")
    convolution("taesd_decoder.19", 3, 64)
    return shapes


def qwen3_shapes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head: int, vocabulary: int) -> Shapes:
    """A dense Qwen3 network without an output matrix."""
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for index in range(layers):
        layer = f"model.layers.{index}"
        for name, out, into in (
            ("self_attn.q_proj", heads * head, hidden),
            ("self_attn.k_proj", kv_heads * head, hidden),
            ("self_attn.v_proj", kv_heads * head, hidden),
            ("self_attn.o_proj", hidden, heads * head),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{layer}.{name}.weight"] = (out, into)
        shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (head,)
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    return shapes


def write_image_models(folder: Path, context_widths: tuple[int, ...]) -> None:
    """Fill a models folder of ComfyUI: diffusion_models/tiny_painter_WIDTH, vae/tiny_coder,
    text_encoders/tiny_encoder.
    """
    for kind in ("diffusion_models", "vae", "text_encoders"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for width in context_widths:
        painter = random_tensors(painter_shapes(width), torch.float32, seed=1)
        save_file(painter, folder / "diffusion_models" / f"tiny_painter_{width}.safetensors")
    coder = random_tensors(picture_coder_shapes(), torch.float16, seed=2)
    coder["vae_scale"], coder["vae_shift"] = torch.tensor(0.3611), torch.tensor(0.1159)
    save_file(coder, folder / "vae" / "tiny_coder.safetensors")
    sizes = (
        ENCODER[key]
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        )
    )
    encoder = random_tensors(qwen3_shapes(*sizes, ENCODER_HEAD, ENCODER_VOCABULARY), torch.float32, seed=3)
    save_file(encoder, folder / "text_encoders" / "tiny_encoder.safetensors")


def small_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges: 256 bytes, then the control tokens and the reasoning markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def write_language_model(
    folder: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    context: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cpu",
) -> Path:
    """Write a random Qwen3 checkpoint that writes printable ASCII and almost never ends by itself; returns `folder`.

    The output matrix gives every token but the printable ones a logit of 0, and the printable ones logits with a spread
    of about 10, so that the best of 95 printable tokens almost always wins.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = small_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    heads, head, vocabulary = max(2, hidden // 32), 32, tokenizer.get_vocab_size()
    tensors = random_tensors(
        qwen3_shapes(hidden, 2 * hidden, layers, heads, heads // 2, head, vocabulary), dtype, seed, device
    )
    output = torch.zeros(vocabulary, hidden)
    printable = [
        tokenizer.token_to_id("Ġ"),
        *(tokenizer.token_to_id(chr(code)) for code in range(ord("!"), ord("~") + 1)),
    ]
    output[printable] = (
        torch.randn(len(printable), hidden, generator=torch.Generator().manual_seed(seed + 1)) * 10 / math.sqrt(hidden)
    )
    tensors["lm_head.weight"] = output.to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    end, turn = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": turn,
        "bos_token_id": None,
    }
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "eos_token_id": [turn, end],
        "pad_token_id": end,
    }
    settings = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, content in (("config", config), ("generation_config", generation), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2))
    return folder


def write_hole(model: Path, folder: Path) -> int:
    """Copy a tiny model to `folder` with sparse weights of 1.2 GB that take no disk space. Good for loading only.

    Returns the bytes of the weights.
    """
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    config |= sizes | {"head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, shape in qwen3_shapes(1024, 3072, 28, 16, 8, 128, 151_936).items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return at
