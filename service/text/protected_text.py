"""Keeps control tokens apart from text that only looks like them: a message that holds `<|im_end|>` must not close its
turn.

A chat template puts messages and control tokens into one text, in which nothing tells them apart. So a mark, a
character that occurs nowhere in the request, is put into every such text of the messages before the template sees them.
What the template wrote itself has no mark; everything between its tokens is then encoded by a tokenizer that knows no
added tokens at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

from ..errors import RequestError
from .tokenizer import Tokenizer

# Characters that Unicode keeps free for a program's own use and that no text has: noncharacters, then private use.
_MARKS = (range(0xFDD0, 0xFDF0), range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))


class AddedTokens:
    """The added tokens of a tokenizer, as text. Thread-safe; made once per tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        known = {token.content: token.special for token in tokenizer.added_tokens.values() if len(token.content) > 1}
        self.every = TokenTexts(list(known))
        self.control = TokenTexts([text for text, special in known.items() if special])

    @cached_property
    def _split(self) -> re.Pattern[str] | None:
        """Finds added tokens in a text, with the blanks that some take with them."""
        tokens = sorted(self.tokenizer.added_tokens.values(), key=lambda token: -len(token.content))
        forms = []
        for token in tokens:
            form = re.escape(token.content)
            form = rf"(?<!\w){form}(?!\w)" if token.single_word else form
            forms.append((r"\s*" if token.lstrip else "") + form + (r"\s*" if token.rstrip else ""))
        return re.compile("|".join(forms)) if forms else None

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self.tokenizer.added_tokens.items()}

    def encode(self, text: str, mark: str) -> list[int]:
        """Ids of a text in which added tokens without a mark are tokens, and all else is text once the marks are taken
        out."""
        ids: list[int] = []
        at = 0
        for found in self._split.finditer(text) if self._split else ():
            ids += self._plain(text[at : found.start()], mark)
            token = found[0] if found[0] in self._ids else found[0].strip()
            ids.append(self._ids[token])
            at = found.end()
        return ids + self._plain(text[at:], mark)

    def _plain(self, text: str, mark: str) -> list[int]:
        text = text.replace(mark, "")
        return self.tokenizer.encode(text, parse_special=False) if text else []


class TokenTexts:
    """Texts of tokens, and where they stand in other texts."""

    def __init__(self, texts: list[str]) -> None:
        self._starts = tuple({text[0] for text in texts})
        self._whole = re.compile(f"(?=(?:{'|'.join(map(re.escape, texts))}))") if texts else None
        self._beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._longest = max(map(len, texts), default=0)

    def marked(self, text: str, mark: str) -> str:
        """`text` with a mark after the first character of each token text, overlapping ones included, and after a part
        of one at its end, which the next text could complete."""
        if self._whole is None or not any(start in text for start in self._starts):
            return text
        cuts = [found.start() + 1 for found in self._whole.finditer(text)]
        tail = text[max(0, len(text) - self._longest + 1) :]
        if any(tail[at:] in self._beginnings for at in range(len(tail))) and len(text) not in cuts:
            cuts.append(len(text))
        if not cuts:
            return text
        return mark.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))


class ProtectedText:
    """The texts of one request, marked for a chat template, and the ids of what the template makes of them."""

    def __init__(self, tokens: AddedTokens, values: Any) -> None:
        """`values`: everything that the template is going to see; the marks are characters that are not in it."""
        self._tokens = tokens
        texts = list(_texts(values))
        free = (
            mark
            for mark in map(chr, chain(*_MARKS))
            if not any(mark in text or _escape(mark) in text for text in texts)
        )
        self.mark, self.end = next(free, ""), next(free, "")
        if not self.end:
            raise RequestError("the messages use every character of Unicode's private areas; leave one out")
        self._is_marked = False

    def protect(self, value: Any, *, visible: bool) -> Any:
        """`value`, texts in lists and objects included, with marks.

        `visible`: also in the texts of added tokens that are no control tokens, such as `<tool_response>`.
        """
        if isinstance(value, str):
            texts = self._tokens.every if visible else self._tokens.control
            marked = texts.marked(value, self.mark)
            self._is_marked = self._is_marked or marked is not value
            return marked
        if isinstance(value, Mapping):
            return {
                self.protect(key, visible=visible): self.protect(item, visible=visible) for key, item in value.items()
            }
        return [self.protect(item, visible=visible) for item in value] if isinstance(value, list | tuple) else value

    def plain(self, rendered: str) -> str:
        """What the template wrote, without the marks."""
        return self._raw_marks(rendered).replace(self.mark, "")

    def encode(self, rendered: str) -> list[int]:
        """Ids of what the template wrote. Raises RequestError for half a character."""
        if not self._is_marked:
            return self._tokens.tokenizer.encode(rendered)
        return self._tokens.encode(self._raw_marks(rendered), self.mark)

    def _raw_marks(self, rendered: str) -> str:
        """A template may write JSON in ASCII; there the mark is an escape."""
        return rendered.replace(_escape(self.mark), self.mark) if self._is_marked else rendered


def _escape(mark: str) -> str:
    return json.dumps(mark)[1:-1]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
