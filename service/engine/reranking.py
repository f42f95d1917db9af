"""Relevance of documents to a query by a model that answers yes or no, as Qwen3-Reranker does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch

from ..cache.paged import blocks_for
from ..core import CancelCheck
from ..errors import Cancelled, ModelError, RequestError
from ..kernels.forward_batch import FEW_ROWS
from ..text.tokenizer import Tokenizer
from .buffers import MAX_BATCH
from .runner import Runner

# The form that Qwen3-Reranker is trained on.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PairPrompts:
    """The prompts of one query: control tokens are those of the form; in the query and documents they stay text."""

    def __init__(self, tokenizer: Tokenizer, query: str, instruction: str = "") -> None:
        """`instruction`: the task in words; empty for that of a web search. Raises ModelError for a tokenizer in which
        yes or no is not one token, RequestError for half a character."""
        self._tokenizer = tokenizer
        self.answers = _one_token(tokenizer, "yes"), _one_token(tokenizer, "no")
        self._head = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: "
        self._before, self._after = tokenizer.encode(_BEFORE), tokenizer.encode(_AFTER)
        self._head_tokens = len(tokenizer.encode(self._head, parse_special=False))

    def of(self, document: str, most: int | None, context: int) -> list[int]:
        """Token ids for `document`, of which at most `most` tokens are kept. Raises RequestError beyond `context`."""
        body = self._tokenizer.encode(self._head + document, parse_special=False)
        if most is not None:
            body = body[: self._head_tokens + most]
        ids = [*self._before, *body, *self._after]
        if len(ids) > context:
            left = context - len(self._before) - len(self._after) - self._head_tokens
            advice = f"set max_tokens_per_doc to at most {left}, or " if left > 0 else "shorten the query, or "
            raise RequestError(
                f"query and document have {len(ids)} tokens, and the context {context}; {advice}open the model with"
                " more context"
            )
        return ids


def _one_token(tokenizer: Tokenizer, word: str) -> int:
    ids = tokenizer.encode(word)
    if len(ids) != 1:
        raise ModelError(f'"{word}" is {len(ids)} tokens in this tokenizer, not one; rerank with a Qwen reranker')
    return ids[0]


def relevances(
    runner: Runner, prompts: Sequence[Sequence[int]], answers: tuple[int, int], cancel: CancelCheck | None
) -> list[float]:
    """The probability of the first of `answers` against the second after each prompt, 0 to 1.

    Prompts are packed by length into passes where the network allows it. Raises Cancelled, Stopped.
    """
    found = [0.0] * len(prompts)
    for group in packed_by_length([len(ids) for ids in prompts], _fits(runner)):
        if cancel is not None and cancel():
            raise Cancelled("stopped while documents were ranked")
        scores = _scores_of(runner, [prompts[at] for at in group], cancel)
        both = scores[:, list(answers)].float().softmax(-1)[:, 0].tolist()
        for at, value in zip(group, both, strict=True):
            found[at] = value
    return found


def packed_by_length(lengths: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> Iterator[list[int]]:
    """Groups of positions in `lengths`, the shortest first; a group of several has lengths that fit together."""
    group: list[int] = []
    for at in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and not fits([lengths[one] for one in (*group, at)]):
            yield group
            group = []
        group.append(at)
    if group:
        yield group


def _fits(runner: Runner) -> Callable[[Sequence[int]], bool]:
    """Whether prompts of these lengths can be read in one pass. A pass of a few rows sums in another order, so short
    prompts are read alone."""

    def fits(lengths: Sequence[int]) -> bool:
        blocks = sum(blocks_for(length) for length in lengths)
        return (
            runner.reads_several
            and len(lengths) <= MAX_BATCH
            and min(lengths) > FEW_ROWS
            and sum(lengths) <= runner.chunk_rows
            and blocks <= runner.kv.available
        )

    return fits


def _scores_of(runner: Runner, prompts: Sequence[Sequence[int]], cancel: CancelCheck | None) -> torch.Tensor:
    """Scores [prompts, vocab] for the token after each prompt, valid until the next pass."""
    with ExitStack() as held:
        sequences = [held.enter_context(runner.kv.open(len(ids))) for ids in prompts]
        if len(prompts) == 1:
            return runner.prefill(sequences[0], prompts[0], cancel, lambda _: None)[None]
        return runner.prefill_several(sequences, prompts, cancel)
