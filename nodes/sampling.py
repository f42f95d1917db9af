"""OnedeskSampling: how the next token is chosen, when to stop, and how much to think."""

from __future__ import annotations

from comfy_api.latest import io

from ..service.core import Sampling
from .link_types import CATEGORY, SAMPLING
from .options import or_default, parse_bias, parse_stops
from .values import SamplingChoice

DEFAULT = -1
# Presence and frequency penalties are valid down to -2, so their "default" is below that.
PENALTY_DEFAULT = -3


def _own(lowest: str) -> str:
    return f" {lowest}: the model's own default."


def _inputs() -> list[io.Input]:
    return [
        io.Float.Input(
            "temperature",
            default=DEFAULT,
            min=DEFAULT,
            max=1e6,
            step=0.05,
            tooltip="Higher is more varied; 0 always takes the likeliest token (greedy)." + _own("Below 0"),
        ),
        io.Int.Input(
            "top_k",
            default=DEFAULT,
            min=DEFAULT,
            max=2**31 - 1,
            tooltip="Choose among the k likeliest tokens; 0 for no limit." + _own("-1"),
        ),
        io.Float.Input(
            "top_p",
            default=DEFAULT,
            min=DEFAULT,
            max=1,
            step=0.01,
            tooltip="Choose among the likeliest tokens that together reach this probability; 1 for no limit."
            + _own("Below 0"),
        ),
        io.Float.Input(
            "min_p",
            default=DEFAULT,
            min=DEFAULT,
            max=1,
            step=0.01,
            tooltip="Leave out tokens less likely than this share of the likeliest one; 0 for no limit."
            + _own("Below 0"),
        ),
        io.Float.Input(
            "presence_penalty",
            default=PENALTY_DEFAULT,
            min=PENALTY_DEFAULT,
            max=2,
            step=0.05,
            tooltip="Taken off the logit of every token that was already written; 0 for none, negative favours them."
            + _own("Below -2"),
        ),
        io.Float.Input(
            "frequency_penalty",
            default=PENALTY_DEFAULT,
            min=PENALTY_DEFAULT,
            max=2,
            step=0.05,
            tooltip="Taken off a token's logit once for each time it was written; 0 for none, negative favours them."
            + _own("Below -2"),
        ),
        io.Float.Input(
            "repetition_penalty",
            default=DEFAULT,
            min=DEFAULT,
            max=1e6,
            step=0.01,
            tooltip="Divides the logits of tokens in the prompt or the answer; 1 for none, above 1 repeats less."
            + _own("Below 0"),
        ),
        io.String.Input(
            "stop",
            multiline=True,
            default="",
            tooltip=(
                "Stop strings, one a line: the answer ends before the first of them. \\n stands for a line end, \\t for"
                " a tab."
            ),
        ),
        io.Combo.Input(
            "thinking",
            options=["auto", "on", "off"],
            default="auto",
            tooltip=(
                "Whether the model thinks before it answers. Auto: as its chat template does. Thoughts never reach the"
                " text."
            ),
        ),
        io.Int.Input(
            "thinking_budget",
            default=DEFAULT,
            min=DEFAULT,
            max=2**31 - 1,
            tooltip=(
                "Tokens that thinking may take, beside those of the answer; then the model must answer. -1: what the"
                " context leaves."
            ),
        ),
        io.Boolean.Input(
            "stop_repetition",
            default=True,
            tooltip="End the answer when its last 256 tokens only repeat one passage; the statistics then say so.",
        ),
        io.String.Input(
            "logit_bias",
            multiline=True,
            default="",
            tooltip=(
                'Favour or ban single tokens, one a line: an id or a quoted text, then a number: 1234: -5 or " cat":'
                " 2.5; -inf bans."
            ),
        ),
    ]


class OnedeskSampling(io.ComfyNode):
    """Options of text generation. A value left at its default is the model's own (generation_config.json)."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OnedeskSampling",
            display_name="Sampling Options",
            category=CATEGORY,
            description=(
                "How a language model chooses its words. What is left at its default is taken from the model's own"
                " settings."
            ),
            search_aliases=["temperature", "top p", "top k", "stop strings", "thinking", "LLM options"],
            inputs=_inputs(),
            outputs=[SAMPLING.Output(display_name="sampling", tooltip="The options, for any number of writing nodes.")],
        )

    @classmethod
    def execute(
        cls,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        presence_penalty: float,
        frequency_penalty: float,
        repetition_penalty: float,
        stop: str,
        thinking: str,
        thinking_budget: int,
        stop_repetition: bool,
        logit_bias: str,
    ) -> io.NodeOutput:
        sampling = Sampling(
            temperature=or_default(temperature, 0),
            top_k=None if top_k < 0 else top_k,
            top_p=or_default(top_p, 0),
            min_p=or_default(min_p, 0),
            presence_penalty=or_default(presence_penalty, -2),
            frequency_penalty=or_default(frequency_penalty, -2),
            repetition_penalty=or_default(repetition_penalty, 0),
        )
        return io.NodeOutput(
            SamplingChoice(
                sampling.validated(),
                stop=parse_stops(stop),
                thinking="on" if thinking == "on" else "off" if thinking == "off" else "auto",
                thinking_budget=None if thinking_budget < 0 else thinking_budget,
                repetition_stop=stop_repetition,
                bias=parse_bias(logit_bias),
            )
        )
