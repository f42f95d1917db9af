"""OnedeskPrompt: a system prompt, the user's text, and earlier turns, as messages for a model."""

from __future__ import annotations

import hashlib

import torch
from comfy_api.latest import io

from ..service.core import Message
from ..service.errors import OnedeskError
from ..service.vision.tensors import pictures_of
from .folders import preset_folders
from .link_types import CATEGORY, MESSAGES, SEED_MAX
from .presets import NONE, preset_files, read_preset
from .values import Conversation
from .wildcards import expand


class OnedeskPrompt(io.ComfyNode):
    """Builds the messages that a model answers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OnedeskPrompt",
            display_name="Write Messages",
            category=CATEGORY,
            description=(
                "Builds the messages that a language model answers: how it should work (system), and what is asked"
                " (text)."
            ),
            search_aliases=["system prompt", "chat message", "prompt preset", "wildcards"],
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=[NONE, *preset_files(preset_folders())],
                    default=NONE,
                    tooltip=(
                        "A ready system prompt. Add your own as text files in onedesk/presets of ComfyUI's user folder,"
                        " then press R."
                    ),
                ),
                io.String.Input(
                    "system",
                    multiline=True,
                    default="",
                    tooltip="How the model should answer. With a preset it is added after the preset's text.",
                ),
                io.String.Input(
                    "text",
                    multiline=True,
                    default="",
                    tooltip="What you ask or describe. Sent to the model as the user's message.",
                ),
                io.Boolean.Input(
                    "dynamic",
                    default=False,
                    tooltip=(
                        "Replace {red|green|blue} in system and text by one of the choices, drawn by the seed. Groups"
                        " may be nested; write \\{ \\| \\} for the characters themselves. A group without | stays as"
                        " it is."
                    ),
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=SEED_MAX,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    tooltip=(
                        "Draws the dynamic choices: the same seed draws the same words. The model's own seed is on the"
                        " writing node."
                    ),
                ),
                MESSAGES.Input(
                    "history",
                    optional=True,
                    tooltip=(
                        "Earlier messages, for example those of a writing node: the text is asked as the next turn. "
                        "A system prompt given here replaces the earlier one."
                    ),
                ),
                io.Image.Input(
                    "image",
                    optional=True,
                    tooltip=(
                        "Pictures that stand before the text, for a model that sees; a batch is several pictures in one"
                        " message."
                    ),
                ),
            ],
            outputs=[
                MESSAGES.Output(display_name="messages", tooltip="The whole conversation, ready for a writing node.")
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, preset: str | None = None, **_: object) -> str:
        """The preset's content: an edited preset file is a new prompt."""
        return hashlib.sha256(read_preset(preset or NONE, preset_folders()).encode()).hexdigest()

    @classmethod
    def validate_inputs(cls, preset: str | None = None) -> bool | str:
        """Name the existing presets when a workflow uses a deleted one."""
        try:
            read_preset(preset or NONE, preset_folders())
        except OnedeskError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        preset: str,
        system: str,
        text: str,
        dynamic: bool,
        seed: int,
        history: Conversation | None = None,
        image: torch.Tensor | None = None,
    ) -> io.NodeOutput:
        parts = [part for part in (read_preset(preset, preset_folders()), system) if part.strip()]
        instruction = "\n\n".join(parts)
        if dynamic:
            # Each text draws separately, so editing the system prompt does not change the words drawn for the user's
            # text.
            instruction, text = expand(instruction, seed), expand(text, seed)
        earlier = history.messages if history else ()
        if instruction:
            earlier = (Message("system", instruction), *(m for m in earlier if m.role != "system"))
        turn = Message("user", text) if image is None else Message.with_parts("user", *pictures_of(image), text)
        return io.NodeOutput(Conversation((*earlier, turn)))
