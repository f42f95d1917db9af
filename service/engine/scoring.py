"""Log-probabilities of texts of any length, in windows; perplexity; layer counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..core import Logprobs
from ..errors import RequestError


def score_windows(
    ids: Sequence[int], context: int, score: Callable[[Sequence[int]], list[float]]
) -> tuple[list[float], int]:
    """The log-probability of each id from the second on, and the number of windows: `context` ids each, overlapping by
    half.

    `score` scores one window. Raises RequestError without any id.
    """
    if not ids:
        raise RequestError("the text to score is empty; give at least one character")
    values = score(ids[:context])
    windows, done = 1, min(len(ids), context)
    overlap = max(1, context // 2)
    while done < len(ids):
        start = done - overlap
        window = ids[start : start + context]
        values += score(window)[overlap - 1 :]
        done = start + len(window)
        windows += 1
    return values, windows


def scored_rows(scores: torch.Tensor, ids: torch.Tensor, top: int) -> list[Logprobs]:
    """The log-probability of each row's id, and the `top` likeliest ids, from raw scores [rows, vocab] fp32."""
    total = scores.logsumexp(-1, keepdim=True)
    picked = (scores.gather(1, ids[:, None]) - total)[:, 0].tolist()
    likeliest = scores.topk(top)
    values, indices = (likeliest.values - total).tolist(), likeliest.indices.tolist()
    rows = zip(picked, indices, values, strict=True)
    return [Logprobs(one, tuple(zip(top_ids, shown, strict=True))) for one, top_ids, shown in rows]


def perplexity(logprobs: Sequence[float]) -> float | None:
    """exp of the mean negative log-probability; None for an empty list."""
    if not logprobs:
        return None
    mean = -sum(logprobs) / len(logprobs)
    return math.exp(mean) if mean < 700 else None


def block_count(layer: int, layers: int, name: str) -> int:
    """The number of blocks that `layer` means; -1 is all of them. Raises RequestError if the model `name` has fewer."""
    count = layer if layer >= 0 else layers + 1 + layer
    if not 0 <= count <= layers:
        raise RequestError(
            f"layer {layer} does not exist; {name} has {layers} blocks: use 0 to {layers} or -1 to -{layers + 1}"
        )
    return count
