"""llama.cpp as a peer: the files that are written for it, and what is said where it cannot be measured."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from onedesk.service.bench import llama_cpp_subject as llama
from onedesk.service.bench.ceiling import MIB, read_ceiling
from onedesk.service.bench.llama_cpp_subject import LlamaCpp
from onedesk.service.bench.random_gguf import (
    ALIGNMENT,
    BF16,
    F32,
    Q4_0,
    Q6_K,
    Q8_0,
    Blocks,
    random_gguf,
)
from onedesk.service.bench.shapes import SHAPES
from onedesk.service.bench.subject import SubjectSpec
from onedesk.service.errors import FileError, PeerError

SMALL = dict(SHAPES["qwen3-toy"]) | {"vocab_size": 300, "num_hidden_layers": 2}


@dataclass
class Header:
    """What the file says of itself, read as gguf.md describes it."""

    keys: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]
    data: int


def read_header(path: Path) -> Header:
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
        version, tensors, keys = unpack(file, "<IQQ")
        assert version == 3
        found = Header({text(file): value(file) for _ in range(keys)}, {}, 0)
        for _ in range(tensors):
            name, dims = text(file), unpack(file, "<I")[0]
            *shape, kind, offset = unpack(file, f"<{dims}QIQ")
            found.tensors[name] = (tuple(shape), kind, offset)
        found.data = -(-file.tell() // ALIGNMENT) * ALIGNMENT
    return found


def unpack(file: BinaryIO, layout: str) -> tuple[int, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def text(file: BinaryIO) -> str:
    return file.read(unpack(file, "<Q")[0]).decode()


def value(file: BinaryIO) -> Any:
    kind = unpack(file, "<I")[0]
    return text(file) if kind == 8 else unpack(file, {4: "<I", 6: "<f"}[kind])[0]


def size(shape: tuple[int, ...], blocks: Blocks) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1) // blocks.count * blocks.nbytes


@pytest.mark.parametrize(
    ("quant", "weights", "table"), [("none", BF16, BF16), ("int8", Q8_0, Q8_0), ("int4", Q4_0, Q6_K)]
)
def test_a_file_is_what_its_header_says(tmp_path: Path, quant: str, weights: Blocks, table: Blocks) -> None:
    path = random_gguf(SMALL, "small", quant, tmp_path)
    header = read_header(path)
    assert header.keys["general.architecture"] == "qwen3"
    assert header.keys["qwen3.block_count"] == 2
    assert header.keys["qwen3.vocab_size"] == 300
    assert header.tensors["token_embd.weight"][:2] == ((256, 300), table.number)
    assert header.tensors["blk.1.ffn_down.weight"][:2] == ((768, 256), weights.number)
    assert header.tensors["blk.0.attn_k.weight"][0] == (256, 256)
    assert len(header.tensors) == 2 + 2 * 11
    known = {blocks.number: blocks for blocks in (F32, weights, table)}
    at = 0
    for shape, kind, offset in header.tensors.values():
        assert offset == at
        at += -(-size(shape, known[kind]) // ALIGNMENT) * ALIGNMENT
    assert path.stat().st_size == header.data + at


def test_a_file_is_written_once(tmp_path: Path) -> None:
    made = random_gguf(SMALL, "small", "int4", tmp_path).stat().st_mtime_ns
    assert random_gguf(SMALL, "small", "int4", tmp_path).stat().st_mtime_ns == made
    assert len(list((tmp_path / "bench").iterdir())) == 1


def test_other_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="qwen3 shapes only"):
        random_gguf(SMALL | {"model_type": "other"}, "small", "int4", tmp_path)


def test_what_cannot_be_measured_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "find_spec", lambda _: None)
    with pytest.raises(PeerError, match="pip install"):
        LlamaCpp(SubjectSpec(tmp_path, "cpu", "none", 64, tmp_path, {}, ()))
    monkeypatch.setattr(llama, "find_spec", lambda _: object())
    with pytest.raises(PeerError, match="CPU only"):
        LlamaCpp(SubjectSpec(tmp_path, "cuda", "none", 64, tmp_path, {}, ()))


def test_the_compiled_reader_reads(tmp_path: Path) -> None:
    assert read_ceiling("cpu", available=512 * MIB, cache=tmp_path, repeats=1) > 1e6
    assert list(tmp_path.glob("kernels-*.so"))
