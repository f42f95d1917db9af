"""The vocabulary that all rooms share. No tensors, no torch."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeGuard

from .errors import Field, OnedeskError, RequestError

Finish = Literal["stop", "length", "stop_string", "repetition", "cancelled"]
Thinking = Literal["on", "off", "auto"]
# How weights are held: as stored, or converted to 8 or 4 bits.
QUANTIZATIONS = ("none", "int8", "int4")
CancelCheck = Callable[[], bool]
# Where a value of the sampling in force comes from: the request, the checkpoint's generation_config.json, the family's
# published advice for checkpoints without that file, or none of them.
SamplingSource = Literal["request", "checkpoint", "family", "default"]

SEED_LIMIT = 2**64
WHOLE_LIMIT = 2**63 - 1  # the largest count of tokens in a request
FP32_MAX, FP32_SMALLEST = (2 - 2**-23) * 2.0**127, 2.0**-126  # the largest and the smallest normal number
LOGPROBS_LIMIT = 20  # likeliest tokens shown at each position
# The most choices of one request, and the most beams of a search (as many rows as one decode step has).
PICTURES_LIMIT = 64  # of one request
CHOICES_LIMIT, BEAMS_LIMIT = 128, 8
_SHOWN_CHARACTERS = 60
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a stage; `done` and `total` are bytes of a load, tokens of a prefill. In another process's queue
    `done` is the position, 1 for the next."""

    stage: Literal["queue", "load", "prefill", "decode"]
    done: int
    total: int


ProgressReport = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model, and how it is opened: equal specs share one handle.

    `name`: the model's name; the registry's own key has a path, "" is the only model of a peer. `context`: tokens, None
    for the usual number. `quant`: one of QUANTIZATIONS. `device`: auto, cpu or cuda; a peer's model is where its engine
    runs.
    """

    name: str
    context: int | None = None
    quant: str = "none"
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class Picture:
    """Decoded pixels: `rgb` holds one byte per value, [height, width, 3] from the top left. `name` is for messages.

    `pixels` bounds its area after resizing; None: the request's limit.
    """

    width: int
    height: int
    rgb: bytes
    name: str = "the picture"
    pixels: int | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `reasoning` is the reasoning of an assistant turn, apart from its answer.

    `tool_calls` are an assistant's, as the OpenAI API has them; `tool_call_id` is the call that a turn of role "tool"
    answers. `parts` are the texts and pictures of a turn with pictures, in order; `content` is then the texts alone
    (see `with_parts`).
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str = ""
    parts: tuple[str | Picture, ...] = ()

    @classmethod
    def with_parts(cls, role: str, *parts: str | Picture) -> Message:
        """A turn of texts and pictures."""
        return cls(role, "".join(part for part in parts if isinstance(part, str)), parts=parts)

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Those among the parts, in order."""
        return tuple(part for part in self.parts if isinstance(part, Picture))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. None: the model's own default; temperature 0: greedy."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None

    def validated(self) -> Sampling:
        """Return self. Raises RequestError with the first value that is out of range in FP32, and the range."""
        for name, low, high, low_open in _RANGES:
            _check_range(name, getattr(self, name), low, high, low_open)
        _check_whole("top_k", self.top_k, 0, WHOLE_LIMIT, ", 0 for no limit")
        _check_whole("seed", self.seed, 0, SEED_LIMIT - 1)
        for token, bias in self.logit_bias.items():
            if not is_whole(token) or token < 0 or fp32(bias) is None:
                words = f" has {shown(token)}: {shown(bias)}; use token ids from 0 and numbers within {_fp32_limits()}"
                raise RequestError(Field("logit_bias"), words)
        return self

    def with_defaults(self, defaults: Sampling) -> Sampling:
        """Fill values that are None from `defaults`, except the seed and the biases."""
        missing = {
            f.name: getattr(defaults, f.name)
            for f in fields(self)
            if f.name not in ("seed", "logit_bias") and getattr(self, f.name) is None
        }
        return replace(self, **missing)


# Leaves the model's own probabilities unchanged.
NEUTRAL = Sampling(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class SamplingValue:
    """One value of the sampling in force, and its source."""

    value: float
    source: SamplingSource


_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("temperature", 0.0, FP32_MAX, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("repetition_penalty", 0.0, FP32_MAX, True),
)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def fp32(value: object) -> float | None:
    """`value` in FP32, the type of scores; None for a value that is not a number or not finite in FP32.

    Values below FP32's smallest normal number become 0, because some devices flush them to 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not -FP32_MAX <= value <= FP32_MAX:  # false for NaN too, and an int of any length compares
        return None
    return 0.0 if abs(value) < FP32_SMALLEST else struct.unpack("f", struct.pack("f", value))[0]


def shown(value: object) -> str:
    """`value` for a message: a long number or text is cut, also an int of more digits than Python can write."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _fp32_limits() -> str:
    return f"{-FP32_MAX:.4g} to {FP32_MAX:.4g}"


def _check_range(name: str, value: object, low: float, high: float, low_open: bool) -> None:
    if value is None:
        return
    used = fp32(value)
    given = isinstance(value, int | float) and low <= value <= high
    if not given or used is None or not low <= used <= high or (low_open and used == low):
        above = f"above {low:g}" if low_open else f"from {low:g}"
        raise RequestError(Field(name), f" is {shown(value)}; use a number {above} to {high:.4g}")


def _check_whole(name: str, value: object, low: int, high: int, note: str = "") -> None:
    """Raise RequestError unless `value` is None or a whole number from `low` to `high`; `note` replaces the range in
    the message."""
    if value is None or (is_whole(value) and low <= value <= high):
        return
    top = {WHOLE_LIMIT: "", SEED_LIMIT - 1: " to 2^64-1"}.get(high, f" to {high}")
    too_large = is_whole(value) and value > WHOLE_LIMIT == high
    limit = note or f" from {low}{' to 2^63-1' if too_large else top}"
    raise RequestError(Field(name), f" is {shown(value)}; use a whole number{limit}")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a model: exactly one of a conversation, a raw text without a template (`prompt`), and raw token
    ids.

    `max_tokens` bounds the answer; `thinking_budget` bounds the reasoning (None: what the context leaves besides the
    answer). `total_tokens` bounds both together, as OpenAI's API has it; then reasoning without a budget may use
    all of it, or half where the answer follows a schema.
    `repetition_stop` None means on, except for raw ids.

    `n` choices are decoded together; choice i uses the seed + i mod 2^64 and is the text that it would be alone.
    `best_of` N draws N choices and returns the `n` with the highest summed log-probability, best first. `beams` N runs
    a beam search with N beams instead of drawing, see engine/beam_search.py, and returns the `n` best. `prefix_reuse`
    allows prefix caching, `speculation` speculative decoding; neither changes the completion.

    `json_schema` is the text of a JSON Schema that the answer follows; reasoning before it is free. `json_frame` are
    the texts before and after the document. `logprobs` N gives each token of the answer its log-probability and those
    of the N likeliest, see Logprobs. `tools` (as the OpenAI API has them) and `template_options` are for the chat
    template. `calls` 1 or more: an answer bound to a schema may instead be up to that many calls of `tools`.
    `continue_final_message`: the answer continues the last message. `parse_special`: texts of control tokens in a raw
    `prompt` are those tokens; in messages they never are.

    `images` belong to `prompt` and `ids`, in which the model's image token stands once per picture; messages have their
    own. `pixels` bounds the area of each picture after resizing; None: 1,048,576 on a GPU, 262,144 on a CPU.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    ids: tuple[int, ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 512
    total_tokens: int | None = None
    stop: tuple[str, ...] = ()
    thinking: Thinking = "auto"
    thinking_budget: int | None = None
    repetition_stop: bool | None = None
    n: int = 1
    best_of: int | None = None
    beams: int | None = None
    prefix_reuse: bool = True
    speculation: bool = True
    json_schema: str | None = None
    json_frame: tuple[str, str] = ("", "")
    logprobs: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    calls: int = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    parse_special: bool = True
    images: tuple[Picture, ...] = ()
    pixels: int | None = None

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """All pictures in the order of the prompt."""
        return (*self.images, *(picture for message in self.messages for picture in message.pictures))

    def validated(self) -> Request:
        """Return self. Raises RequestError for the first invalid value."""
        given = (bool(self.messages), self.prompt is not None, self.ids is not None)
        if sum(given) != 1:
            raise RequestError(f"a request needs exactly one of messages, prompt and ids; {sum(given)} were given")
        if self.max_tokens is None:
            raise RequestError(Field("max_tokens"), " is None; use a whole number from 1")
        _check_whole("max_tokens", self.max_tokens, 1, WHOLE_LIMIT)
        _check_whole("total_tokens", self.total_tokens, 1, WHOLE_LIMIT)
        _check_whole("thinking_budget", self.thinking_budget, 0, WHOLE_LIMIT)
        if self.thinking not in ("on", "off", "auto"):
            raise RequestError(Field("thinking"), f" is {shown(self.thinking)}; use on, off or auto")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError("a ", Field("stop"), " string is empty; leave it out or write at least one character")
        _check_whole("logprobs", self.logprobs, 0, LOGPROBS_LIMIT)
        self._check_text()
        self._check_pictures()
        self.sampling.validated()
        self._check_choices()
        return self

    def _check_choices(self) -> None:
        if self.n is None:
            raise RequestError(Field("n"), f" is None; use a whole number from 1 to {CHOICES_LIMIT}")
        for name, limit in (("n", CHOICES_LIMIT), ("best_of", CHOICES_LIMIT), ("beams", BEAMS_LIMIT)):
            _check_whole(name, getattr(self, name), 1, limit)
        if self.best_of is not None and self.beams is not None:
            words = " exclude each other: one draws, the other searches; give one of them"
            raise RequestError(Field("best_of"), " and ", Field("beams"), words)
        for name, value in (("best_of", self.best_of), ("beams", self.beams)):
            if value is not None and value < self.n:
                words = (
                    f" is {self.n}; the first must be at least the second, which says how many of its best are given"
                )
                raise RequestError(Field(name), f" is {value} and ", Field("n"), words)
        if self.beams is not None:
            self._check_search()

    def _check_search(self) -> None:
        s = self.sampling
        if s.temperature:
            words = f" is {s.temperature:g}; leave it out, or draw with "
            raise RequestError(
                Field("beams"), " searches without drawing, and ", Field("temperature"), words, Field("best_of")
            )
        drawing = ("top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        given = [name for name in drawing if getattr(s, name) is not None]
        if given:
            words = " would change them; leave it out, or draw with "
            raise RequestError(
                Field("beams"), " searches by the model's own scores, and ", Field(given[0]), words, Field("best_of")
            )
        unknown = [
            name
            for name in ("stop", "thinking_budget", "json_schema", "logprobs")
            if getattr(self, name) not in (None, ())
        ]
        if unknown:
            parts = " ends at the model's own end or ", Field("max_tokens"), " and does not know "
            raise RequestError("a search with ", Field("beams"), *parts, Field(unknown[0]), "; leave it out")

    def _check_text(self) -> None:
        if self.ids is not None:
            if not self.ids:
                raise RequestError("the list of token ids is empty; give at least one id")
            return
        if self.prompt is not None and not self.prompt:
            raise RequestError("the prompt is empty; write at least one character")
        if self.messages and not any(
            m.content.strip() or m.reasoning.strip() or m.tool_calls or m.pictures for m in self.messages
        ):
            raise RequestError("the prompt is empty: no message has any text; write what the model should do")
        texts = [
            self.prompt or "",
            *(m.content for m in self.messages),
            *(m.reasoning for m in self.messages),
            *self.stop,
        ]
        for text in texts:
            half = _SURROGATE.search(text)
            if half:
                code = ord(half.group())
                raise RequestError(
                    f"the text has half a character (lone surrogate U+{code:04X}) at position {half.start()}; remove it"
                )

    def _check_pictures(self) -> None:
        if self.images and self.messages:
            raise RequestError(
                Field("images"), " go with a prompt or with ids; pictures of messages are among the parts of each"
            )
        _check_whole("pixels", self.pixels, 1, WHOLE_LIMIT)


def require_user_text(messages: Sequence[Message]) -> None:
    """Raise RequestError unless a user message has any text: a person who writes nothing wants nothing to be
    written."""
    if not any(message.role == "user" and (message.pictures or message.content.strip()) for message in messages):
        raise RequestError("the prompt is empty: no user message has any text; write what the model should do")


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `completion` counts every sampled token, reasoning and the final EOS included. `cached`: tokens of
    the prompt that came from the prefix cache.
    """

    prompt: int
    completion: int
    reasoning: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """The costs of one stage (load, prefetch, prefill, decode, draft, table, speculation, sample, release): seconds,
    bytes read, moved or returned, page faults, pool allocations and their seconds.

    `bandwidth_share`: bytes per second over the machine's measured read bandwidth; None if unknown, or if the stage is
    not bound by it. `proposed` and `accepted` are draft tokens, of the stage "speculation" alone.
    """

    seconds: float = 0.0
    bytes: int = 0
    major_faults: int = 0
    minor_faults: int = 0
    allocations: int = 0
    allocator_seconds: float = 0.0
    bandwidth_share: float | None = None
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """A finished choice. `ids` are the sampled tokens without the final EOS; `seconds` has load, first_token, total.

    `stages` are the costs of the whole run up to then. `logprob` is the sum of the chosen tokens' log-probabilities in
    the raw model, EOS included and forced tokens left out; None without best_of and beams. `sampling`: the values in
    force by the names of Sampling; empty for another engine that does not report them.
    """

    text: str
    reasoning: str
    ids: tuple[int, ...]
    finish: Finish
    seed: int
    usage: Usage
    seconds: Mapping[str, float]
    stages: Mapping[str, Stage]
    logprob: float | None = None
    sampling: Mapping[str, SamplingValue] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probability of a token, and (id, log-probability) of the likeliest at its position: of the raw model,
    before temperature, bias and penalties.
    """

    token: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a run: text that became visible and its token, progress, or, on a choice's last event, the result.

    `error` is on the last event of a request that failed alone while others continue; its choices have no result.

    `request` is the number of the request in the list, `choice` the number among its choices. `logprobs` is set if the
    request has `logprobs` and the token belongs to the answer, not to the reasoning.
    """

    text: str = ""
    reasoning: str = ""
    token: int | None = None
    progress: Progress | None = None
    result: Result | None = None
    error: OnedeskError | None = None
    logprobs: Logprobs | None = None
    request: int = 0
    choice: int = 0
