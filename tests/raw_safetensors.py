"""Writes safetensors files byte by byte, valid and hostile ones, without the library that Onedesk's reader is compared
with.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    """The header entry of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw_bytes(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file: its length field (which may be wrong), the header (bytes unchanged, anything else as JSON), then the
    data.
    """
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write_raw(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write raw_bytes to `path`."""
    path.write_bytes(raw_bytes(header, data, length=length))
    return path


def write_tensors(
    path: Path, tensors: dict[str, tuple[str, list[int], bytes]], *, header_bytes: int | None = None
) -> Path:
    """Write a valid file of (dtype, shape, bytes); `header_bytes` pads the header with spaces to exactly that
    length.
    """
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = entry(dtype, shape, len(data), len(data) + len(content))
        data += content
    text = json.dumps(header).encode()
    return write_raw(path, text if header_bytes is None else text.ljust(header_bytes), data)
