"""Answers bound to a JSON Schema: which tokens may come next, by llguidance (extra "service"), the only optional
package of this room."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ModelError, RequestError
from .reasoning import OPEN
from .tokenizer import Tokenizer
from .tool_call_stream import CLOSE as CLOSE_CALL
from .tool_call_stream import OPEN as OPEN_CALL
from .tool_calls import call_schema

log = logging.getLogger(__name__)

SCHEMA_LIMIT = 1 << 18  # characters; the largest schemas of published tool collections have some 50,000
# Blanks between the parts of a document are one space, or a line feed and an indentation: with unbounded blanks a small
# model may never end.
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n {0,24}|\n\t{0,8})?"}
# A call is written as models are trained to write it, in the style of json.dumps.
_CALL_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MESSAGE_LIMIT = 300


class Guide:
    """The state of one answer in its grammar. Not thread-safe.

    The grammar binds the answer, not the reasoning: do not call it while the model reasons. Before the first token it
    also allows `opener`, the token that opens reasoning, if there is one. If the grammar exceeds llguidance's limits,
    only `ends` are allowed: this answer ends there, and the others of the batch continue.
    """

    def __init__(
        self,
        matcher: Any,
        size: int,
        ends: Sequence[int],
        opener: int | None,
        tokenize: Callable[[bytes], Sequence[int]],
    ) -> None:
        self._matcher = matcher
        self._tokenize = tokenize
        self._size = size
        self._ends = ends
        self._opener = opener

    def fork(self) -> Guide:
        """A copy in the same state."""
        return Guide(self._matcher.deep_copy(), self._size, self._ends, self._opener, self._tokenize)

    def allowed(self) -> np.ndarray:
        """The ids that may come next: bool [size], at least one true."""
        bits = np.unpackbits(
            np.frombuffer(self._matcher.compute_bitmask(), np.uint8), count=self._size, bitorder="little"
        )
        if self._matcher.is_error() or not bits.any():
            log.warning("an answer ends before its JSON schema is fulfilled: %s", _shortened(self._matcher.get_error()))
            bits = np.zeros(self._size, np.uint8)
            bits[list(self._ends)] = 1
        elif self._opener is not None:
            bits[self._opener] = 1
        return bits.view(np.bool_)

    def accept(self, token: int) -> None:
        """Take in a token of the answer."""
        if token == self._opener:
            self._opener = None
            return
        self._opener = None
        self._matcher.consume_token(token)

    def accept_text(self, text: str) -> None:
        """Take in a part of the answer that stands there already. Raises RequestError where it does not follow the
        schema."""
        self._opener = None
        for token in self._tokenize(text.encode("utf-8")):
            if not self._matcher.consume_token(token):
                raise RequestError("the message to continue does not follow the JSON schema; leave one of them out")


class Grammars:
    """Makes guides for one tokenizer; `ends` are the ids that end a turn, `size` how many ids can be chosen.
    Thread-safe.

    Making it costs 0.5 s for a vocabulary of 150,000, a guide some milliseconds. Raises ModelError where llguidance is
    not installed.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Iterable[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ModelError(
                "answers bound to a JSON schema need the package llguidance; install it into the environment of Onedesk"
            ) from error
        end_ids = sorted(token for token in ends if token < size)
        if not end_ids:
            raise ModelError("answers bound to a JSON schema need a token that ends a turn, and this model names none")
        words = llguidance.TokenizerWrapper(_Words(tokenizer, size, end_ids[0]))
        self._matcher: Any = llguidance.LLMatcher
        self._tokenizer = llguidance.LLTokenizer(words, n_vocab=size, eos_token=end_ids)
        self._size = size
        self._ends = end_ids
        self._opener = tokenizer.id_of(OPEN)
        self._lock = threading.Lock()

    def guide(self, schema: str, *, frame: tuple[str, str] = ("", ""), may_think: bool) -> Guide:
        """A guide for JSON that follows `schema`, the text of a JSON Schema, between the texts of `frame`.

        Raises RequestError for a schema that cannot be followed.
        """
        return self._made(schema, may_think, lambda: self._grammar(schema, frame))

    def guide_or_calls(self, schema: str, tools: Sequence[Mapping[str, Any]], *, most: int, may_think: bool) -> Guide:
        """A guide for JSON that follows `schema`, or else for up to `most` calls of `tools` in either form that models
        have for them.

        Arguments written as JSON follow the tool's schema; those written between tags are free. Raises RequestError as
        `guide`.
        """
        return self._made(schema, may_think, lambda: _with_calls(schema, tools, most))

    def _made(self, schema: str, may_think: bool, grammar_of: Callable[[], str]) -> Guide:
        if len(schema) > SCHEMA_LIMIT:
            raise RequestError(f"the JSON schema has {len(schema):,} characters; use at most {SCHEMA_LIMIT:,}")
        try:
            grammar = grammar_of()
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is not valid: {_shortened(str(error))}") from error
        with self._lock:
            matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the JSON schema cannot be followed: {_shortened(matcher.get_error())}")
        return Guide(
            matcher, self._size, self._ends, self._opener if may_think else None, self._tokenizer.tokenize_bytes
        )

    def _grammar(self, schema: str, frame: tuple[str, str]) -> str:
        if not any(frame):
            return self._matcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        document = json.dumps(json.loads(schema) | {"x-guidance": _CALL_OPTIONS})
        before, after = map(json.dumps, frame)
        return self._matcher.grammar_from_lark(f"start: {before} document {after}\ndocument: %json {document}\n")


def _with_calls(schema: str, tools: Sequence[Mapping[str, Any]], most: int) -> str:
    """A grammar of a document or of calls. The name of a tool stands in a quoted literal, so any name is safe."""
    document = json.dumps(json.loads(schema) | {"x-guidance": _OPTIONS})
    call = json.dumps(json.loads(call_schema(tools)) | {"x-guidance": _CALL_OPTIONS})
    functions = " | ".join(json.dumps(f"<function={tool['function']['name']}>") for tool in tools)
    opened, closed = json.dumps(OPEN_CALL), json.dumps(CLOSE_CALL)
    return (
        "start: document | calls\n"
        f"calls: call{{1,{most}}}\n"
        f"call: {opened} BLANK (as_json | as_tags) BLANK {closed} BLANK\n"
        f"as_tags: ({functions}) body\n"
        "as_json: %json " + call + "\n"
        "document: %json " + document + "\n"
        'body[suffix="</function>"]: /(?s:.*)/\n'
        "BLANK: /[ \\n]{0,4}/\n"
    )


class _Words:
    """What llguidance's TokenizerWrapper reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, end: int) -> None:
        self.eos_token_id = end
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted(token for token in tokenizer.control_ids if token < size)
        self._encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"))


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_LIMIT else line[:_MESSAGE_LIMIT] + "..."
