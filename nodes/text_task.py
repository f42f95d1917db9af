"""Writes one or several answers with a model: the work of OnedeskGenerate, in a separate thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..service.api import Events, Model, RemoteModel
from ..service.core import (
    CancelCheck,
    Event,
    Message,
    Progress,
    Request,
    Result,
    require_user_text,
)
from ..service.errors import Cancelled, RequestError
from .show import View, numbered
from .values import Conversation, SamplingChoice


@dataclass(frozen=True)
class Question:
    """The input of one answer."""

    conversation: Conversation
    seed: int
    max_tokens: int
    options: SamplingChoice
    pixels: int | None = None

    def request(self, model: Model) -> Request:
        """The request for `model`. Raises RequestError if a bias names a text that is not one token, or no user message
        has text.
        """
        require_user_text(self.conversation.messages)
        bias = {_token(model, token): value for token, value in self.options.bias}
        return Request(
            messages=self.conversation.messages,
            sampling=replace(self.options.sampling, seed=self.seed, logit_bias=MappingProxyType(bias)),
            max_tokens=self.max_tokens,
            stop=self.options.stop,
            thinking=self.options.thinking,
            thinking_budget=self.options.thinking_budget,
            repetition_stop=self.options.repetition_stop,
            pixels=self.pixels,
        )


@dataclass(frozen=True)
class TextReply:
    """One answer and the conversation with it as its last turn."""

    result: Result
    conversation: Conversation


class Writing:
    """Answers questions together and streams them into a view."""

    def __init__(self, questions: Sequence[Question], view: View) -> None:
        self._questions = questions
        self._view = view
        self._stream: Events | None = None
        self._written: list[_WrittenText] = []
        self._queue_position = 0  # position in the service's queue, 0: not queued

    def prepare(self, model: Model, cancel: CancelCheck) -> None:
        """Check all questions before the first is answered. Raises RequestError, ModelError."""
        requests = []
        for index, question in enumerate(self._questions):
            if cancel():
                raise Cancelled("stopped while checking the messages")
            try:
                requests.append(question.request(model))
            except RequestError as error:
                raise RequestError(self._named(index, ""), *error.args) from error
        self._written = [_WrittenText() for _ in self._questions]
        if isinstance(model, RemoteModel):  # it may have to be started first
            self._view.write(f"(waiting for {model.peer.title})")
        self._stream = model.generate_batch(requests, cancel=cancel, progress=self._report)
        self._view.follow(lambda: numbered(self._shown(), len(self._questions)))

    def run(self, model: Model, cancel: CancelCheck) -> list[TextReply]:
        """Raises RequestError for an answer without text, Cancelled on Stop; the texts so far stay visible."""
        if self._stream is None:
            raise RequestError("nothing was prepared; prepare before running")
        with closing(self._stream) as events:
            for event in events:
                self._take(event)
        results = [one.result for one in self._written]
        if any(result is not None and result.finish == "cancelled" for result in results):
            raise Cancelled("stopped while writing")
        answers = []
        for question, result in zip(self._questions, results, strict=True):
            if result is None:
                raise RequestError("the model's answer ended without a result; run the workflow again")
            turn = Message("assistant", result.text, result.reasoning)
            answers.append(TextReply(result, Conversation((*question.conversation.messages, turn))))
        return answers

    def kept(self, answers: list[TextReply]) -> object:
        """The first conversation: ComfyUI keeps it with the node's outputs."""
        return answers[0].conversation

    def _shown(self) -> list[str]:
        """The started texts, and always the first: they start in the order of the questions. While all wait, the queue
        position.
        """
        if self._queue_position and not any(one.begun or one.result for one in self._written):
            return [f"(waiting for its turn at the service, position {self._queue_position})"]
        return [one.text for index, one in enumerate(self._written) if one.begun or not index]

    def _take(self, event: Event) -> None:
        one = self._written[event.request]
        if event.progress:
            self._report(event.progress)
        if event.token is not None:
            one.tokens += 1
            limits = zip(self._written, self._questions, strict=True)
            total = sum(max(other.tokens, question.max_tokens) for other, question in limits)
            self._view.report(Progress("decode", sum(other.tokens for other in self._written), total))
        one.take(event)
        if event.result is not None and event.result.finish != "cancelled" and not event.result.text.strip():
            raise RequestError(
                self._named(event.request, _why_empty(event.result, self._questions[event.request].max_tokens))
            )

    def _report(self, progress: Progress) -> None:
        """Prefill during decoding does not move the bar back. The position in a queue is shown in words."""
        self._queue_position = progress.done if progress.stage == "queue" else 0
        if progress.stage == "queue":
            return
        if progress.stage == "load" or not any(one.tokens for one in self._written):
            self._view.report(progress)

    def _named(self, index: int, words: str) -> str:
        return words if len(self._questions) == 1 else f"item {index + 1} of {len(self._questions)}: {words}"


class _WrittenText:
    """The parts of one answer so far."""

    def __init__(self) -> None:
        self.begun = False
        self.tokens = 0
        self.result: Result | None = None
        self._text = self._reasoning = ""

    def take(self, event: Event) -> None:
        """Add the answer's next event."""
        self.begun = (
            self.begun or event.token is not None or (event.result is not None and event.result.finish != "cancelled")
        )
        self._text += event.text
        self._reasoning += event.reasoning
        self.result = event.result or self.result

    @property
    def text(self) -> str:
        """The displayed text."""
        if self.result is None:
            return self._text or (self._reasoning and f"(thinking) {self._reasoning}")
        if self.result.finish == "cancelled":
            text, tokens = self.result.text or self.result.reasoning, self.result.usage.completion
            return f"{text}\n\n[stopped after {tokens} tokens]".lstrip()
        return self.result.text


def _why_empty(result: Result, max_tokens: int) -> str:
    usage = result.usage
    if result.reasoning.strip():
        return (
            f"the model only thought ({usage.reasoning} tokens) and gave no answer within {max_tokens} tokens for it; "
            "raise max_tokens or the context, set a thinking_budget, or turn thinking off"
        )
    return (
        f"the model gave an empty answer ({usage.completion} tokens, ended by {result.finish}); "
        "change the seed or the messages, or look at the stop strings"
    )


def _token(model: Model, token: int | str) -> int:
    if isinstance(token, int):
        if model.vocab_size is not None and token >= model.vocab_size:
            raise RequestError(f"logit_bias: {model.name} has no token {token}; use 0 to {model.vocab_size - 1}")
        return token
    ids = model.encode(token)
    if len(ids) != 1:
        raise RequestError(
            f"logit_bias: {token!r} is {len(ids)} tokens of {model.name} ({ids[:8]}); name one token, by its text or"
            " its id"
        )
    return ids[0]
