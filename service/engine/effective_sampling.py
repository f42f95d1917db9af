"""The sampling in force: a request's values, then the checkpoint's, then the family's advice, then neutral values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ..core import NEUTRAL, Sampling, SamplingSource, SamplingValue, Thinking
from ..errors import ModelError, RequestError, brief
from ..loader.checkpoint import GENERATION, Checkpoint
from .sampler import GREEDY_BELOW

NAMES = tuple(f.name for f in fields(Sampling) if f.name not in ("seed", "logit_bias"))


def checkpoint_sampling(generation: Mapping[str, Any]) -> Sampling:
    """A checkpoint's values from generation_config.json. Raises ModelError for one that is out of range."""
    drawn = generation.get("do_sample")
    if drawn is not None and not isinstance(drawn, bool):
        raise ModelError(f"{GENERATION} has do_sample = {brief(drawn)}; true or false is needed")
    try:
        own = Sampling(**{name: generation[name] for name in NAMES if generation.get(name) is not None}).validated()
    except RequestError as error:
        raise ModelError(f"{GENERATION}: {error}") from error
    # transformers is greedy then, with the file's penalties.
    return Sampling(0.0, **{name: getattr(own, name) for name in NAMES[1:]}) if drawn is False else own


def effective_sampling(
    sampling: Sampling, checkpoint: Checkpoint, advice: Callable[[Thinking], Sampling], thinking: Thinking
) -> tuple[Sampling, dict[str, SamplingValue]]:
    """`sampling` with every value filled in, and the source of each value.

    The family's `advice` applies only if the checkpoint has no generation_config.json and the request is not greedy
    itself. Raises ModelError for a checkpoint's value that is out of range.
    """
    sources: list[tuple[SamplingSource, Sampling]] = [
        ("request", sampling),
        ("checkpoint", checkpoint_sampling(checkpoint.generation)),
    ]
    greedy = sampling.temperature is not None and sampling.temperature < GREEDY_BELOW
    if not checkpoint.has_generation and not greedy:
        sources.append(("family", advice(thinking)))
    sources.append(("default", NEUTRAL))
    complete, values = sampling, dict[str, SamplingValue]()
    for source, given in sources:
        for name in NAMES:
            if name not in values and (value := getattr(given, name)) is not None:
                values[name] = SamplingValue(value, source)
        complete = complete.with_defaults(given)
    return complete, {name: values[name] for name in NAMES}
