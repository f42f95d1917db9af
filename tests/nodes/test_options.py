"""What people type into widgets, and presets in folders."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from onedesk.nodes.options import or_default, parse_bias, parse_layers, parse_stops
from onedesk.nodes.presets import MAX_BYTES, NONE, PACK_FOLDER, preset_files, read_preset
from onedesk.service.errors import FileError, RequestError


def test_stop_strings():
    assert parse_stops("END\n\n  two \n" + r"\n\n" + "\n" + r"a\tb\\n") == ("END", "  two ", "\n\n", "a\tb\\n")
    assert parse_stops("") == ()


def test_biases():
    text = '1234: -5\n" cat": 2.5\n\n7=1e3\n"say \\"hi\\"" -inf\n"\\u732b": +1'
    assert parse_bias(text) == ((1234, -5.0), (" cat", 2.5), (7, 1000.0), ('say "hi"', -math.inf), ("猫", 1.0))


@pytest.mark.parametrize("line", ["1234", "cat: 1", "1234: x", '"open: 1', "1: nan", ": 1", "-1: 2", '"\\x": 1'])
def test_a_bias_that_cannot_be_read_names_its_line(line: str):
    with pytest.raises(RequestError, match=r"logit_bias, line 2: .* write a token and a number"):
        parse_bias(f"1: 1\n{line}")


def test_layers():
    assert parse_layers("-2") == (-2,)
    assert parse_layers(" 9, 18;27 ") == (9, 18, 27)
    for text, words in (("", "layers is empty"), ("x", "layers is 'x'"), ("1.5", "layers is '1.5'")):
        with pytest.raises(RequestError, match=words):
            parse_layers(text)


def test_below_the_lowest_meaning_is_the_models_default():
    assert or_default(-0.05, 0) is None
    assert or_default(0, 0) == 0
    assert or_default(-2, -2) == -2


def test_the_packs_presets_are_readable():
    files = preset_files([PACK_FOLDER])
    assert {"natural", "tags", "json"} <= set(files)
    for name in files:
        text = read_preset(name, [PACK_FOLDER])
        assert text
        assert text == text.strip()


def test_user_presets_come_beside_and_before_those_of_the_pack(tmp_path: Path):
    (tmp_path / "natural.txt").write_bytes("\ufeffmine\r\nagain\r\n".encode())
    (tmp_path / "蓝色.txt").write_text("蓝", encoding="utf-8")
    (tmp_path / ".hidden.txt").write_text("x")
    (tmp_path / "note.md").write_text("x")
    (tmp_path / f"{NONE}.txt").write_text("x")
    (tmp_path / "folder.txt").mkdir()
    folders = [PACK_FOLDER, tmp_path, tmp_path / "absent"]
    assert set(preset_files(folders)) == {*preset_files([PACK_FOLDER]), "蓝色"}
    assert read_preset("natural", folders) == "mine\nagain"
    assert read_preset("蓝色", folders) == "蓝"
    assert read_preset(NONE, folders) == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe", r"is not UTF-8 \(byte 0\)"), (b"x" * (MAX_BYTES + 1), "has more than 1048576 bytes")],
)
def test_a_preset_that_is_no_text_is_named(tmp_path: Path, content: bytes, words: str):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(FileError, match=f"the preset bad {words}"):
        read_preset("bad", [tmp_path])


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "absent", ""])
def test_only_listed_presets_are_read(tmp_path: Path, name: str):
    (tmp_path.parent / "secret.txt").write_text("secret")
    with pytest.raises(FileError, match="there is no preset"):
        read_preset(name, [tmp_path])
