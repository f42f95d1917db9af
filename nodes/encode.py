"""OnedeskTextEncoder: hidden states of a language model as conditioning for an image model."""

from __future__ import annotations

import torch
from comfy_api.latest import io

from ..service.api import Model, OpenModel
from ..service.core import CancelCheck, Message, Thinking
from ..service.errors import RequestError
from .link_types import CATEGORY, MODEL
from .node_run import Job, PageView
from .options import parse_layers
from .show import View
from .values import HERE, ModelChoice

RAW = "raw text"
CHAT = "chat"
CHAT_WITHOUT_THINKING = "chat without thinking"
_THINKING: dict[str, Thinking] = {CHAT: "auto", CHAT_WITHOUT_THINKING: "off"}
PAD_TOKEN = "<|endoftext|>"  # noqa: S105 - Qwen's padding token, no secret


class Encoding:
    """Reads a text with a model and returns the states after the chosen blocks: [1, tokens, hidden * layers] fp32."""

    def __init__(self, text: str, layers: tuple[int, ...], template: str, min_tokens: int, view: View) -> None:
        self._text = text
        self._layers = layers
        self._template = template
        self._min_tokens = min_tokens
        self._view = view
        self._ids: list[int] = []

    def prepare(self, model: Model, cancel: CancelCheck) -> None:
        """Template, tokens, padding. Raises RequestError, ModelError."""
        model = _here(model)
        if self._template == RAW:
            ids = model.encode(self._text)
        else:
            ids = model.encode_conversation([Message("user", self._text)], _THINKING[self._template])
        if not ids:
            raise RequestError("the text to encode is empty; write at least one character")
        if len(ids) < self._min_tokens:
            pad = model.tokenizer.id_of(PAD_TOKEN)
            if pad is None:
                raise RequestError(f"{model.name} has no token {PAD_TOKEN} to fill up with; set min_tokens to 0")
            ids = ids + [pad] * (self._min_tokens - len(ids))
        self._ids = ids

    def run(self, model: Model, cancel: CancelCheck) -> torch.Tensor:
        states = _here(model).embed_prompt(self._ids, self._layers, cancel=cancel, progress=self._view.report)
        return states.unsqueeze(0)

    def kept(self, states: torch.Tensor) -> object:
        return states


def _here(model: Model) -> OpenModel:
    """The model, if it runs in this process; remote ones return texts, not hidden states."""
    if not isinstance(model, OpenModel):
        raise RequestError(
            f"{model.title} runs in another process, which gives no hidden states; load it {HERE!r} to encode"
        )
    return model


class OnedeskTextEncoder(io.ComfyNode):
    """Encodes a text for an image model with a language model that is open already."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OnedeskTextEncoder",
            display_name="Encode Text with Language Model",
            category=CATEGORY,
            description=(
                "Gives an image model the hidden states of a language model as conditioning, so that one model writes"
                " and encodes."
            ),
            search_aliases=["CLIP text encode", "conditioning", "Qwen text encoder", "hidden states"],
            inputs=[
                MODEL.Input(
                    "model",
                    tooltip=(
                        "Which model reads, from Load Language Model. It must be the one the image model was trained"
                        " with."
                    ),
                ),
                io.String.Input("text", multiline=True, default="", tooltip="What the picture should show."),
                io.String.Input(
                    "layers",
                    default="-2",
                    tooltip=(
                        "After how many blocks the states are taken: -2 is after all but the last; several, as 9, 18,"
                        " 27, are joined."
                    ),
                ),
                io.Combo.Input(
                    "template",
                    options=[CHAT, CHAT_WITHOUT_THINKING, RAW],
                    default=CHAT,
                    tooltip=(
                        "How the text is wrapped: as the image model was trained. Chat: a user turn of the model's own"
                        " chat template."
                    ),
                ),
                io.Int.Input(
                    "min_tokens",
                    default=0,
                    min=0,
                    max=2**20,
                    tooltip=(
                        "Fill shorter texts up to this many tokens with padding, for image models trained so; 0 for no"
                        " padding."
                    ),
                ),
            ],
            outputs=[
                io.Conditioning.Output(
                    display_name="conditioning", tooltip="For the sampler's positive or negative input."
                )
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    async def execute(cls, model: ModelChoice, text: str, layers: str, template: str, min_tokens: int) -> io.NodeOutput:
        view = PageView(cls.hidden.unique_id)
        encoding = Encoding(text, parse_layers(layers), template, min_tokens, view)
        states = await Job(model, cls.hidden, view, encoding).run()
        return io.NodeOutput([[states, {}]])
