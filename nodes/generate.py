"""OnedeskGenerate: a language model answers messages; the node shows the text while it is written."""

from __future__ import annotations

from comfy_api.latest import io

from .answers import answered, length_input, repeated_rows, sampling_input, seed_input, writing_outputs
from .link_types import CATEGORY, MESSAGES, MODEL
from .text_task import Question
from .values import Conversation, ModelChoice, SamplingChoice


class OnedeskGenerate(io.ComfyNode):
    """Writes text. A list is one job: the model loads once, writes all items in a batch, and gives way after
    the last.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OnedeskGenerate",
            display_name="Write Text",
            category=CATEGORY,
            description=(
                "A language model answers the messages. The text appears here while it is written; Stop keeps what"
                " there is."
            ),
            search_aliases=["LLM", "generate text", "prompt enhancer", "chat", "Qwen"],
            is_input_list=True,
            has_intermediate_output=True,
            inputs=[
                MODEL.Input("model", tooltip="Which model writes, from Load Language Model."),
                MESSAGES.Input(
                    "messages",
                    tooltip="What it answers, from Write Messages; the items of a list are answered together.",
                ),
                seed_input(),
                length_input(),
                sampling_input(),
            ],
            outputs=writing_outputs(),
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    async def execute(
        cls,
        model: list[ModelChoice],
        messages: list[Conversation],
        seed: list[int],
        max_tokens: list[int],
        sampling: list[SamplingChoice] | None = None,
    ) -> io.NodeOutput:
        rows = repeated_rows(model, messages, seed, max_tokens, sampling or [SamplingChoice()])
        questions = [(choice, Question(asked, start, limit, option)) for choice, asked, start, limit, option in rows]
        return await answered(questions, cls.hidden)
