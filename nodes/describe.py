"""OnedeskDescribeImage: a vision model answers a question about pictures."""

from __future__ import annotations

import torch
from comfy_api.latest import io

from ..service.core import Message
from ..service.errors import RequestError
from ..service.vision.tensors import pictures_of
from .answers import answered, length_input, repeated_rows, sampling_input, seed_input, writing_outputs
from .link_types import CATEGORY, MODEL
from .picture_tasks import OWN, TASKS, question_of
from .text_task import Question
from .values import Conversation, ModelChoice, SamplingChoice


class OnedeskDescribeImage(io.ComfyNode):
    """Describes pictures in text. Lists, Stop and policies are as in Write Text; a batch is a list of pictures, or one
    question.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OnedeskDescribeImage",
            display_name="Describe Image",
            category=CATEGORY,
            description=(
                "A language model that sees looks at pictures and answers: a caption, tags, a prompt that draws them"
                " again, their text, a comparison, or your own question. The text appears here while it is written."
            ),
            search_aliases=["caption", "vision", "VLM", "image to prompt", "interrogate", "tagger", "OCR", "Qwen-VL"],
            is_input_list=True,
            has_intermediate_output=True,
            inputs=[
                MODEL.Input("model", tooltip="Which model looks, from Load Language Model; it must be one that sees."),
                io.Image.Input(
                    "image", tooltip="The pictures. A batch is answered picture by picture, unless `together` is on."
                ),
                io.Combo.Input(
                    "task",
                    options=list(TASKS),
                    default="caption",
                    tooltip=(
                        "What to write. My question asks only the question below; the others put it after their own"
                        " text."
                    ),
                ),
                io.String.Input(
                    "question",
                    multiline=True,
                    default="",
                    tooltip="What you want to know of the pictures, or how the task above should be done.",
                ),
                io.Boolean.Input(
                    "together",
                    default=False,
                    tooltip=(
                        "Ask one question about all pictures of a batch, in their order, instead of one per picture."
                    ),
                ),
                io.Int.Input(
                    "pixels",
                    default=0,
                    min=0,
                    max=2**31 - 1,
                    tooltip=(
                        "The most pixels of a picture after resizing; a token stands for 784 or 1,024 of them. "
                        "0: 1,048,576 on a GPU, 262,144 on a CPU."
                    ),
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
        image: list[torch.Tensor],
        task: list[str],
        question: list[str],
        together: list[bool],
        pixels: list[int],
        seed: list[int],
        max_tokens: list[int],
        sampling: list[SamplingChoice] | None = None,
    ) -> io.NodeOutput:
        lists = (model, image, task, question, together, pixels, seed, max_tokens, sampling or [SamplingChoice()])
        questions: list[tuple[ModelChoice, Question]] = []
        for choice, batch, asked, own, joined, limit, start, length, option in repeated_rows(*lists):
            text = question_of(asked, own)
            if not text:
                raise RequestError(
                    f"the question is empty and the task is {OWN!r}; write a question or choose another task"
                )
            pictures = pictures_of(batch)
            for group in [pictures] if joined else [(picture,) for picture in pictures]:
                turn = Conversation((Message.with_parts("user", *group, text),))
                questions.append((choice, Question(turn, start, length, option, limit or None)))
        return await answered(questions, cls.hidden)
