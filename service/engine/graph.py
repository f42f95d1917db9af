"""Decode steps on a CUDA device as graphs: network and choice of tokens in one launch, one step ahead of the host where it can be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import ModelError
from ..memory.lease import Lease
from .buffers import MAX_BATCH
from .device_sampler import PLAN_ROWS, DeviceSampler, write_plan
from .runner import Runner
from .sampler import Sampler
from .stepper import Feed, Picked, pick

# A step with another number of rows is filled up to the next of these.
BATCHES = (1, 2, 4, 8)
# Where sequences have recurrent states a row cannot be there twice: both would write the same state.
EVERY_BATCH = tuple(range(1, MAX_BATCH + 1))
# Programmatic dependent launch is there from this compute capability on.
EARLY_FROM = (9, 0)


class _Slot:
    """Host memory of one step under way: what it is told, what it chose, and when it is done. Pinned, so that no copy waits."""

    def __init__(self) -> None:
        plan = torch.zeros(PLAN_ROWS * MAX_BATCH, dtype=torch.int32).pin_memory()
        self.plans = {batch: plan[: PLAN_ROWS * batch].view(PLAN_ROWS, batch) for batch in EVERY_BATCH}
        self.arrays = {batch: view.numpy() for batch, view in self.plans.items()}
        self.chosen = torch.zeros(MAX_BATCH, dtype=torch.int32).pin_memory()
        self.done = torch.cuda.Event()


@dataclass(slots=True)
class _Step:
    feeds: Sequence[Feed]
    slot: _Slot
    scores: torch.Tensor


class GraphStepper:
    """See Stepper. A graph is captured when a batch size is first seen, by the step after: the first step itself runs without.

    A network whose sequences have recurrent states is not stepped ahead: where the host decides otherwise (another token is forced), a
    state cannot be cut back by one token as keys and values can. Nor is one with tables in files: their rows follow from the tokens.

    All buffers are reserved before; what a graph itself takes (some MiB of the driver's) goes when the stepper is closed.
    """

    # A pass of several rows of one sequence is no graph: launching its kernels one by one takes several times as long as a step.
    checks = False
    stage: Literal["decode", "sample"] = "decode"

    def __init__(self, runner: Runner, sampler: DeviceSampler) -> None:
        self._runner: Runner | None = runner
        self._sampler = sampler
        recurrent = runner.kv.states is not None
        self._early = bool(runner.network.early)
        self.ahead = 0 if recurrent or self._early else 1
        self._batches = EVERY_BATCH if recurrent else BATCHES
        self._slots = deque(_Slot() for _ in range(self.ahead + 2))
        self._under_way: deque[_Step] = deque()
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._scores: dict[int, torch.Tensor] = {}
        self._plans = {batch: sampler.plan.view(-1)[: PLAN_ROWS * batch].view(PLAN_ROWS, batch) for batch in self._batches}

    def runs_ahead(self, sampler: Sampler, /) -> bool:
        return self.ahead > 0 and sampler.plain

    def launch(self, feeds: Sequence[Feed], /) -> None:
        runner, batch = self._runner, next(size for size in self._batches if size >= len(feeds))
        if runner is None or len(self._under_way) > self.ahead:
            raise ValueError("too many steps are under way, or the stepper was closed")
        if not self._under_way and any(feed.token is None for feed in feeds):
            raise ValueError("a row without a token: nothing was launched before it")
        slot = self._slots.popleft()
        positions = runner.buffers.place([feed.kv for feed in feeds], batch)
        draws = write_plan(slot.arrays[batch], feeds, positions)
        self._plans[batch].copy_(slot.plans[batch], non_blocking=True)
        if self._early:
            self._sampler.feed(self._plans[batch], runner.buffers.ids, runner.buffers.positions)
            tokens = [feed.token for feed in feeds if feed.token is not None]
            runner.buffers.prepare(batch, tokens if len(tokens) == batch else ())
        graph = self._graphs.get((batch, draws))
        if graph is not None:
            graph.replay()
        else:
            # It compiles what is not compiled yet, which a capture must not.
            self._scores[batch] = self._step(runner, batch, draws)
            self._graphs[batch, draws] = self._captured(runner, batch, draws)
        slot.chosen[:batch].copy_(self._sampler.chosen[:batch], non_blocking=True)
        slot.done.record()
        for feed in feeds:
            feed.kv.advance(1)
            feed.kv.keep_border(written=True)
        self._under_way.append(_Step(feeds, slot, self._scores[batch]))

    def collect(self) -> list[Picked]:
        step = self._under_way.popleft()
        self._slots.append(step.slot)
        step.slot.done.synchronize()
        tokens = step.slot.chosen.tolist()
        return [self._picked(feed, tokens[row], step.scores[row]) for row, feed in enumerate(step.feeds)]

    def close(self) -> None:
        self._runner = None
        self._under_way.clear()
        self._graphs.clear()
        self._scores.clear()
        self._plans.clear()
        del self._sampler

    def _picked(self, feed: Feed, token: int, scores: torch.Tensor) -> Picked:
        if not feed.wanted:
            return Picked(-1)
        if not feed.sampler.plain:
            return pick(feed.sampler, scores)
        if token < 0:
            raise ModelError("the model computed scores that are no numbers; its weights are damaged or do not belong to this config")
        return Picked(token)

    def _step(self, runner: Runner, batch: int, draws: bool) -> torch.Tensor:
        plan = self._plans[batch]
        if not self._early:
            self._sampler.feed(plan, runner.buffers.ids, runner.buffers.positions)
        scores = runner.buffers.step(batch, runner.kv.context, prepared=True)
        self._sampler.choose(scores, plan, draws=draws)
        return scores

    def _captured(self, runner: Runner, batch: int, draws: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Other threads (a painter's) may go on with their own work meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._step(runner, batch, draws)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return graph


def graph_stepper(runner: Runner, lease: Lease, vocab: int) -> GraphStepper | None:
    """Graphs for the network of `runner`, where its kernels can be captured; buffers come from `lease`."""
    network = runner.network
    if not network.captured:
        return None
    half = "bf16" if network.kernels.activation == torch.bfloat16 else "fp16"
    early = torch.cuda.get_device_capability() >= EARLY_FROM
    return GraphStepper(runner, DeviceSampler(lease, MAX_BATCH, vocab, half, early=early))


def graph_stepper_bytes(device: torch.device, vocab: int) -> int:
    """Bytes that `graph_stepper` may carve, alignment included."""
    return DeviceSampler.nbytes(MAX_BATCH, vocab) if device.type == "cuda" else 0
