"""Splits reasoning from the answer: `<think>` reasoning `</think>` answer, across token boundaries.

The rules; where Qwen's templates have any, they are the same:
- Only a `<think>` at the very start of the answer (after blanks, or right after an earlier `</think>`) opens reasoning;
  later in the answer it is text. A prompt that ends with `<think>` has opened it already; the model may repeat the tag.
- Line feeds right after either tag and before `</think>` belong to the tag. Nothing else is dropped.
- Reasoning that is never closed is reasoning to the end.
- After a `</think>` in an answer without reasoning and `<think>`, all text before it is reasoning; elsewhere the tag
  is text.
- A `</think>` between two equal quotes or backticks is a quotation and closes nothing.
"""

from __future__ import annotations

from typing import Literal

OPEN, CLOSE = "<think>", "</think>"
_QUOTES = frozenset("`'\"")

Channel = Literal["text", "reasoning", "reclaim"]
Segment = tuple[Channel, str]


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside `<think>`."""
    return prompt.rstrip().endswith(OPEN)


def split_reasoning(answer: str, in_reasoning: bool = False) -> tuple[str, str]:
    """(reasoning, text) of a whole answer, by the rules above."""
    splitter = ReasoningSplitter(in_reasoning)
    parts: dict[str, list[str]] = {"text": [], "reasoning": []}
    for channel, piece in [*splitter.push(answer), *splitter.finish()]:
        if channel == "reclaim":
            parts = {"text": [], "reasoning": ["".join(parts["text"]).strip("\n")]}
        else:
            parts[channel].append(piece)
    return "".join(parts["reasoning"]), "".join(parts["text"])


class ReasoningSplitter:
    """Takes text in pieces and returns it in order as ("text", piece), ("reasoning", piece) and, at most once,
    ("reclaim", ""): all text so far was reasoning. Holds back only what may be part of a tag, and line feeds next to
    one."""

    def __init__(self, in_reasoning: bool = False) -> None:
        self._state: Literal["start", "opened", "reasoning", "closed", "answer"] = "opened" if in_reasoning else "start"
        self._held = ""
        self._last = ""  # the last character returned, for a quote before a tag
        self._may_repeat = in_reasoning  # the model may repeat the tag that the prompt ends with
        self._orphan_closes = not in_reasoning
        self._divide = ""  # text between two blocks of reasoning
        self._spoken = False  # whether there was more than line feeds so far
        self._out: list[Segment] = []

    @property
    def in_reasoning(self) -> bool:
        """Whether the next character is reasoning, as far as known."""
        return self._state in ("opened", "reasoning")

    def push(self, text: str) -> list[Segment]:
        """The segments that are certain now."""
        self._held += text
        return self._run(last=False)

    def finish(self) -> list[Segment]:
        """The segments that were held back, incomplete tags included."""
        return self._run(last=True)

    def _run(self, last: bool) -> list[Segment]:
        steps = {
            "start": self._at_start,
            "opened": self._after_open,
            "reasoning": self._within_reasoning,
            "closed": self._after_close,
            "answer": self._within_answer,
        }
        while self._held and steps[self._state](last):
            pass
        out, self._out = self._out, []
        return out

    def _give(self, channel: Channel, length: int) -> None:
        piece, self._held = self._held[:length], self._held[length:]
        if not piece:
            return
        if channel == "reasoning" and self._divide:
            piece, self._divide = self._divide + piece, ""
        self._last = piece[-1]
        self._spoken = self._spoken or bool(piece.strip("\n"))
        self._out.append((channel, piece))

    # Each step below takes from the start of the held text; True: another step may follow.

    def _at_start(self, last: bool) -> bool:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._enter(begun)
            return True
        if OPEN.startswith(begun) and not last:
            return False
        self._state = "answer"
        return True

    def _enter(self, begun: str) -> None:
        self._held = begun[len(OPEN) :]
        self._state = "opened"
        self._orphan_closes = self._may_repeat = False

    def _after_open(self, last: bool) -> bool:
        if self._may_repeat:
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._enter(begun)
                return True
            if OPEN.startswith(begun) and not last:
                return False
            self._may_repeat = False
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = "reasoning"
        return bool(self._held)

    def _within_reasoning(self, last: bool) -> bool:
        index = self._held.find(CLOSE)
        if index < 0:
            self._give("reasoning", len(self._held) if last else _before_tag(self._held))
            return False
        quoted = self._quoted(index, last)
        if quoted is None:
            self._give("reasoning", max(0, index - 1))
            return False
        if quoted:
            self._give("reasoning", index + len(CLOSE))
            return True
        self._give("reasoning", len(self._held[:index].rstrip("\n")))
        self._close()
        return True

    def _close(self) -> None:
        self._held = self._held[self._held.index(CLOSE) + len(CLOSE) :]
        self._state = "closed"
        self._orphan_closes = False
        self._divide = "\n\n" if self._spoken else ""

    def _after_close(self, last: bool) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = "start"
        return bool(self._held)

    def _within_answer(self, last: bool) -> bool:
        if not self._orphan_closes:
            self._give("text", len(self._held))
            return False
        opened, closed = self._held.find(OPEN), self._held.find(CLOSE)
        if opened >= 0 and not 0 <= closed < opened:
            self._orphan_closes = False
            return True
        if closed < 0:
            keep = 0 if last else max(_begun(self._held, CLOSE), _begun(self._held, OPEN))
            self._give("text", len(self._held) - keep)
            return False
        quoted = self._quoted(closed, last)
        if quoted is None:
            self._give("text", max(0, closed - 1))
            return False
        if quoted:
            self._give("text", closed + len(CLOSE))
            return True
        self._give("text", closed)
        self._out.append(("reclaim", ""))
        self._close()
        return True

    def _quoted(self, index: int, last: bool) -> bool | None:
        """Whether the tag at `index` is quoted; None while the character after it is not known."""
        before = self._held[index - 1] if index else self._last
        if before not in _QUOTES:
            return False
        after = self._held[index + len(CLOSE) : index + len(CLOSE) + 1]
        if not after:
            return False if last else None
        return after == before


def _begun(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the start of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _before_tag(text: str) -> int:
    """Length of `text` without a possible start of `</think>` at its end and the line feeds that would belong to it."""
    return len(text[: len(text) - _begun(text, CLOSE)].rstrip("\n"))
