"""Everything that can be refused of a request is refused here, before any work."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ..core import Request, Sampling
from ..errors import ModelError, RequestError
from ..text.language import Language
from ..text.reasoning import opens_reasoning
from ..text.stops import check_stops
from .generation import Prepared
from .sequence import Limits
from .session import Blueprint


def prepare(request: Request, blueprint: Blueprint, language: Language) -> Prepared:
    """Check `request` and turn it into token ids with complete sampling and limits. Raises RequestError, ModelError."""
    request = request.validated()
    check_stops(request.stop)
    ids, in_reasoning = _prompt(request, language)
    check_ids(ids, blueprint.widths.vocab)
    check_biases(request.sampling.logit_bias, blueprint.widths.vocab)
    room = blueprint.context - len(ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and the context is {blueprint.context}: no room for an answer; "
            f"shorten the prompt by {1 - room} tokens or open the model with a larger context"
        )
    tokenizer = language.tokenizer_if_any if request.ids is not None else language.tokenizer
    vocab = blueprint.widths.vocab
    return Prepared(
        ids=tuple(ids),
        sampling=_sampling(request, blueprint),
        seed=request.sampling.seed if request.sampling.seed is not None else secrets.randbits(64),
        limits=_limits(request, room, end_tokens(blueprint, language)),
        stop=request.stop,
        in_reasoning=in_reasoning,
        repetition_stop=request.repetition_stop if request.repetition_stop is not None else request.ids is None,
        tokenizer=tokenizer,
        choosable=min(tokenizer.size, vocab) if tokenizer else vocab,
    )


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raise RequestError unless `ids` are one or more of the model's token ids."""
    if not ids:
        raise RequestError("the prompt has no tokens; write at least one character")
    for at, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise RequestError(f"token id {token!r} at position {at} is not one of the model's {vocab}; use 0 to {vocab - 1}")


def check_biases(biases: Mapping[int, float], vocab: int) -> None:
    """Raise RequestError if a bias is for an id that the model does not have."""
    for token in biases:
        if token >= vocab:
            raise RequestError(f"logit_bias has token id {token}, which is not one of the model's {vocab}; use 0 to {vocab - 1}")


def end_tokens(blueprint: Blueprint, language: Language) -> frozenset[int]:
    """The ids that end a turn: of generation_config.json, else of config.json, else Qwen's two by name."""
    for source in (blueprint.checkpoint.generation, blueprint.checkpoint.config):
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found = frozenset(i for i in values if isinstance(i, int) and not isinstance(i, bool))
        if found:
            return found
    tokenizer = language.tokenizer_if_any
    named = (tokenizer.id_of(text) for text in ("<|im_end|>", "<|endoftext|>")) if tokenizer else ()
    return frozenset(token for token in named if token is not None)


def sampling_defaults(generation: Mapping[str, Any]) -> Sampling:
    """A checkpoint's own defaults from generation_config.json; a value that is out of range is a ModelError."""
    if generation.get("do_sample") is False:
        return Sampling(temperature=0.0)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    try:
        return Sampling(**{name: generation[name] for name in names if generation.get(name) is not None}).validated()
    except RequestError as error:
        raise ModelError(f"generation_config.json: {error}") from error


def _prompt(request: Request, language: Language) -> tuple[Sequence[int], bool]:
    """The prompt's ids, and whether it leaves the model inside its reasoning."""
    if request.ids is not None:
        return request.ids, False
    tokenizer = language.tokenizer
    text = request.prompt if request.prompt is not None else language.template.render(request.messages, thinking=request.thinking)
    return tokenizer.encode(text), opens_reasoning(text)


def _sampling(request: Request, blueprint: Blueprint) -> Sampling:
    """The request's own values, then the checkpoint's, then the family's."""
    own = request.sampling.with_defaults(sampling_defaults(blueprint.checkpoint.generation))
    return own.with_defaults(blueprint.family.default_sampling(request.thinking))


def _limits(request: Request, room: int, eos: frozenset[int]) -> Limits:
    budget = request.thinking_budget
    # Without a budget of its own reasoning may use what the answer leaves, but never more than half where the answer is cut short too.
    reasoning = room - min(request.max_tokens, room // 2) if budget is None else budget
    return Limits(request.max_tokens, reasoning, room, eos)
