"""The header of a safetensors file, validated before anything is allocated for its tensors.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes without holes.
Source: the format section of the safetensors documentation.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import FileError
from .files import SourceFile, open_regular, read_exactly, short
from .scan import DAMAGED, HeaderText, say

HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
PREFIX_BYTES = 8
ENDINGS = (".safetensors", ".sft")
SIZE_LIMIT = 2**63 - 1  # no file or tensor is larger
RANK_LIMIT = 64  # dimensions; torch has no operation on more

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
        "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
        "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
        "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The location of one tensor: `start` is its offset in the file, `nbytes` its size, both in bytes.

    `named`: the checkpoint's index names it, or there is no index. An unnamed tensor is used only where the network
    requires it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    source: SourceFile
    named: bool = True

    @property
    def file(self) -> Path:
        return self.source.path

    @property
    def elements(self) -> int:
        """How many numbers the tensor holds."""
        return self.nbytes * 8 // DTYPE_BITS[self.dtype]


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header: every tensor is inside the file, tensors do not overlap, and every byte belongs to one."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    file_bytes: int


def read_header(path: Path, *, shown: str | None = None) -> Header:
    """Read and validate the header of a safetensors file; `shown` is the file's name in messages (default: its last
    part).

    Raises FileError naming the file, the tensor, and the expected and actual values.
    """
    shown = path.name if shown is None else shown
    with open_regular(path, shown) as (fd, source):
        try:
            text, data_start = _read_text(fd, source)
        except FileError as error:
            looks = _looks_like(read_exactly(fd, min(source.size, 256), 0, shown))
            if looks is None and shown.endswith(ENDINGS):
                raise
            why = (
                f": it looks like {looks}"
                if looks
                else f"; name the model's folder, or a file that ends in {ENDINGS[0]}"
            )
            raise FileError(f"{shown} is not a safetensors file{why}") from error
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for name in text.keys():  # noqa: SIM118 (a cursor, not a mapping)
        if name == "__metadata__":
            metadata = text.texts()
        else:
            where = f"{shown}: tensor {short(name)}"
            tensors[name] = _tensor(name, text.flat_object(where), where, data_start, source)
    text.finish()
    _check_layout(tensors.values(), data_start, source)
    return Header(MappingProxyType(tensors), MappingProxyType(metadata), source.size)


def _read_text(fd: int, source: SourceFile) -> tuple[HeaderText, int]:
    """The header's text, and the offset of the first tensor byte."""
    shown, size = source.shown, source.size
    if size < PREFIX_BYTES:
        raise FileError(f"{shown} has {size} bytes; a safetensors file has at least {PREFIX_BYTES}; {DAMAGED}")
    (length,) = struct.unpack("<Q", read_exactly(fd, PREFIX_BYTES, 0, shown))
    if length > HEADER_LIMIT:
        raise FileError(f"{shown}: the header would have {length} bytes, the format allows {HEADER_LIMIT}; {DAMAGED}")
    if length > size - PREFIX_BYTES:
        raise FileError(
            f"{shown}: the header would have {length} bytes, only {size - PREFIX_BYTES} follow in the file; {DAMAGED}"
        )
    return HeaderText(read_exactly(fd, length, PREFIX_BYTES, shown), shown), PREFIX_BYTES + length


def _tensor(name: str, entry: Mapping[str, Any], where: str, data_start: int, source: SourceFile) -> TensorInfo:
    if any("\ud800" <= c <= "\udfff" for c in name):
        raise FileError(f"{where} has half a character in its name; {DAMAGED}")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            raise FileError(f"{where} has no {key}; {DAMAGED}")
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FileError(f"{where} has the dtype {say(dtype)}; known are {', '.join(DTYPE_BITS)}")
    bits = _elements(shape, where) * DTYPE_BITS[dtype]
    begin, end = _offsets(entry["data_offsets"], where)
    if data_start + end > source.size:
        raise FileError(
            f"{where} ends at byte {data_start + end}, the file has {source.size}; "
            "it is cut short or damaged: finish the download or get it again"
        )
    if bits % 8:
        raise FileError(
            f"{where} of {dtype} {say(shape)} has {bits} bits, which is not a whole number of bytes; {DAMAGED}"
        )
    if bits // 8 != end - begin:
        raise FileError(
            f"{where} of {dtype} {say(shape)} needs {bits // 8} bytes, its offsets give {end - begin}; {DAMAGED}"
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, end - begin, source)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= SIZE_LIMIT


def _elements(shape: Any, where: str) -> int:
    if not isinstance(shape, list) or not all(_whole(size) for size in shape):
        raise FileError(f"{where} has the shape {say(shape)}; a list of whole numbers from 0 is needed; {DAMAGED}")
    if len(shape) > RANK_LIMIT:
        raise FileError(f"{where} has {len(shape)} dimensions; at most {RANK_LIMIT} are possible; {DAMAGED}")
    elements = 1
    for size in shape:
        elements *= size
        if elements > SIZE_LIMIT:
            raise FileError(f"{where} has the shape {say(shape)}: more than 2^63 numbers; {DAMAGED}")
    return elements


def _offsets(offsets: Any, where: str) -> tuple[int, int]:
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(offset) for offset in offsets):
        raise FileError(f"{where} has the offsets {say(offsets)}; two whole numbers from 0 are needed; {DAMAGED}")
    begin, end = offsets
    if begin > end:
        raise FileError(f"{where} has the offsets {begin} to {end}, the end before the start; {DAMAGED}")
    return begin, end


def _check_layout(tensors: Iterable[TensorInfo], data_start: int, source: SourceFile) -> None:
    cursor, before = data_start, "the header"
    for info in sorted(tensors, key=lambda t: (t.start, t.nbytes)):
        if info.start != cursor:
            problem = "overlaps" if info.start < cursor else "leaves a hole after"
            raise FileError(
                f"{source.shown}: tensor {short(info.name)} {problem} {before}: it begins at byte {info.start}, not"
                f" {cursor}; {DAMAGED}"
            )
        cursor, before = info.start + info.nbytes, short(info.name)
    if cursor != source.size:
        raise FileError(
            f"{source.shown}: {source.size - cursor} bytes follow the last tensor, which ends at byte {cursor};"
            f" {DAMAGED}"
        )


def _looks_like(head: bytes) -> str | None:
    """The likely format of a file without a safetensors header, from its first bytes; it is never opened as that
    format.
    """
    if head[PREFIX_BYTES : PREFIX_BYTES + 1] == b"{":
        return None
    text = head.lstrip().lower()
    if head.startswith(b"GGUF"):
        return "a GGUF file; get the safetensors form of this model"
    if head.startswith(b"PK\x03\x04") or (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        return (
            "a pickle file (.bin, .pt, .pth), which can run code and is never read; get the safetensors form of this"
            " model"
        )
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself; fetch it with git lfs pull, or download it again"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page saved in place of the file; download it again"
    if head and not head.strip(b"\0"):
        return "a file of zeros, left by a download that was interrupted; download it again"
    return None
