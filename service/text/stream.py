"""From sampled tokens to what a reader sees: characters, then reasoning apart, then stop strings, then whole emoji."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .detokenizer import ClusterHold, Detokenizer
from .reasoning import ReasoningSplitter, Segment
from .stops import StopMatcher, StopStrings
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What became visible: a part of the answer, a part of the reasoning, or both, or nothing."""

    text: str = ""
    reasoning: str = ""


class TextStream:
    """Text and reasoning of one answer, piece by piece; no control token and no half of a character ever shows.

    Stop strings are looked for in the answer only, not in the reasoning: a stop that the model merely thinks of must not end it.
    The pieces, joined, are `text` and `reasoning`, except after a `</think>` that nothing opened: then the text before it has become
    reasoning, and the totals are right where the pieces were not.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] | StopStrings = (), in_reasoning: bool = False) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._splitter = ReasoningSplitter(in_reasoning)
        self._stops = StopMatcher(stop)
        self._holds = {"text": ClusterHold(), "reasoning": ClusterHold()}
        self._totals: dict[str, list[str]] = {"text": [], "reasoning": []}
        self._piece: dict[str, str] = {}

    @property
    def in_reasoning(self) -> bool:
        """Whether the model is thinking."""
        return self._splitter.in_reasoning and not self.stopped

    @property
    def stopped(self) -> bool:
        """Whether a stop string was written; everything from it on is dropped."""
        return self._stops.stopped

    @property
    def text(self) -> str:
        """The answer so far: without control tokens, reasoning and the stop string."""
        return "".join(self._totals["text"])

    @property
    def reasoning(self) -> str:
        """The reasoning so far, without its tags."""
        return "".join(self._totals["reasoning"])

    def push(self, token: int) -> Piece:
        """Take the next token; returns what it made visible."""
        if self.stopped:
            return Piece()
        self._route(self._splitter.push(self._detokenizer.push(token)))
        return self._made()

    def finish(self) -> Piece:
        """The answer has ended: returns what was held back."""
        if self.stopped:
            return Piece()
        self._route(self._splitter.push(self._detokenizer.finish()) + self._splitter.finish())
        self._show("text", self._stops.finish())
        self._flush("text")
        self._flush("reasoning")
        return self._made()

    def _route(self, segments: list[Segment]) -> None:
        for channel, content in segments:
            if channel == "reclaim":
                self._reclaim()
            elif channel == "reasoning":
                self._show("reasoning", content)
            else:
                self._flush("reasoning")
                self._show("text", self._stops.push(content))
            if self.stopped:
                self._flush("text")
                return

    def _reclaim(self) -> None:
        """All text so far was reasoning."""
        self._show("text", self._stops.finish())
        self._flush("text")
        thought = self.text.strip("\n")
        self._totals = {"text": [], "reasoning": [thought]}

    def _show(self, channel: str, content: str) -> None:
        self._emit(channel, self._holds[channel].push(content))

    def _flush(self, channel: str) -> None:
        self._emit(channel, self._holds[channel].finish())

    def _emit(self, channel: str, content: str) -> None:
        if content:
            self._totals[channel].append(content)
            self._piece[channel] = self._piece.get(channel, "") + content

    def _made(self) -> Piece:
        piece, self._piece = self._piece, {}
        return Piece(piece.get("text", ""), piece.get("reasoning", ""))
