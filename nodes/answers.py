"""From rows of questions to answers, for every text node: one run per model, streamed, with statistics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby, islice, repeat
from typing import Any

from comfy_api.latest import io

from .link_types import MESSAGES, SAMPLING, SEED_MAX
from .node_run import Job, PageView
from .show import numbered, returned, statistics
from .text_task import Question, TextReply, Writing
from .values import ModelChoice


def repeated_rows(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """One row per item of the longest list; shorter lists repeat their last item. An empty list gives no rows."""
    if not all(lists):
        return []
    repeated = (chain(values, repeat(values[-1])) for values in lists)
    return list(islice(zip(*repeated, strict=False), max(map(len, lists))))


async def answered(rows: Sequence[tuple[ModelChoice, Question]], hidden: Any) -> io.NodeOutput:
    """The outputs `writing_outputs` for the questions, which the node shows while they are written."""
    view = PageView(hidden.unique_id)
    answers: list[TextReply] = []
    stats: list[str] = []
    for choice, group in groupby(rows, key=lambda row: row[0]):
        writing = Writing([question for _, question in group], view)
        job = Job(choice, hidden, view, writing)
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


def seed_input() -> io.Input:
    return io.Int.Input(
        "seed",
        default=0,
        min=0,
        max=SEED_MAX,
        control_after_generate=True,
        tooltip=(
            "The same inputs and seed give the same text on the same machine, from the cache; another seed gives"
            " another text."
        ),
    )


def length_input() -> io.Input:
    return io.Int.Input(
        "max_tokens",
        default=512,
        min=1,
        max=2**31 - 1,
        tooltip="The most tokens that the answer may have. Thinking is counted apart; all of it must fit the context.",
    )


def sampling_input() -> io.Input:
    return SAMPLING.Input(
        "sampling", optional=True, tooltip="Options of sampling, stopping and thinking; without it the model's own."
    )


def writing_outputs() -> list[io.Output]:
    """The outputs of every text node."""
    return [
        io.String.Output(
            display_name="text", is_output_list=True, tooltip="The answer, word for word, without the model's thoughts."
        ),
        io.String.Output(
            display_name="reasoning", is_output_list=True, tooltip="What the model thought before it answered."
        ),
        MESSAGES.Output(
            display_name="messages",
            is_output_list=True,
            tooltip="The conversation with the answer, for the history of the next turn.",
        ),
        io.String.Output(
            display_name="stats",
            is_output_list=True,
            tooltip="Tokens, speed, seconds, the seed, why it ended, and what gave way.",
        ),
    ]
