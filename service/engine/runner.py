"""Tensors of a running model: prefill in chunks, decode step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..cache.kv import KVCache
from ..core import CancelCheck
from ..model.arrival import EMBEDDING, WeightArrival
from ..model.layers import BetweenLayers, Decoder, Scratch

# Tokens a chunk: enough for the matrix products to reach their rate, few enough to stop between two of them.
CHUNK = 256
# Rows of scores held at once when every position is scored: 16 of 152,000 are 10 MB.
SCORED_ROWS = 16


class Stopped(Exception):  # noqa: N818 - a signal inside the engine, never seen outside
    """The caller asked to stop in the middle of a chunk; the cache is as it was before the chunk."""


class Runner:
    """Runs one sequence at a time over a reserved cache. Not thread-safe: its owner holds the lock."""

    def __init__(self, network: Decoder, cache: KVCache, scratch: Scratch, device: torch.device, gate: WeightArrival | None = None) -> None:
        """`gate` is asked for weights before they are used (see Destination.part); None when all are there."""
        self.gate = gate
        self.network = network
        self.cache = cache
        self.scratch = scratch
        self._device = device
        self._token = torch.zeros(1, dtype=torch.int64, device=device)

    def close(self) -> None:
        """Let go of every tensor; the runner cannot be used afterwards."""
        del self.network, self.cache, self.scratch, self.gate

    def begin(self) -> None:
        """Forget the sequence before."""
        self.cache.truncate(0)

    def prefill(self, ids: Sequence[int], cancel: CancelCheck | None, report: Callable[[int], None]) -> torch.Tensor:
        """Read the prompt `ids`; returns the scores [vocab] for the token behind it. `report` gets the tokens read so far.

        Raises Stopped when `cancel` turns true, at the latest after one layer of one chunk.
        """
        state = torch.empty(0)
        for at in range(0, len(ids), CHUNK):
            state = self._forward(ids[at : at + CHUNK], cancel)
            report(min(len(ids), at + CHUNK))
        return self._scores(state[-1:])[0]

    def decode(self, token: int) -> torch.Tensor:
        """One step behind the cache: scores [vocab] for the token after `token`, valid until the next call."""
        self._token.fill_(token)
        state = self.network.forward(self._token, self.cache, self.scratch)
        return self.network.logits(state, self.scratch)[0]

    def logprobs(self, ids: Sequence[int], cancel: CancelCheck | None = None) -> list[float]:
        """log p(ids[i+1] | ids[..i]) for every i, of the raw model."""
        self.begin()
        values: list[float] = []
        for at in range(0, len(ids), CHUNK):
            state = self._forward(ids[at : at + CHUNK], cancel).clone()
            following = ids[at + 1 : at + 1 + len(state)]
            for row in range(0, len(following), SCORED_ROWS):
                wanted = torch.tensor(following[row : row + SCORED_ROWS], device=self._device)
                scores = self._scores(state[row : row + len(wanted)]).float()
                picked = scores.gather(1, wanted[:, None])[:, 0] - scores.logsumexp(-1)
                values.extend(picked.tolist())
        return values

    def states(self, ids: Sequence[int], after: Sequence[int], cancel: CancelCheck | None) -> torch.Tensor:
        """Residual states after the block counts `after`, side by side: [tokens, hidden * len(after)] fp32 on the CPU."""
        self.begin()
        rows: list[torch.Tensor] = []
        for at in range(0, len(ids), CHUNK):
            kept: dict[int, torch.Tensor] = {}
            self._forward(ids[at : at + CHUNK], cancel, _keeper(after, kept))
            rows.append(torch.cat([kept[index] for index in after], dim=1))
        return torch.cat(rows)

    def _scores(self, state: torch.Tensor) -> torch.Tensor:
        if self.gate is not None:
            self.gate.wait(EMBEDDING)  # a tied head
        return self.network.logits(state, self.scratch)

    def _forward(self, ids: Sequence[int], cancel: CancelCheck | None, seen: BetweenLayers | None = None) -> torch.Tensor:
        """One chunk, each block after its weights have come and unless `cancel` is true; `seen` gets the state before each."""

        def between(index: int, state: torch.Tensor) -> None:
            if self.gate is not None:
                self.gate.wait(index + 1)
            if cancel is not None and cancel():
                raise Stopped
            if seen is not None:
                seen(index, state)

        if self.gate is not None:
            self.gate.fetch_rows(ids)
        chunk = torch.tensor(ids, dtype=torch.int64, device=self._device)
        return self.network.forward(chunk, self.cache, self.scratch, between)


def _keeper(after: Sequence[int], kept: dict[int, torch.Tensor]) -> BetweenLayers:
    def keep(index: int, state: torch.Tensor) -> None:
        if index in after:
            kept[index] = state.float().to("cpu", copy=True)

    return keep
