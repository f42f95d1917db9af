"""Tool calls in an answer while it is written: which text is none, and each call's name and arguments as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .tool_schema import Kinds, argument, parameter_kinds

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME_LIMIT = 256  # characters of a function's or parameter's name between tags
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_HEAD_LIMIT = 1024  # characters within which arguments must begin to be given as they come
_JSON_MARK = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call has begun, and this is its tool's name."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments; the parts of a complete call, joined, are a JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call has ended. `raw` is the text that it was written as, for a caller that takes an incomplete one for
    text."""

    complete: bool
    raw: str


CallEvent: TypeAlias = str | CallStart | CallArguments | CallEnd


class ToolCallStream:
    """Takes an answer in pieces and gives, in order, text that is no call and the parts of calls.

    Calls are JSON in `<tool_call>` tags, as Qwen3 writes them, or `<function=NAME>` tags, as Qwen3-Coder and Qwen3.5
    do, with or without `<tool_call>` around; without it the name must be one of `tools` (as the OpenAI API has them).
    The schemas of `tools` say which type a parameter between tags has. Blanks next to a call belong to it. What turns
    out to be no call is given as text, except where its name and the start of its arguments were given already: then
    its end says that it is not complete.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool["function"] for tool in tools]
        self._kinds = {function["name"]: parameter_kinds(function.get("parameters")) for function in functions}
        self._bare = tuple(f"{_FUNCTION}{name}>" for name in self._kinds)
        self._held = ""
        self._raw = ""  # what a call was read from so far
        self._out: list[CallEvent] = []
        self._step: Callable[[bool], bool] = self._text
        self._called = False  # whether a call came last
        self._spoken = False  # whether there was text
        self._wrapped = False  # whether the call began with <tool_call>
        self._call: _Tags | _Json | None = None

    def push(self, text: str) -> list[CallEvent]:
        """What `text` made certain, in order."""
        self._held += text
        return self._run(last=False)

    def finish(self) -> list[CallEvent]:
        """The answer has ended: what was held back."""
        return self._run(last=True)

    def _run(self, last: bool) -> list[CallEvent]:
        while self._step(last):
            pass
        out, self._out = self._out, []
        return out

    # Each step takes from the front of what is held; True means that another step follows.

    def _text(self, last: bool) -> bool:
        """Give text before the next call."""
        found_at = min((at for tag in (OPEN, *self._bare) if (at := self._held.find(tag)) >= 0), default=-1)
        if found_at >= 0:
            cut = len(self._held[:found_at].rstrip())
        elif last:
            cut = len(self._held)
        else:
            cut = len(self._held[: self._tag_begun()].rstrip())
        before, self._held = self._held[:cut], self._held[cut:]
        self._speak(before.lstrip() if self._called else before)
        if found_at >= 0:
            blanks = found_at - cut
            self._wrapped = self._held.startswith(OPEN, blanks)
            self._take(blanks + (len(OPEN) if self._wrapped else 0))
            self._step = self._begun
        return found_at >= 0

    def _speak(self, text: str) -> None:
        if text:
            self._out.append("\n" + text if self._called and self._spoken else text)
            self._called, self._spoken = False, True

    def _tag_begun(self) -> int:
        """Where at the end of what is held a tag may have begun; the tags hold one `<` each, at their start."""
        found_at = self._held.rfind("<")
        tail = self._held[found_at:]
        return (
            found_at if found_at >= 0 and any(tag.startswith(tail) for tag in (OPEN, *self._bare)) else len(self._held)
        )

    def _take(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        self._raw += piece
        return piece

    def _begun(self, last: bool) -> bool:
        """After the opening tag: which form the call has."""
        self._take(len(self._held) - len(self._held.lstrip()))
        if self._held.startswith("{"):
            self._call, self._step = _Json(), self._json_head
            return True
        if self._held.startswith(_FUNCTION):
            end = re.search(r"[>\n]", self._held[: len(_FUNCTION) + _NAME_LIMIT + 1])
            if end is not None and end[0] == ">":
                name = self._take(end.end())[len(_FUNCTION) : -1].strip()
                self._call, self._step = _Tags(self._kinds.get(name, {})), self._tags
                self._out += [CallStart(name), CallArguments("{")]
                return True
            if end is None and not last and len(self._held) <= len(_FUNCTION) + _NAME_LIMIT:
                return False
        elif not last and _FUNCTION.startswith(self._held):
            return False
        self._step = self._unknown
        return True

    def _unknown(self, last: bool) -> bool:
        """Nothing that a call may be: text, up to where it would be closed."""
        found_at = self._held.find(CLOSE)
        if found_at < 0 and not last:
            return False
        self._take(len(self._held) if found_at < 0 else found_at + len(CLOSE))
        self._no_call()
        return True

    def _no_call(self) -> None:
        """All that was taken for a call is text, as it stands."""
        self._out.append(self._raw)
        self._called, self._spoken = False, True
        self._raw, self._call, self._step = "", None, self._text

    def _ended(self, *, complete: bool) -> None:
        self._out.append(CallEnd(complete, self._raw))
        self._called, self._spoken = complete, self._spoken or not complete
        self._raw, self._call, self._step = "", None, self._text

    def _json_head(self, last: bool) -> bool:
        """Up to the arguments. Where they do not come second, the whole call is waited for."""
        head = _HEAD.match(self._held[:_HEAD_LIMIT])
        name = None if head is None else _parsed(head[1])
        if head is not None and isinstance(name, str):
            self._take(head.end())
            self._out.append(CallStart(name))
            self._step = self._json_arguments
            return True
        found_at = self._held.find(CLOSE)
        if found_at < 0 and not last:
            return False
        body = self._held if found_at < 0 else self._held[:found_at]
        call = _whole(body.strip())
        self._take(len(self._held) if found_at < 0 else found_at + len(CLOSE))
        if call is None:
            self._no_call()
        else:
            self._out += [CallStart(call[0]), CallArguments(call[1])]
            self._ended(complete=True)
        return True

    def _json_arguments(self, last: bool) -> bool:
        if not isinstance(self._call, _Json):
            return False
        length, done = self._call.scan(self._held)
        if length:
            self._out.append(CallArguments(self._take(length)))
        if done:
            if self._call.valid:
                self._step = self._tail
            else:
                self._ended(complete=False)
        elif last:
            self._ended(complete=False)
        return done

    def _tags(self, last: bool) -> bool:
        if not isinstance(self._call, _Tags):
            return False
        length, arguments, state = self._call.read(self._held, last)
        self._take(length)
        if arguments:
            self._out.append(CallArguments(arguments))
        if state == "cut":
            self._ended(complete=False)
        elif state == "done":
            self._step = self._tail
        return state == "done"

    def _tail(self, last: bool) -> bool:
        """After the arguments: blanks and the closing tags. Other members of a JSON call are passed over."""
        closing = " \n\t\r}" if isinstance(self._call, _Json) else " \n\t\r"
        rest = self._held.lstrip(closing)
        if rest.startswith(",") and isinstance(self._call, _Json):
            found_at = self._held.find(CLOSE)
            if found_at < 0 and not last:
                return False
            self._take(len(self._held) if found_at < 0 else found_at + len(CLOSE))
        elif rest.startswith(CLOSE):
            self._take(len(self._held) - len(rest) + len(CLOSE))
        elif CLOSE.startswith(rest) and not last:
            return False
        elif not rest or isinstance(self._call, _Json):
            self._take(len(self._held) - len(rest))
        self._ended(complete=True)
        return True


class _Json:
    """Follows a JSON object, however it is cut, to its end."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._quoted = self._escaped = False
        self._seen: list[str] = []

    def scan(self, text: str) -> tuple[int, bool]:
        """How much of `text` belongs to the object, and whether it ends there."""
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
        while (mark := _JSON_MARK.search(text, at)) is not None:
            at = mark.end()
            if self._quoted:
                if mark[0] == "\\":
                    self._escaped = at == len(text)
                    at += 1
                elif mark[0] == '"':
                    self._quoted = False
            elif mark[0] == '"':
                self._quoted = True
            elif mark[0] in "{[":
                self._open.append("}" if mark[0] == "{" else "]")
            elif mark[0] in "}]":
                fits = bool(self._open) and self._open.pop() == mark[0]
                if not fits or not self._open:
                    self._seen.append(text[:at])
                    return at, True
        self._seen.append(text)
        return len(text), False

    @property
    def valid(self) -> bool:
        """Whether what was followed is an object."""
        return isinstance(_parsed("".join(self._seen)), dict)


class _Tags:
    """Reads `<parameter=NAME>` VALUE `</parameter>` up to `</function>`, and writes a JSON object of it."""

    def __init__(self, kinds: Mapping[str, Kinds]) -> None:
        self._kinds = kinds
        self._count = 0
        self._key: str | None = None  # of the parameter that is being read
        self._begun = False  # whether a part of its text was given
        self._value = ""  # what was read of it, where it is given as a whole

    def read(self, text: str, last: bool) -> tuple[int, str, str]:
        """How much of `text` was read, what it adds to the arguments, and how it stands: "" for more to come, "done",
        or "cut"."""
        at, out = 0, ""
        while True:
            step = self._between if self._key is None else self._within
            length, arguments, state = step(text[at:], last)
            at, out = at + length, out + arguments
            if state != "again":
                return at, out, state

    def _between(self, text: str, last: bool) -> tuple[int, str, str]:
        found = _first(text, (_PARAMETER, _FUNCTION_END, CLOSE))
        if found is None:
            return (len(text), "}", "done") if last else (_possible(text, (_PARAMETER, _FUNCTION_END, CLOSE)), "", "")
        found_at, tag = found
        if tag != _PARAMETER:
            return found_at + (len(tag) if tag == _FUNCTION_END else 0), "}", "done"
        end = re.search(r"[>\n]", text[found_at : found_at + len(_PARAMETER) + _NAME_LIMIT + 1])
        if end is None or end[0] != ">":
            if end is None and not last and len(text) - found_at <= len(_PARAMETER) + _NAME_LIMIT:
                return found_at, "", ""
            return found_at + len(_PARAMETER), "", "again"  # no parameter: passed over, as any text here
        self._key = text[found_at + len(_PARAMETER) : found_at + end.start()].strip()
        self._begun, self._value = False, ""
        self._count += 1
        comma = ", " if self._count > 1 else ""
        return found_at + end.end(), f"{comma}{_written(self._key)}: ", "again"

    def _within(self, text: str, last: bool) -> tuple[int, str, str]:
        ends = (_PARAMETER_END, _PARAMETER, _FUNCTION_END, CLOSE)
        found = _first(text, ends)
        plain = self._kinds.get(self._key or "", None) == frozenset({"string"})
        if found is None:
            if last:
                return len(text), "", "cut"
            # A line feed before the closing tag belongs to the tag.
            certain = _possible(text, ends)
            certain -= text[:certain].endswith("\n")
            return certain, self._piece(text[:certain], plain=plain), ""
        found_at, tag = found
        body = text[:found_at]
        if plain:
            out = self._piece(body.removesuffix("\n"), plain=True) + ('"' if self._begun else '""')
        else:
            out = _written(argument(self._value + body, self._kinds.get(self._key or "", None)))
        self._key = None
        return found_at + (len(tag) if tag == _PARAMETER_END else 0), out, "again"

    def _piece(self, text: str, *, plain: bool) -> str:
        """What a part of a value adds at once: of a text its characters, of anything else nothing yet."""
        if not plain:
            self._value += text
            return ""
        if not text:
            return ""
        opening = "" if self._begun else '"'
        if not self._begun:
            text = text.removeprefix("\n")
        self._begun = True
        return opening + _written(text)[1:-1]


def _first(text: str, tags: Sequence[str]) -> tuple[int, str] | None:
    """The found_at of the first of `tags`, and which."""
    return min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=None)


def _possible(text: str, tags: Sequence[str]) -> int:
    """Where at the end of `text` one of `tags` may have begun, else its length; a tag holds one `<`, at its start."""
    found_at = text.rfind("<")
    return found_at if found_at >= 0 and any(tag.startswith(text[found_at:]) for tag in tags) else len(text)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _whole(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is one JSON object, in any order of its members."""
    document = _parsed(body)
    if not isinstance(document, dict):
        return None
    name, arguments = document.get("name"), document.get("arguments", document.get("parameters", {}))
    if isinstance(arguments, str):  # some write the object as a text of its own
        arguments = _parsed(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, _written(arguments)


def _parsed(text: str) -> Any:
    """The JSON document, None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
