"""From sampled tokens to visible text: whole characters, reasoning split off, stop strings cut, whole emoji."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .detokenizer import ClusterHold, Detokenizer
from .reasoning import ReasoningSplitter, Segment
from .stops import StopMatcher, StopStrings
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became visible: of the answer, of the reasoning, of both, or none."""

    text: str = ""
    reasoning: str = ""


class TextStream:
    """Text and reasoning of one completion, piece by piece, without control tokens and partial characters.

    Stop strings are searched in the answer only: one inside the reasoning must not end the completion. The pieces,
    joined, are `text` and `reasoning`, except after a `</think>` that was never opened. Then the text before it becomes
    reasoning: the totals are right, the pieces already given are not.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] | StopStrings = (), in_reasoning: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._splitter = ReasoningSplitter(in_reasoning)
        self._stops = StopMatcher(stop)
        self._holds = {"text": ClusterHold(), "reasoning": ClusterHold()}
        self._totals: dict[str, list[str]] = {"text": [], "reasoning": []}
        self._piece: dict[str, str] = {}

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token belongs to the reasoning."""
        return self._splitter.in_reasoning and not self.stopped

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; the text from it on is dropped."""
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
        """Append the next token; returns what it made visible."""
        if self.stopped:
            return Piece()
        self._route(self._splitter.push(self._detokenizer.push(token)))
        return self._made()

    def finish(self) -> Piece:
        """After the last token: returns the text that was held back."""
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
