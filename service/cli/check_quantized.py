"""What a model loses with int8 and int4, for `onedesk doctor --check`: the perplexity of one text, and where the greedy
answer first differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..api import OpenModel
from ..core import Request, Sampling
from ..engine.scoring import perplexity
from .examine import Check

TOKENS = 24
# Relative increase of the perplexity beyond which rounding is no explanation: ten times what int8, four times what int4
# may cost.
BOUNDS = {"int8": 0.05, "int4": 0.25}
TEXT = """The old harbour lies in morning fog. A fisherman mends his nets beside a blue boat while gulls circle above
the pier, and the first sunlight touches the roofs behind him. On the wall, half hidden by ropes, somebody painted a
compass rose long ago. The photograph is taken from a low angle with a short lens, so that the wet planks lead the eye
to the lighthouse in the distance. Colours are muted: slate, rust, a little yellow from the lamps that still burn in the
windows. It feels
quiet,
as if the day had
not decided yet
what it wants to be."""
IDS = 96


@dataclass(frozen=True, slots=True)
class Voice:
    """One quantization's results on the text: the types of its weights, log-probabilities, ids of its greedy answer."""

    form: str
    logprobs: tuple[float, ...]
    answer: tuple[int, ...]


def listen(model: OpenModel, request: Request) -> Voice:
    """Score the text and answer `request` greedily. Raises what the model raises."""
    if request.ids is None:
        logprobs = model.score(model.encode(TEXT)[: model.context])
    else:
        logprobs = model.score([3 + 7 * i % (model.vocab_size - 3) for i in range(min(IDS, model.context))])
    greedy = Request(messages=request.messages, ids=request.ids, sampling=Sampling(temperature=0.0), max_tokens=TOKENS)
    found = [event.result for event in model.generate(greedy) if event.result]
    return Voice(model.weight_format, tuple(logprobs), found[-1].ids)


def compared(stored: Voice, here: Voice, quant: str) -> Check:
    """The difference between `quant` and the weights as stored. A failure only if rounding cannot explain it."""
    before, after = perplexity(stored.logprobs), perplexity(here.logprobs)
    if before is None or after is None:
        return Check(
            quant,
            "failure",
            f"{here.form}: the scores of the text are no numbers",
            "report it, with the kernels named above",
        )
    change = after / before - 1
    widest = max(abs(one - other) for one, other in zip(stored.logprobs, here.logprobs, strict=True))
    same = next(
        (i for i, (one, other) in enumerate(zip(stored.answer, here.answer, strict=False)) if one != other), None
    )
    text = (
        f"the greedy answer is the same for {len(here.answer)} tokens"
        if same is None
        else f"the greedy answer turns at token {same + 1}"
    )
    detail = (
        f"{here.form}: perplexity {after:.4g} against {before:.4g} as stored ({change:+.2%}) over {len(here.logprobs)}"
        f" tokens, at most {widest:.3g} in one log-probability; {text}"
    )
    if change > BOUNDS[quant]:
        fix = (
            f"more than the {BOUNDS[quant]:.0%} that rounding explains: use another form, and report it with the"
            " kernels named above"
        )
        return Check(quant, "failure", detail, fix)
    return Check(quant, "ok", detail)
