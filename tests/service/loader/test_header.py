"""Headers: what is honest is read as the safetensors library reads it, what lies is refused with a message that says
where.
"""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.errors import FileError
from onedesk.service.loader.header import DTYPE_BITS, HEADER_LIMIT, read_header
from onedesk.service.loader.scan import ENTRY_LIMIT, METADATA_LIMIT
from raw_safetensors import entry, raw_bytes, write_raw, write_tensors

U8 = entry("U8", [4], 0, 4)


def refusal(path: Path) -> str:
    """The message with which a file is refused; it never tells where the file lies."""
    with pytest.raises(FileError) as caught:
        read_header(path)
    message = str(caught.value)
    assert path.name in message
    assert str(path.parent) not in message
    return message


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "has 0 bytes; a safetensors file has at least 8"),
        (b"\x01\x02\x03", "has 3 bytes; a safetensors file has at least 8"),
        (raw_bytes(b"{}", length=3), "the header would have 3 bytes, only 2 follow"),
        (
            raw_bytes(b"{}", length=HEADER_LIMIT + 1),
            f"would have {HEADER_LIMIT + 1} bytes, the format allows {HEADER_LIMIT}",
        ),
        (raw_bytes(b"{}", length=2**64 - 1), "would have 18446744073709551615 bytes"),
        (raw_bytes(b'{"\xff": 1}'), "is not UTF-8 text (byte 2 of it)"),
        (raw_bytes(b" {}"), "does not begin with an object"),
        (raw_bytes(b"[1]"), "does not begin with an object"),
        (raw_bytes(b"null"), "does not begin with an object"),
        (raw_bytes(b"{"), "not JSON: a text in quotes is wanted at character 1, there is its end"),
        (raw_bytes(b"{a:1}"), "not JSON: a text in quotes is wanted at character 1"),
        (raw_bytes(b'{"a'), "not JSON: a text that ends is wanted"),
        (raw_bytes(b'{"a" 1}'), "not JSON: : is wanted at character 5"),
        (raw_bytes(b'{"__metadata__":{},}'), "not JSON: a text in quotes is wanted at character 19"),
        (raw_bytes(b'{"__metadata__":{}]'), "not JSON: , or } is wanted at character 18"),
        (raw_bytes(b"{}{}"), "not JSON: the end is wanted at character 2"),
        (raw_bytes(b"{}\0"), "not JSON: the end is wanted"),
    ],
)
def test_what_is_no_header_is_refused(tmp_path: Path, content: bytes, wanted: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert wanted in refusal(path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"a":1}', "tensor 'a' is not described by an object"),
        ('{"a":[]}', "tensor 'a' is not described by an object"),
        ('{"a":{}}', "tensor 'a' has no dtype"),
        ('{"a":{"dtype":"U8","data_offsets":[0,4]}}', "tensor 'a' has no shape"),
        ('{"a":{"dtype":"U8","shape":[4]}}', "tensor 'a' has no data_offsets"),
        ('{"a":{"dtype":"U8","shape":[4],"dtype":"U8","data_offsets":[0,4]}}', "tensor 'a' has the key 'dtype' twice"),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{}}', "has the key 'a' twice"),
        ('{"a":{"dtype":"U8" "shape"}}', "tensor 'a' has a description that is not JSON"),
        (
            '{"a":{"dtype":{"of":"U8"},"shape":[4],"data_offsets":[0,4]}}',
            "tensor 'a' has a description that is not JSON",
        ),
        ('{"a":{"dtype":' + "[" * 40000 + "}}", "tensor 'a' has a description that is not JSON"),
        ('{"a":{"dtype":"U8","shape":[' + "1," * ENTRY_LIMIT + "1]}}", f"without an end in {ENTRY_LIMIT} characters"),
        ('{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "has half a character in its name"),
        ('{"__metadata__":1}', "__metadata__ is not an object"),
        ('{"__metadata__":{"a":1}}', "__metadata__ has a value for 'a' that is not text"),
        ('{"__metadata__":{"a":"","a":""}}', "has the key 'a' twice"),
        (
            '{"__metadata__":{' + ",".join(f'"{i}":""' for i in range(METADATA_LIMIT + 1)) + "}}",
            f"more than {METADATA_LIMIT} entries",
        ),
    ],
)
def test_a_broken_entry_is_named(tmp_path: Path, text: str, wanted: str) -> None:
    assert wanted in refusal(write_raw(tmp_path / "model.safetensors", text.encode(), b"abcd"))


@pytest.mark.parametrize("dtype", ["F7", "f32", "", "BF16 ", None, 3, ["U8"], "x" * 500])
def test_an_unknown_dtype_is_refused_and_the_known_are_listed(tmp_path: Path, dtype: Any) -> None:
    message = refusal(write_raw(tmp_path / "m.safetensors", {"w": {**U8, "dtype": dtype}}, b"abcd"))
    assert "tensor 'w' has the dtype" in message
    assert all(known in message for known in DTYPE_BITS)
    assert len(message) < 500


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (None, "the shape None"),
        (4, "the shape 4"),
        ("4", "the shape '4'"),
        ([True, 4], "the shape [True, 4]"),
        ([4.0], "the shape [4.0]"),
        ([-4], "the shape [-4]"),
        ([-2, -2], "the shape [-2, -2]"),
        ([[4]], "the shape [a list]"),
        ([None], "the shape [None]"),
        ([10**1000], "the shape [a number of 3322 bits]"),
        ([2**63], "whole numbers from 0 is needed"),
        ([2**62, 2**62], "more than 2^63 numbers"),
        ([2**62, 2**62, 0], "more than 2^63 numbers"),
        ([1] * 65, "has 65 dimensions; at most 64"),
        ([5], "of U8 [5] needs 5 bytes, its offsets give 4"),
        ([], "of U8 [] needs 1 bytes, its offsets give 4"),
        ([0], "of U8 [0] needs 0 bytes, its offsets give 4"),
        ([2**40], f"needs {2**40} bytes, its offsets give 4"),
    ],
)
def test_a_wrong_shape_is_refused(tmp_path: Path, shape: Any, wanted: str) -> None:
    message = refusal(write_raw(tmp_path / "m.safetensors", {"w": {**U8, "shape": shape}}, b"abcd"))
    assert "tensor 'w'" in message
    assert wanted in message


@pytest.mark.parametrize(
    ("offsets", "wanted"),
    [
        (None, "the offsets None"),
        ([0], "the offsets [0]"),
        ([0, 4, 4], "the offsets [0, 4, 4]"),
        ([-4, 0], "the offsets [-4, 0]"),
        ([0.0, 4.0], "the offsets [0.0, 4.0]"),
        ([False, 4], "the offsets [False, 4]"),
        ([0, 2**64], "the offsets [0, 18446744073709551616]"),
        ([4, 0], "the offsets 4 to 0, the end before the start"),
        ([0, 2**62], "it is cut short or damaged"),
        ([4, 8], "it is cut short or damaged"),
    ],
)
def test_wrong_offsets_are_refused(tmp_path: Path, offsets: Any, wanted: str) -> None:
    message = refusal(write_raw(tmp_path / "m.safetensors", {"w": {**U8, "data_offsets": offsets}}, b"abcd"))
    assert "tensor 'w'" in message
    assert wanted in message


def test_a_file_cut_short_says_how_long_it_must_be(tmp_path: Path) -> None:
    whole = raw_bytes({"w": U8}, b"abcd")
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole[:-1])
    assert refusal(path) == (
        f"model.safetensors: tensor 'w' ends at byte {len(whole)}, the file has {len(whole) - 1}; "
        "it is cut short or damaged: finish the download or get it again"
    )


@pytest.mark.parametrize(
    ("spans", "data", "wanted"),
    [
        ([(0, 4), (2, 6)], 6, "tensor 'b' overlaps 'a'"),
        ([(0, 4), (0, 4)], 4, "overlaps"),
        ([(0, 4), (5, 9)], 9, "tensor 'b' leaves a hole after 'a'"),
        ([(1, 5)], 5, "tensor 'a' leaves a hole after the header"),
        ([(0, 4)], 7, "3 bytes follow the last tensor"),
        ([], 2, "2 bytes follow the last tensor"),
    ],
)
def test_tensors_must_fill_the_file(tmp_path: Path, spans: list[tuple[int, int]], data: int, wanted: str) -> None:
    header = {name: entry("U8", [end - begin], begin, end) for name, (begin, end) in zip("ab", spans, strict=False)}
    assert wanted in refusal(write_raw(tmp_path / "m.safetensors", header, bytes(data)))


def test_half_bytes_are_refused(tmp_path: Path) -> None:
    message = refusal(write_raw(tmp_path / "m.safetensors", {"w": entry("F4", [3], 0, 1)}, b"a"))
    assert "of F4 [3] has 12 bits, which is not a whole number of bytes" in message


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        (b"GGUF\x03\0\0\0" + bytes(40), "a GGUF file"),
        (b"PK\x03\x04" + bytes(60), "a pickle file"),
        (b"\x80\x02}q\x00." + bytes(60), "a pickle file"),
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0" + bytes(60), "a pickle file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>" + b"x" * 60, "a web page"),
        (b"<HTML><body>404</body>", "a web page"),
        (bytes(4096), "a file of zeros"),
    ],
)
def test_what_is_no_safetensors_file_is_called_by_its_kind(tmp_path: Path, head: bytes, wanted: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(head)
    message = refusal(path)
    assert f"model.safetensors is not a safetensors file: it looks like {wanted}" in message


@pytest.mark.parametrize("first", [b"\x80\x02", b"\x80\x04", b"PK\x03", b"<h", b"GG"])
def test_an_honest_header_may_begin_like_another_format(tmp_path: Path, first: bytes) -> None:
    """The first bytes of a safetensors file are the header's length: 0x0480 bytes begin like a pickle."""
    length = int.from_bytes(first, "little")
    path = write_tensors(tmp_path / "m.safetensors", {"w": ("U8", [4], b"abcd")}, header_bytes=length)
    assert path.read_bytes().startswith(first)
    assert read_header(path).tensors["w"].start == 8 + length


def test_a_damaged_file_is_not_mistaken_for_a_pickle(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "m.safetensors", {"w": ("U8", [4], b"abcd")}, header_bytes=0x0480)
    path.write_bytes(path.read_bytes()[:300])
    assert "pickle" not in refusal(path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """A FIFO must not block, a directory and a file that is absent have their own words."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    assert "is not a regular file" in refusal(tmp_path / "fifo")
    assert "is not a regular file" in refusal(tmp_path / "folder")
    assert "cannot be opened: No such file" in refusal(tmp_path / "absent")
    with pytest.raises(FileError, match="is not a file name"):
        read_header(tmp_path / "a\0b")


def test_every_dtype_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    """8 numbers of each dtype have as many bytes as a number has bits."""
    content = {dtype: (dtype, [2, 4], bytes(range(bits))) for dtype, bits in DTYPE_BITS.items()}
    path = write_tensors(
        tmp_path / "m.safetensors", {**content, "scalar": ("F32", [], b"abcd"), "none": ("BF16", [3, 0], b"")}
    )
    _compare(path)
    header = read_header(path)
    assert all(header.tensors[dtype].elements == 8 for dtype in DTYPE_BITS)
    assert header.file_bytes == path.stat().st_size


def test_metadata_and_names_of_any_language_are_kept(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt", "写": '}{"\\'}, "重み.🙂": U8, "": entry("U8", [], 4, 5)}
    found = read_header(
        write_raw(tmp_path / "m.safetensors", json.dumps(header, ensure_ascii=False).encode() + b"  \n", b"abcde")
    )
    assert found.metadata == header["__metadata__"]
    assert list(found.tensors) == ["重み.🙂", ""]


def test_a_hostile_header_is_not_built_up_in_memory(tmp_path: Path) -> None:
    """10 MB of nested lists would be 250 MB of objects; refused, they cost the text and its bytes."""
    size = 10_000_000
    path = write_raw(tmp_path / "m.safetensors", b'{"a":[' + b"[]," * (size // 3) + b"[]]}")
    tracemalloc.start()
    try:
        assert "tensor 'a' is not described by an object" in refusal(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * size


def _compare(path: Path) -> None:
    """Whatever is accepted here, the library accepts too, and reads the same."""
    header = read_header(path)
    content = path.read_bytes()
    theirs = dict(safetensors.deserialize(content))
    assert sorted(theirs) == sorted(header.tensors)
    for name, info in header.tensors.items():
        assert (info.dtype, list(info.shape)) == (theirs[name]["dtype"], list(theirs[name]["shape"]))
        assert content[info.start : info.start + info.nbytes] == bytes(theirs[name]["data"])


BASE: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": entry("BF16", [2, 3], 0, 12),
    "b": entry("F32", [1], 12, 16),
    "none": entry("I64", [0, 5], 16, 16),
}
DATA = bytes(range(16))
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(list(DTYPE_BITS)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
SMALL = st.lists(st.integers(0, 20), max_size=4)
MUTATED = st.fixed_dictionaries(
    {},
    optional={
        "dtype": ANYTHING | st.sampled_from(list(DTYPE_BITS)),
        "shape": ANYTHING | SMALL,
        "data_offsets": ANYTHING | SMALL,
    },
)


def _never_crashes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        read_header(path)
    except FileError as error:
        assert str(error).isprintable()  # noqa: PT017 (both outcomes are right)
        return
    _compare(path)


ONE_FOLDER = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ONE_FOLDER
@given(name=st.sampled_from(list(BASE)), change=MUTATED, whole=st.none() | ANYTHING)
def test_no_entry_crashes_the_reader(tmp_path: Path, name: str, change: dict[str, Any], whole: Any) -> None:
    header = {**BASE, name: {**BASE[name], **change} if whole is None else whole}
    _never_crashes(tmp_path / "m.safetensors", raw_bytes(header, DATA))


@ONE_FOLDER
@given(
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4), cut=st.integers(0, 30)
)
def test_no_flipped_byte_crashes_the_reader(tmp_path: Path, edits: list[tuple[int, int]], cut: int) -> None:
    content = bytearray(raw_bytes(BASE, DATA))
    for at, value in edits:
        content[at % len(content)] = value
    _never_crashes(tmp_path / "m.safetensors", bytes(content[: len(content) - cut]))


@ONE_FOLDER
@given(
    text=st.text(alphabet='{}[]:,"\\0123456789.-eEtruefalsn\u00e9 dtypeshapU8', max_size=60), tail=st.binary(max_size=8)
)
def test_no_text_crashes_the_reader(tmp_path: Path, text: str, tail: bytes) -> None:
    _never_crashes(tmp_path / "m.safetensors", raw_bytes(b"{" + text.encode(), tail))


@ONE_FOLDER
@given(length=st.integers(0, 2**64 - 1), content=st.binary(max_size=64))
def test_no_length_crashes_the_reader(tmp_path: Path, length: int, content: bytes) -> None:
    _never_crashes(tmp_path / "m.safetensors", struct.pack("<Q", length) + content)
