"""The samplings that decode is measured with: greedy, and what people run, the model card's with one thing more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core import Sampling

# The rows of `bench decode --sampling NAME`; the first is what the others are compared with.
ROWS: Mapping[str, tuple[str, ...]] = {
    "greedy": ("greedy",),
    "card": ("card", "presence", "repetition", "bias", "logprobs", "schema"),
}
# What a row asks for beyond the card's temperature, top_p, top_k and min_p.
WORDS: Mapping[str, str] = {
    "greedy": "greedy",
    "card": "card",
    "presence": "card, presence 1.5",
    "repetition": "card, repetition 1.1",
    "bias": "card, a bias",
    "logprobs": "card, logprobs 5",
    "schema": "card, JSON schema",
}
# Words of the rows without an addition.
PLAIN = ("greedy", "card")
SEED = 11
# The id whose bias is measured; which one it is changes no speed.
BIASED = {7: 1.0}
# A document that no measurement ends.
SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 100000}'


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """A row's sampling, without its bias, and the other fields of its request."""

    sampling: Sampling
    bias: Mapping[int, float] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


def sampling_case(name: str) -> SamplingCase:
    """The sampling of a row by its name in ROWS. The card's values that are not given here come from the checkpoint, or
    from the advice for its family."""
    if name == "greedy":
        return SamplingCase(Sampling(temperature=0.0, presence_penalty=0.0, frequency_penalty=0.0))
    return SamplingCase(
        Sampling(
            presence_penalty=1.5 if name == "presence" else 0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.1 if name == "repetition" else 1.0,
            seed=SEED,
        ),
        BIASED if name == "bias" else {},
        {"logprobs": {"logprobs": 5}, "schema": {"json_schema": SCHEMA, "thinking": "off"}}.get(name, {}),
    )
