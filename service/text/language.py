"""A checkpoint's tokenizer and chat template, read when they are first needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from ..errors import ModelError
from ..loader.checkpoint import LANGUAGE
from ..loader.files import stamps
from .grammar import Grammars
from .protected_text import AddedTokens
from .template import ChatTemplate, load_template
from .tokenizer import Tokenizer, load_tokenizer


class Language:
    """What turns text into tokens and back for the checkpoint in `folder`. Thread-safe; each part is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._added_tokens: AddedTokens | None = None
        self._template: ChatTemplate | None = None
        self._grammars: Grammars | None = None
        self._stamps = stamps(folder, LANGUAGE)

    def changed(self) -> bool:
        """Whether one of its files is another one than when this was made."""
        return self._stamps != stamps(self._folder, LANGUAGE)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ModelError where the checkpoint has none that can be used."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self._folder)
            return self._tokenizer

    @property
    def tokenizer_if_any(self) -> Tokenizer | None:
        """The tokenizer, or None where the checkpoint has none that can be used."""
        try:
            return self.tokenizer
        except ModelError:
            return None

    @property
    def added_tokens(self) -> AddedTokens:
        """The tokenizer's added tokens, for texts that must not become such. Raises ModelError as `tokenizer`."""
        tokenizer = self.tokenizer
        with self._lock:
            if self._added_tokens is None:
                self._added_tokens = AddedTokens(tokenizer)
            return self._added_tokens

    @property
    def template(self) -> ChatTemplate:
        """Raises ModelError where the checkpoint has none that can be used."""
        with self._lock:
            if self._template is None:
                self._template = load_template(self._folder)
            return self._template

    def grammars(self, size: int, ends: Iterable[int]) -> Grammars:
        """What binds answers to a schema; `size` ids can be chosen and `ends` end a turn, the same at every call.
        Raises ModelError."""
        tokenizer = self.tokenizer
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(tokenizer, size, ends)
            return self._grammars

    def close(self) -> None:
        """End the template's process; it starts again when it is next needed."""
        with self._lock:
            template, self._template = self._template, None
        if template is not None:
            template.close()
