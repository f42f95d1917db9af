"""Text to token ids and back, from a checkpoint's own tokenizer.json (byte-level BPE, as every Qwen has)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ..errors import FileError, ModelError, RequestError
from ..loader.files import exists_at_all, read_whole
from ..loader.json_files import LFS_POINTER, JsonLimits, check_counts

FILE = "tokenizer.json"
# The largest of Qwen's has 20 MB: 250,000 tokens, and as many pairs of them. 400 MB are made of it.
LIMITS = JsonLimits(64 << 20, 2_000_000, 8_000_000, 8_000_000)
LARGEST_ID = 1 << 24  # Qwen's largest vocabulary has 248,320


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it is printable Latin-1, else from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_of_character()


class Tokenizer:
    """A byte-level tokenizer.

    `size` is the highest id plus one, added tokens included; a model's logits may be wider (padded), and ids from
    `size` on mean nothing. `longest` is the most bytes that one token stands for. `control_ids` are the tokens marked
    special (`<|im_end|>` and its like, not `<think>`): they never show in text.
    """

    def __init__(self, backend: Backend, origin: str = FILE) -> None:
        """`origin` names the file in messages. Raises ModelError."""
        self._backend = backend
        self._origin = origin
        with _as_model_errors(origin):
            # A tokenizer.json saved after training may have both; a prompt is never cut or padded silently.
            backend.no_truncation()
            backend.no_padding()
            self.added_tokens: Mapping[int, AddedToken] = backend.get_added_tokens_decoder()
            self._plain = _without_added_tokens(backend)
            vocabulary = backend.get_vocab(with_added_tokens=True)
        self.control_ids: frozenset[int] = frozenset(
            token_id for token_id, token in self.added_tokens.items() if token.special
        )
        self.size: int = max(vocabulary.values(), default=-1) + 1
        self.longest: int = max(map(len, vocabulary), default=1) or 1
        if self.size > LARGEST_ID:
            raise ModelError(
                f"{origin} has the token id {self.size - 1}; ids below {LARGEST_ID} are possible: download it again"
            )

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of `text`, without any added start or end token.

        Text of added tokens becomes those tokens wherever it stands, as in transformers; with `parse_special` False it
        stays text. For a conversation, whose template writes control tokens and whose messages must not, see
        ProtectedText. Raises RequestError for half a character, ModelError where the tokenizer itself fails.
        """
        if parse_special:
            return self._ids(self._backend, text)
        ids = self._ids(self._plain, text)
        if self.added_tokens.keys().isdisjoint(ids):
            return ids
        # A vocabulary can hold a control token as a word of its own; no single character is one.
        return [token for character in text for token in self._ids(self._plain, character)]

    def encode_for_pooling(self, text: str) -> list[int]:
        """Token ids of `text` with the start and end tokens that the tokenizer's own post-processor adds, such as the
        end token whose state is the vector of an embedding model. Raises as `encode`."""
        return self._ids(self._backend, text, post_process=True)

    def _ids(self, backend: Backend, text: str, *, post_process: bool = False) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise RequestError(
                f"the text has half a character (lone surrogate U+{code:04X}) at position {error.start}; remove it"
            ) from error
        with _as_model_errors(self._origin, "fails on this text"):
            return backend.encode(text, add_special_tokens=post_process).ids

    def decode(self, ids: Iterable[int], skip_control: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids that no token has become nothing."""
        kept = (token for token in ids if not (skip_control and token in self.control_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """The id of a token by its exact text, e.g. `<|im_end|>`; None where there is none."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text (UTF-8, perhaps a part of a character); empty for an id that no token
        has."""
        if not 0 <= token < self.size:
            return b""
        written = self._backend.id_to_token(token)
        if written is None:
            return b""
        try:
            return bytes([_BYTE_OF[character] for character in written])
        except KeyError:  # an added token in plain text, with a space or beyond Latin-1
            return written.encode("utf-8")


def _without_added_tokens(backend: Backend) -> Backend:
    """The same model and rules, to which no text can become a control token."""
    plain = Backend(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read `tokenizer.json` of a checkpoint folder; raises ModelError that says which file to add or what is wrong with
    it."""
    path, origin = folder / FILE, f"{folder.name}/{FILE}"
    if not exists_at_all(path):
        raise ModelError(f"{folder.name}: no {FILE}; add the file of that name from the model's own repository")
    try:
        content = read_whole(path, origin, LIMITS.nbytes)
    except FileError as error:
        raise ModelError(str(error)) from error
    if content.startswith(LFS_POINTER):
        raise ModelError(f"{origin} is only a Git LFS pointer; download the file itself (git lfs pull)")
    check_counts(content, origin, LIMITS)
    with _as_model_errors(origin):
        backend = Backend.from_buffer(content)
    _require_byte_level(backend, folder.name)
    return Tokenizer(backend, origin)


@contextmanager
def _as_model_errors(origin: str, what: str = "cannot be read") -> Iterator[None]:
    """Raise as ModelError what tokenizers raises: a bare Exception for a fault of the file, and for a fault of its own
    a PanicException, which is not an Exception and has no name that could be imported."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        cause = " ".join(str(error).split())[:300]
        raise ModelError(f"{origin} {what}: {cause}; download it again") from error


def _require_byte_level(backend: Backend, folder_name: str) -> None:
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds != ["ByteLevel"]:
        found = ", ".join(map(str, kinds))
        raise ModelError(
            f"{folder_name}/tokenizer.json decodes by {found}; Onedesk reads byte-level tokenizers (ByteLevel) only"
        )
