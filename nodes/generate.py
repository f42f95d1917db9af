"""OnedeskGenerate: a language model answers messages, and the text appears in the node while it is written."""

from __future__ import annotations

from itertools import chain, groupby, islice, repeat

from comfy_api.latest import io

from .node_run import Job, PageView
from .show import numbered, returned, statistics
from .sockets import CATEGORY, MESSAGES, MODEL, SAMPLING, SEED_MAX
from .text_task import Answer, Question, Writing
from .values import Conversation, ModelChoice, SamplingChoice


class OnedeskGenerate(io.ComfyNode):
    """Writes. Takes lists as one piece of work: the model loads once for all items, writes them together and gives way after the last."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OnedeskGenerate",
            display_name="Write Text",
            category=CATEGORY,
            description="A language model answers the messages. The text appears here while it is written; Stop keeps what there is.",
            search_aliases=["LLM", "generate text", "prompt enhancer", "chat", "Qwen"],
            is_input_list=True,
            has_intermediate_output=True,
            inputs=[
                MODEL.Input("model", tooltip="Which model writes, from Load Language Model."),
                MESSAGES.Input("messages", tooltip="What it answers, from Write Messages; the items of a list are answered together."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=SEED_MAX,
                    control_after_generate=True,
                    tooltip="The same inputs and seed give the same text on the same machine, from the cache; another seed writes anew.",
                ),
                io.Int.Input(
                    "max_tokens",
                    default=512,
                    min=1,
                    max=2**31 - 1,
                    tooltip="The most tokens that the answer may have. Thinking is counted apart; all of it must fit the context.",
                ),
                SAMPLING.Input(
                    "sampling", optional=True, tooltip="Options of sampling, stopping and thinking; without it the model's own."
                ),
            ],
            outputs=[
                io.String.Output(
                    display_name="text", is_output_list=True, tooltip="The answer, word for word, without the model's thoughts."
                ),
                io.String.Output(display_name="reasoning", is_output_list=True, tooltip="What the model thought before it answered."),
                MESSAGES.Output(
                    display_name="messages",
                    is_output_list=True,
                    tooltip="The conversation with the answer, for the history of the next turn.",
                ),
                io.String.Output(
                    display_name="stats", is_output_list=True, tooltip="Tokens, speed, seconds, the seed, why it ended, and what gave way."
                ),
            ],
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
        rows = _rows(model, messages, seed, max_tokens, sampling or [SamplingChoice()])
        view = PageView(cls.hidden.unique_id)
        answers: list[Answer] = []
        stats: list[str] = []
        for choice, group in groupby(rows, key=lambda row: row[0]):
            writing = Writing([question for _, question in group], view)
            job = Job(choice, cls.hidden, view, writing)
            written = await job.run()
            answers += written
            stats += [statistics(job.title, answer.result) for answer in written]
            stats[-1] += "".join(f"; {part}" for part in (job.evictions, returned(job.released)) if part)
        texts = [answer.result.text for answer in answers]
        view.write(numbered([f"{text}\n\n{line}" for text, line in zip(texts, stats, strict=True)], len(rows)))
        await view.send()
        return io.NodeOutput(
            texts,
            [answer.result.reasoning for answer in answers],
            [answer.conversation for answer in answers],
            stats,
            ui={"text": texts, "stats": stats},
        )


def _rows(
    models: list[ModelChoice], messages: list[Conversation], seeds: list[int], max_tokens: list[int], options: list[SamplingChoice]
) -> list[tuple[ModelChoice, Question]]:
    """One row an item of the longest list; shorter lists repeat their last item, as everywhere in ComfyUI. An empty list gives no rows."""
    lists = (models, messages, seeds, max_tokens, options)
    if not all(lists):
        return []
    repeated = (chain(values, repeat(values[-1])) for values in lists)
    rows = islice(zip(*repeated, strict=False), max(map(len, lists)))
    return [(choice, Question(conversation, seed, limit, option)) for choice, conversation, seed, limit, option in rows]
