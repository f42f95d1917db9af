from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qwen_tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.errors import ModelError, RequestError
from onedesk.service.loader import files
from onedesk.service.text.tokenizer import LIMITS, Tokenizer, load_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "Here is a cat on a red mat, soft light.",
    "  two  spaces\n\n\n and lines\r\n\ttabs \n",
    "It's 12345.678 and we'll see; they'd've DONE'S",
    "def f(x):\n    return x ** 2  # carré",
    "你好，世界！今天天气怎么样？",
    "日本語のテキスト、한국어 텍스트, ภาษาไทย, हिन्दी पाठ, نص عربي, עברית",
    "👨‍👩‍👧‍👦 👩🏽‍🚀 🏳️‍🌈 🇩🇪🇫🇷 1️⃣ ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "e\u0301 é ﬁ Å Å",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "<tool_call>\n{}\n</tool_call><|fim_prefix|><|endoftext|><|im_end |><|im_end|",
    "\x00\x01\x7f\ufeff\u200b\u200d\ufffd",
    "𝕬𝖇𝖈 𐍈 🜁 \U0010ffff",
]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_as_transformers(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_control=skip) == oracle.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_encodes_as_transformers(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    assert tokenizer.encode(text) == oracle.encode(text, add_special_tokens=False)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ids_decode_as_transformers(tokenizer: Tokenizer, oracle: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=30))
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_control=skip) == oracle.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


def test_every_token_has_the_bytes_that_decoding_gives_it(tokenizer: Tokenizer, oracle: Any) -> None:
    step = 97  # every 97th id, and all the added ones
    for token in [*range(0, tokenizer.size, step), *range(tokenizer.size - 40, tokenizer.size)]:
        assert tokenizer.token_bytes(token).decode("utf-8", "replace") == oracle.decode(
            [token], clean_up_tokenization_spaces=False
        )


def test_known_figures_of_the_real_tokenizers() -> None:
    qwen3, qwen3_5 = (load_tokenizer(qwen_tokenizers.real_tokenizer(name)) for name in ("qwen3", "qwen3_5"))
    assert (qwen3.size, qwen3_5.size) == (151_669, 248_077)
    assert qwen3.encode("Hello, world!") == [9707, 11, 1879, 0]
    assert qwen3_5.encode("Hello, world!") == [9419, 11, 1814, 0]
    assert [qwen3.id_of(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")] == [
        151643,
        151644,
        151645,
        151667,
        151668,
    ]
    assert [qwen3_5.id_of(token) for token in ("<|endoftext|>", "<|im_end|>", "<think>")] == [248044, 248046, 248068]
    assert qwen3.control_ids == frozenset(range(151643, 151657))
    assert qwen3_5.control_ids == frozenset([*range(248044, 248058), *range(248070, 248077)])
    assert qwen3.id_of("no such token") is None


def test_ids_beyond_the_tokenizer_mean_nothing(tokenizer: Tokenizer) -> None:
    for token in (tokenizer.size, tokenizer.size + 1, 2**31, 2**40, -1):
        assert tokenizer.token_bytes(token) == b""
    assert tokenizer.decode([tokenizer.size, *tokenizer.encode("ok"), 2**40, -5]) == "ok"


@pytest.mark.parametrize(
    "part",
    ["The quick brown fox. ", "a", " ", " \n", "你好世界", "👨‍👩‍👧‍👦", "<|im_end|>"],
)
def test_a_prompt_of_a_megabyte_comes_back_whole(qwen3: Tokenizer, part: str) -> None:
    text = part * (1_000_000 // len(part.encode()) + 1)
    ids = qwen3.encode(text)
    assert len(ids) <= len(text.encode())
    assert qwen3.decode(ids, skip_control=False) == text


def test_half_a_character_is_refused_with_its_place(qwen3: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D83D\) at position 3; remove it"):
        qwen3.encode("abc\ud83d")


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    path = qwen_tokenizers.write_byte_tokenizer(tmp_path)
    backend = Backend.from_file(str(path))
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_id=0)
    backend.save(str(path))
    assert load_tokenizer(tmp_path).encode("a longer text") == list(b"a longer text")


def test_an_added_token_beyond_latin_letters_decodes_to_itself(tmp_path: Path) -> None:
    path = qwen_tokenizers.write_byte_tokenizer(tmp_path)
    backend = Backend.from_file(str(path))
    backend.add_tokens(["<中文 tag>"])
    backend.save(str(path))
    tokenizer = load_tokenizer(tmp_path)
    token = tokenizer.id_of("<中文 tag>")
    assert token == tokenizer.size - 1
    assert (
        tokenizer.decode(tokenizer.encode("a<中文 tag>b"))
        == "a<中文 tag>b"
        == backend.decode(backend.encode("a<中文 tag>b").ids)
    )


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"^Qwen3-0.6B: no tokenizer.json; add the file of that name") as caught:
        load_tokenizer(folder)
    assert str(tmp_path) not in str(caught.value)


def _is_a_folder(path: Path) -> None:
    path.mkdir()


def _is_a_pipe(path: Path) -> None:
    os.mkfifo(path)


def _leads_nowhere(path: Path) -> None:
    path.symlink_to(path.with_name("gone.json"))


def _leads_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (_is_a_folder, "is not a regular file"),
        (_is_a_pipe, "is not a regular file"),
        (_leads_nowhere, "cannot be opened: No such file or directory"),
        (_leads_to_itself, "cannot be opened: Too many levels of symbolic links"),
    ],
)
def test_a_tokenizer_that_is_no_readable_file_is_named_with_its_cause(
    tmp_path: Path, make: Callable[[Path], None], cause: str
) -> None:
    make(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match=rf"^{tmp_path.name}/tokenizer.json {cause}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_tokenizer_whose_bytes_cannot_be_read_is_named_with_its_cause(
    tmp_path: Path, monkeypatch: Any, error: int
) -> None:
    qwen_tokenizers.write_byte_tokenizer(tmp_path)

    def fail(*_: Any) -> bytes:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(files.os, "pread", fail)
    with pytest.raises(ModelError, match=rf"tokenizer.json cannot be read at byte 0: {os.strerror(error)}"):
        load_tokenizer(tmp_path)


def _changed(folder: Path, **changes: Any) -> Path:
    """A folder with the byte tokenizer, changed."""
    path = qwen_tokenizers.write_byte_tokenizer(folder)
    document = json.loads(path.read_text(encoding="utf-8"))
    model = document["model"] | changes.pop("model", {})
    path.write_text(json.dumps(document | {"model": model} | changes), encoding="utf-8")
    return folder


def test_a_panic_of_the_library_while_it_loads_is_an_error_of_the_file(tmp_path: Path) -> None:
    _changed(tmp_path, model={"continuing_subword_prefix": "éé", "end_of_word_suffix": "</w>", "merges": ["a b"]})
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read: .*; download it again") as caught:
        load_tokenizer(tmp_path)
    assert not isinstance(caught.value.__cause__, Exception)


def test_a_panic_of_the_library_while_it_encodes_is_an_error_of_the_file(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = load_tokenizer(
        _changed(tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, bytes_of]})
    )
    for _ in range(2):
        with pytest.raises(ModelError, match=r"tokenizer.json fails on this text: .*; download it again") as caught:
            tokenizer.encode("a" * 40 + "!")
        assert not isinstance(caught.value.__cause__, Exception)
    assert tokenizer.decode(tokenizer.encode("cat")) == "cat"


@pytest.mark.parametrize("number", [(1 << 32) - 1, 1 << 24])
def test_a_token_with_an_absurd_id_is_refused(tmp_path: Path, number: int) -> None:
    folder = _changed(tmp_path)
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    document["model"]["vocab"]["zzz"] = number
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ModelError, match=rf"has the token id {number}; ids below 16777216 are possible"):
        load_tokenizer(folder)


def test_a_tokenizer_of_too_many_objects_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b'{"x":[' + b"[]," * 2_000_000 + b"[]]}")
    with pytest.raises(ModelError, match=r"tokenizer.json holds 2,000,003 lists and objects"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "EOF while parsing"),
        (b'{"version": "1.0", "mod', "EOF while parsing"),
        (b"\xff\xfe\x00garbage", "expected value"),
        (b"[]", "cannot be read"),
        (b"{}", "cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "only a Git LFS pointer"),
    ],
)
def test_a_broken_tokenizer_says_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(tmp_path)


def test_an_absurdly_large_tokenizer_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(LIMITS.nbytes + 1)
    with pytest.raises(ModelError, match=r"has 67,108,865 bytes; at most 67,108,864 are read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "decoder", [decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), None]
)
def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path, decoder: Any) -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder:
        backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"Onedesk reads byte-level tokenizers"):
        load_tokenizer(tmp_path)


def test_the_small_tokenizer_is_one_id_a_byte(tmp_path: Path) -> None:
    path = qwen_tokenizers.write_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.size == 282
    assert tokenizer.encode("hé\n") == list("hé\n".encode())
    assert tokenizer.id_of("<|im_end|>") == 258
    assert json.loads(path.read_text(encoding="utf-8"))["model"]["merges"] == []
