"""Checks and prepares requests: everything that can be refused is refused here, before any work."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from ..cache.paged import blocks_for
from ..core import CancelCheck, Request
from ..errors import Cancelled, Field, OnedeskError, RequestError
from ..kernels.forward_batch import BLOCK
from ..loader.checkpoint import CONFIG, GENERATION, end_ids
from ..text.conversation import RenderedPrompt, render_conversation
from ..text.grammar import Grammars, Guide
from ..text.language import Language
from ..text.reasoning import opens_reasoning
from ..text.stops import StopStrings
from .beam_search import BeamSearch
from .completion import CLOSING, Limits, Prepared
from .effective_sampling import effective_sampling
from .picture_reader import PictureReader
from .prepare_pictures import place_pictures
from .sampler import Adjustments
from .session import Blueprint

# The most characters that a normalizer may merge into one. A text is refused before it is tokenized only if it surely
# does not fit.
SHRINKS = 4


def prepare(
    request: Request,
    blueprint: Blueprint,
    language: Language,
    cancel: CancelCheck | None = None,
    reader: PictureReader | None = None,
) -> Prepared:
    """Check `request`, turn it into token ids with complete sampling and limits, and make what its choices share.

    `reader` reads its pictures. Raises RequestError, ModelError, and Cancelled when `cancel` turns true.
    """
    request = request.validated()
    require_head(blueprint)
    stop = StopStrings(request.stop, cancel)
    prompt = _prompt(request, blueprint.context, language, cancel)
    ids, in_reasoning = prompt.ids, prompt.in_reasoning
    check_ids(ids, blueprint.widths.vocab)
    ids, pictures = place_pictures(request, ids, reader, blueprint.context)
    check_biases(request.sampling.logit_bias, blueprint.widths.vocab)
    room = blueprint.context - len(ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and the context is {blueprint.context}: no room for an answer; "
            f"shorten the prompt by {1 - room} tokens or open the model with a larger ",
            Field("context"),
        )
    tokenizer = language.tokenizer_if_any if request.ids is not None else language.tokenizer
    vocab = blueprint.widths.vocab
    ends = end_tokens(blueprint, language)
    limits = _limits(request, room, ends)
    choosable = min(tokenizer.size, vocab) if tokenizer else vocab
    guide = _guide(request, language.grammars(choosable, ends), prompt) if request.json_schema is not None else None
    if request.beams is not None:
        _check_beams(request.beams, len(ids), limits.room, blueprint)
    repetition_stop = request.repetition_stop if request.repetition_stop is not None else request.ids is None
    advice = blueprint.family.default_sampling
    sampling, in_force = effective_sampling(request.sampling, blueprint.checkpoint, advice, request.thinking)
    return Prepared(
        ids=tuple(ids),
        sampling=sampling,
        seed=request.sampling.seed if request.sampling.seed is not None else secrets.randbits(64),
        limits=limits,
        reserve=_reserve(request, limits, in_reasoning),
        stop=stop,
        in_reasoning=in_reasoning,
        repetition_stop=repetition_stop and request.beams is None,
        tokenizer=tokenizer,
        choosable=choosable,
        adjustments=Adjustments(sampling, ids, choosable),
        in_force=in_force,
        closing=tuple(tokenizer.encode(CLOSING)) if tokenizer else (),
        n=request.n,
        best_of=request.best_of,
        beams=request.beams,
        prefix_reuse=request.prefix_reuse,
        speculation=request.speculation,
        logprobs=request.logprobs,
        guide=guide.fork if guide is not None else None,
        pictures=pictures,
        keys=pictures.keys(ids) if pictures is not None else tuple(ids),
    )


def prepare_all(
    requests: Sequence[Request],
    blueprint: Blueprint,
    language: Language,
    cancel: CancelCheck | None = None,
    reader: PictureReader | None = None,
) -> list[Prepared]:
    """As `prepare` for each; an error of one of several names its position in the list."""
    if not requests:
        raise RequestError("the list of requests is empty; give at least one")
    prepared = []
    for number, request in enumerate(requests, 1):
        try:
            prepared.append(prepare(request, blueprint, language, cancel, reader))
        except OnedeskError as error:
            if len(requests) == 1:
                raise
            raise type(error)(f"item {number} of {len(requests)}: ", *error.args) from error
    return prepared


def require_head(blueprint: Blueprint) -> None:
    """Raise RequestError for a network that gives states and no scores."""
    if blueprint.config.headless:
        name = blueprint.checkpoint.name
        raise RequestError(
            f"{name} has no output matrix (lm_head), so it gives vectors and writes no text; ask it for embeddings"
        )


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raise RequestError unless `ids` are one or more of the model's token ids."""
    if not ids:
        raise RequestError("the prompt has no tokens; write at least one character")
    for at, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise RequestError(
                f"token id {token!r} at position {at} is not one of the model's {vocab}; use 0 to {vocab - 1}"
            )


def check_biases(biases: Mapping[int, float], vocab: int) -> None:
    """Raise RequestError for a bias of an id that the model does not have."""
    for token in biases:
        if token >= vocab:
            raise RequestError(
                Field("logit_bias"),
                f" has token id {token}, which is not one of the model's {vocab}; use 0 to {vocab - 1}",
            )


def end_tokens(blueprint: Blueprint, language: Language) -> frozenset[int]:
    """The ids that end a turn: from generation_config.json, else config.json, else Qwen's two by name."""
    checkpoint = blueprint.checkpoint
    for source, shown in ((checkpoint.generation, GENERATION), (checkpoint.config, CONFIG)):
        if found := end_ids(source, shown):
            return found
    tokenizer = language.tokenizer_if_any
    named = (tokenizer.id_of(text) for text in ("<|im_end|>", "<|endoftext|>")) if tokenizer else ()
    return frozenset(token for token in named if token is not None)


def _prompt(request: Request, context: int, language: Language, cancel: CancelCheck | None) -> RenderedPrompt:
    """The prompt and its ids. Raises RequestError for a text that cannot fit, before it is tokenized."""
    if request.ids is not None:
        return RenderedPrompt("", request.ids, in_reasoning=False, thoughts_closed=False)
    tokenizer = language.tokenizer

    def check_length(text: str) -> None:
        if cancel is not None and cancel():
            raise Cancelled("stopped before the prompt was tokenized")
        fewest = len(text) // (SHRINKS * tokenizer.longest)
        if fewest > context:
            raise RequestError(
                f"the prompt has more than {fewest} tokens and the context is {context}; shorten it "
                f"({len(text)} characters), or open the model with a larger ",
                Field("context"),
            )

    if request.prompt is None:
        return render_conversation(
            language.template,
            language.added_tokens,
            request.messages,
            thinking=request.thinking,
            tools=request.tools,
            options=request.template_options,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            check=check_length,
            cancel=cancel,
        )
    text = request.prompt
    check_length(text)
    in_reasoning = request.parse_special and opens_reasoning(text)
    return RenderedPrompt(
        text, tokenizer.encode(text, parse_special=request.parse_special), in_reasoning, thoughts_closed=False
    )


def _guide(request: Request, grammars: Grammars, prompt: RenderedPrompt) -> Guide:
    """The grammar that every choice of the request follows."""
    may_think = request.thinking != "off" and not prompt.in_reasoning and not prompt.thoughts_closed
    schema = request.json_schema or ""
    if request.calls:
        guide = grammars.guide_or_calls(schema, request.tools, most=request.calls, may_think=may_think)
    else:
        guide = grammars.guide(schema, frame=request.json_frame, may_think=may_think)
    if prompt.begun:
        guide.accept_text(prompt.begun)
    return guide


def _check_beams(beams: int, tokens: int, room: int, blueprint: Blueprint) -> None:
    need, there = BeamSearch.blocks(tokens, room, beams), blocks_for(blueprint.context) * blueprint.sequences
    if need > there:
        raise RequestError(
            f"{beams} beams of up to {room} tokens after a prompt of {tokens} need KV for {need * BLOCK:,} tokens, "
            f"and the context gives {there * BLOCK:,}; use fewer ",
            *(
                Field("beams"),
                ", a smaller ",
                Field("max_tokens"),
                ", or open the model with a larger ",
                Field("context"),
            ),
        )


def _reserve(request: Request, limits: Limits, in_reasoning: bool) -> int:
    """Tokens for which KV blocks are reserved at once: reasoning without a budget is assumed to be as long as the
    answer."""
    budget = request.thinking_budget
    thinking = (limits.answer if in_reasoning else 0) if budget is None else budget
    return min(limits.room, limits.answer + thinking)


def _limits(request: Request, room: int, eos: frozenset[int]) -> Limits:
    budget = request.thinking_budget
    if request.beams is not None:
        # A search compares completions by their tokens, so one limit holds for all of them, reasoning included.
        room = min(room, request.max_tokens)
        return Limits(room, room, room, eos)
    if request.total_tokens is not None:
        room = min(room, request.total_tokens)
        if budget is None and request.json_schema is None:
            return Limits(request.max_tokens, room, room, eos)
    # Without a budget reasoning may use what the answer leaves, but at most half where the answer is cut short too.
    reasoning = room - min(request.max_tokens, room // 2) if budget is None else budget
    return Limits(request.max_tokens, reasoning, room, eos)
