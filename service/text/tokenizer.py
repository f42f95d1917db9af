"""Text to token ids and back, from a checkpoint's own tokenizer.json (byte-level BPE, as every Qwen has)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ..errors import ModelError, RequestError

FILE_LIMIT = 256 * 2**20  # bytes; the largest real Qwen tokenizer.json has 20 MB
_LFS_POINTER = b"version https://git-lfs"


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it is printable Latin-1, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_of_character()


class Tokenizer:
    """A byte-level tokenizer.

    `size` is the highest id plus one, added tokens included; a model's logits may be wider (padded), and ids from `size` on mean
    nothing. `longest` is the most bytes that one token stands for. `control_ids` are the tokens marked special (`<|im_end|>` and its
    like, not `<think>`): they never show in text.
    """

    def __init__(self, backend: Backend) -> None:
        backend.no_truncation()  # a tokenizer.json saved after training may carry both; a prompt is never cut or padded silently
        backend.no_padding()
        self._backend = backend
        # The same model and rules without the added tokens, to which no text can become a control token.
        self._plain = Backend(backend.model)
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer
        self.added_tokens: Mapping[int, AddedToken] = backend.get_added_tokens_decoder()
        self.control_ids: frozenset[int] = frozenset(token_id for token_id, token in self.added_tokens.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.size: int = max(vocabulary.values(), default=-1) + 1
        self.longest: int = max(map(len, vocabulary), default=1)

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of `text`, without any added start or end token.

        Text of added tokens becomes those tokens wherever it stands, as in transformers; with `parse_special` False it stays text.
        For a conversation, whose template writes control tokens and whose messages must not, see ProtectedText.
        Raises RequestError for half a character.
        """
        _require_whole_characters(text)
        if parse_special:
            return self._backend.encode(text, add_special_tokens=False).ids
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if self.added_tokens.keys().isdisjoint(ids):
            return ids
        # A vocabulary can hold a control token as a word of its own; no single character is one.
        return [token for character in text for token in self._plain.encode(character, add_special_tokens=False).ids]

    def encode_for_pooling(self, text: str) -> list[int]:
        """Token ids of `text` with the start and end tokens that the tokenizer's own post-processor adds, such as the end token
        whose state is the vector of an embedding model. Raises RequestError for half a character."""
        _require_whole_characters(text)
        return self._backend.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Iterable[int], skip_control: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids that no token has become nothing."""
        kept = (token for token in ids if not (skip_control and token in self.control_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """The id of a token by its exact text, e.g. `<|im_end|>`; None where there is none."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text (UTF-8, perhaps a part of a character); empty for an id that no token has."""
        if not 0 <= token < self.size:
            return b""
        written = self._backend.id_to_token(token)
        if written is None:
            return b""
        try:
            return bytes([_BYTE_OF[character] for character in written])
        except KeyError:  # an added token in plain text, with a space or beyond Latin-1
            return written.encode("utf-8")


def _require_whole_characters(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(f"the text has half a character (lone surrogate U+{code:04X}) at position {error.start}; remove it") from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read `tokenizer.json` of a checkpoint folder; raises ModelError that says which file to add or what is wrong with it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder.name}: no tokenizer.json; add the file of that name from the model's own repository")
    size = path.stat().st_size
    if size > FILE_LIMIT:
        raise ModelError(f"{folder.name}/tokenizer.json has {size:,} bytes; a tokenizer has at most {FILE_LIMIT:,}: download it again")
    content = path.read_bytes()
    if content.startswith(_LFS_POINTER):
        raise ModelError(f"{folder.name}/tokenizer.json is only a Git LFS pointer; download the file itself (git lfs pull)")
    try:
        backend = Backend.from_buffer(content)
    except Exception as error:
        # tokenizers raises bare Exception for every fault of the file
        raise ModelError(f"{folder.name}/tokenizer.json cannot be read: {error}; download it again") from error
    _require_byte_level(backend, folder.name)
    return Tokenizer(backend)


def _require_byte_level(backend: Backend, folder_name: str) -> None:
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds != ["ByteLevel"]:
        found = ", ".join(map(str, kinds))
        raise ModelError(f"{folder_name}/tokenizer.json decodes by {found}; Onedesk reads byte-level tokenizers (ByteLevel) only")
