"""Random GGUF files with the shape of a qwen3 checkpoint, for measuring llama.cpp: how fast it runs does not depend on
the values.

Written by llama.cpp's own description of the format (gguf.md, version 3) and of its block formats (ggml-common.h).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import FileError
from ..model.families import family_of
from ..model.layers import Widths
from ..work_folder import work_folder

ALIGNMENT = 32
_VERSION = 3
_UINT32, _FLOAT32, _STRING = 4, 6, 8
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a tensor type of GGUF stores numbers: `count` of them in `nbytes`, an fp16 scale at byte `scale` of a
    block (None: no scale).
    """

    number: int
    count: int
    nbytes: int
    scale: int | None


F32, BF16 = Blocks(0, 1, 4, None), Blocks(30, 1, 2, None)
Q4_0, Q8_0, Q6_K = Blocks(2, 32, 18, 0), Blocks(8, 32, 34, 0), Blocks(14, 256, 210, 208)
# What llama.cpp is measured with where we run a quantization; llama-quantize keeps embeddings and head of Q4_0 in Q6_K.
KINDS: Mapping[str, tuple[str, Blocks, Blocks]] = {
    "none": ("BF16", BF16, BF16),
    "int8": ("Q8_0", Q8_0, Q8_0),
    "int4": ("Q4_0", Q4_0, Q6_K),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    blocks: Blocks

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.blocks.count * self.blocks.nbytes


def random_gguf(config: Mapping[str, Any], name: str, quant: str, cache: Path) -> Path:
    """The GGUF file of `name`'s shape for our quantization `quant`, written on first use under cache/bench.

    Raises FileError, and ModelError for a config that cannot be read.
    """
    title, weights, table = KINDS[quant]
    target = cache / "bench" / f"{name}-{title}.gguf"
    if target.is_file():
        return target
    if config.get("model_type") != "qwen3":
        raise FileError(
            f"llama.cpp is measured on qwen3 shapes only, and {name} is {config.get('model_type')}; leave --against out"
        )
    try:
        with work_folder(target.parent, name) as folder:
            part = folder / target.name
            with part.open("wb") as file:
                _write(file, config, name, weights, table)
            part.replace(target)
    except OSError as error:
        raise FileError(
            f"cannot write the random GGUF file of {name} into the cache: {error.strerror}; free disk space there"
        ) from error
    return target


def _write(file: BinaryIO, config: Mapping[str, Any], name: str, weights: Blocks, table: Blocks) -> None:
    read = family_of(config).read_config(config)
    tensors = list(_tensors(read.widths, read.layers, read.tied, weights, table))
    keys = list(_keys(read.widths, read.layers, config, name))
    file.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(keys)))
    file.writelines(keys)
    at = 0
    for tensor in tensors:
        shape = tensor.shape[::-1]  # the fastest dimension comes first
        file.write(_text(tensor.name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.blocks.number, at))
        at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    _pad(file)
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        for chunk in _values(tensor, generator):
            file.write(chunk.view(torch.uint8).numpy().data)
        _pad(file)


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _keys(widths: Widths, layers: int, config: Mapping[str, Any], name: str) -> Iterator[bytes]:
    for key, text in (("general.architecture", "qwen3"), ("general.name", name), ("tokenizer.ggml.model", "no_vocab")):
        yield _text(key) + struct.pack("<I", _STRING) + _text(text)
    whole = {
        "block_count": layers,
        "context_length": int(config["max_position_embeddings"]),
        "embedding_length": widths.hidden,
        "feed_forward_length": widths.intermediate,
        "attention.head_count": widths.heads,
        "attention.head_count_kv": widths.kv_heads,
        "attention.key_length": widths.head_dim,
        "attention.value_length": widths.head_dim,
        "vocab_size": widths.vocab,
    }
    for key, number in whole.items():
        yield _text(f"qwen3.{key}") + struct.pack("<II", _UINT32, number)
    for key, value in (
        ("attention.layer_norm_rms_epsilon", config["rms_norm_eps"]),
        ("rope.freq_base", config["rope_theta"]),
    ):
        yield _text(f"qwen3.{key}") + struct.pack("<If", _FLOAT32, float(value))


def _tensors(widths: Widths, layers: int, tied: bool, weights: Blocks, table: Blocks) -> Iterator[_Tensor]:
    hidden, inner, dim = widths.hidden, widths.intermediate, widths.head_dim
    if hidden % table.count:
        table = Q8_0
    q, kv = widths.heads * dim, widths.kv_heads * dim
    yield _Tensor("token_embd.weight", (widths.vocab, hidden), table)
    yield _Tensor("output_norm.weight", (hidden,), F32)
    if not tied:
        yield _Tensor("output.weight", (widths.vocab, hidden), table)
    matrices = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q)}
    matrices |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    norms = {"attn_norm": hidden, "attn_q_norm": dim, "attn_k_norm": dim, "ffn_norm": hidden}
    for layer in range(layers):
        for key, width in norms.items():
            yield _Tensor(f"blk.{layer}.{key}.weight", (width,), F32)
        for key, shape in matrices.items():
            yield _Tensor(f"blk.{layer}.{key}.weight", shape, weights)


def _values(tensor: _Tensor, generator: torch.Generator) -> Iterator[torch.Tensor]:
    blocks, left = tensor.blocks, math.prod(tensor.shape) // tensor.blocks.count
    scale = torch.tensor([2.0**-12], dtype=torch.float16).view(torch.uint8)
    while left:
        size = min(left, _CHUNK // blocks.nbytes)
        if blocks.scale is None:
            wide = torch.ones(size) if len(tensor.shape) == 1 else torch.randn(size, generator=generator).mul_(0.02)
            yield wide.to(torch.bfloat16) if blocks is BF16 else wide
        else:
            made = torch.randint(0, 256, (size, blocks.nbytes), generator=generator, dtype=torch.uint8)
            made[:, blocks.scale : blocks.scale + 2] = scale
            yield made.view(-1)
        left -= size
