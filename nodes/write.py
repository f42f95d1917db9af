"""Writing one or several answers with a model: the work behind OnedeskGenerate, in its own thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..service.api import OpenModel
from ..service.core import CancelCheck, Event, Message, Progress, Request, Result
from ..service.errors import Cancelled, RequestError
from .show import View, numbered
from .values import Conversation, SamplingChoice


@dataclass(frozen=True)
class Question:
    """What one answer is asked for."""

    conversation: Conversation
    seed: int
    max_tokens: int
    options: SamplingChoice

    def request(self, model: OpenModel) -> Request:
        """The request for `model`. Raises RequestError if a bias names a text that is not one token."""
        bias = {_token(model, token): value for token, value in self.options.bias}
        return Request(
            messages=self.conversation.messages,
            sampling=replace(self.options.sampling, seed=self.seed, logit_bias=MappingProxyType(bias)),
            max_tokens=self.max_tokens,
            stop=self.options.stop,
            thinking=self.options.thinking,
            thinking_budget=self.options.thinking_budget,
            repetition_stop=self.options.repetition_stop,
        )


@dataclass(frozen=True)
class Answer:
    """One answer and the conversation with it as its last turn."""

    result: Result
    conversation: Conversation


class Writing:
    """Answers questions one after the other and streams them into a view."""

    def __init__(self, questions: Sequence[Question], view: View) -> None:
        self._questions = questions
        self._view = view
        self._streams: list[Iterator[Event]] = []
        self._texts: list[str] = []

    def prepare(self, model: OpenModel, cancel: CancelCheck) -> None:
        """Refuse what can be refused of any question before the first is answered. Raises RequestError, ModelError."""
        self._texts, self._streams = [], []
        for question in self._questions:
            if cancel():
                raise Cancelled("stopped while checking the messages")
            self._streams.append(model.generate(question.request(model), cancel=cancel, progress=self._view.report))
        self._view.follow(lambda: numbered(list(self._texts), len(self._questions)))

    def run(self, model: OpenModel, cancel: CancelCheck) -> list[Answer]:
        """Raises RequestError for an answer without text, Cancelled on Stop; the text so far stays shown."""
        return [self._answer(question, stream) for question, stream in zip(self._questions, self._streams, strict=True)]

    def kept(self, answers: list[Answer]) -> object:
        """The first conversation: ComfyUI holds it with the node's outputs."""
        return answers[0].conversation

    def _answer(self, question: Question, stream: Iterator[Event]) -> Answer:
        text = reasoning = ""
        tokens = 0
        result: Result | None = None
        self._texts.append("")
        for event in stream:
            text += event.text
            reasoning += event.reasoning
            result = event.result or result
            if event.progress:
                self._view.report(event.progress)
            if event.token is not None:
                tokens += 1
                self._view.report(Progress("decode", tokens, max(tokens, question.max_tokens)))
            self._texts[-1] = text or (reasoning and f"(thinking) {reasoning}")
        if result is None:
            raise RequestError("the model's answer ended without a result; run the workflow again")
        if result.finish == "cancelled":
            self._texts[-1] = f"{result.text or result.reasoning}\n\n[stopped after {result.usage.completion} tokens]".lstrip()
            raise Cancelled("stopped while writing")
        self._texts[-1] = result.text
        if not result.text.strip():
            raise RequestError(_why_empty(result, question.max_tokens))
        turn = Message("assistant", result.text, result.reasoning)
        return Answer(result, Conversation((*question.conversation.messages, turn)))


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


def _token(model: OpenModel, token: int | str) -> int:
    if isinstance(token, int):
        if token >= model.vocab_size:
            raise RequestError(f"logit bias: {model.name} has no token {token}; use 0 to {model.vocab_size - 1}")
        return token
    ids = model.encode(token)
    if len(ids) != 1:
        raise RequestError(f"logit bias: {token!r} is {len(ids)} tokens of {model.name} ({ids[:8]}); name one token, by its text or its id")
    return ids[0]
