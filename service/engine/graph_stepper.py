"""Decode steps on a CUDA device as graphs: network and token choice in one launch, one step ahead of the host where
possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from ..cache.paged import SequenceKV
from ..memory.lease import Lease
from .buffers import MAX_BATCH
from .cuda_graphs import Graphs
from .device_sampler import PLAN_ROWS, DeviceSampler, write_plan
from .runner import Runner
from .sampler import Sampler
from .stepper import Checked, Feed, Picked, pick, picked_by_device

# A step with another number of rows is padded to the next of these.
BATCHES = (1, 2, 4, 8)
# Where sequences have recurrent states no row can repeat another: both would write the same state.
EVERY_BATCH = tuple(range(1, MAX_BATCH + 1))
# Compute capability that has programmatic dependent launch.
EARLY_FROM = (9, 0)


class _Slot:
    """Host memory of one step in flight: its plan, its chosen tokens, and an event when it is done. Pinned, so that no
    copy waits."""

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
    """See Stepper. The first step of a batch size runs without a graph, and then captures one for the next steps.

    No step runs ahead where sequences have recurrent states: if the host decides otherwise (another token is forced), a
    state cannot be cut back by one token as keys and values can. Nor where the network has tables in files: the host
    needs the tokens to read their rows. Draft tokens are only verified where no step runs ahead: after a step in flight
    the tokens to draft from are not known yet.

    All buffers are reserved before.
    """

    stage: Literal["decode", "sample"] = "decode"

    def __init__(self, runner: Runner, sampler: DeviceSampler, graphs: Graphs) -> None:
        self._runner: Runner | None = runner
        self._sampler = sampler
        recurrent = runner.kv.states is not None
        self._early = bool(runner.network.early)
        self.ahead = 0 if recurrent or self._early else 1
        self.checks = self.ahead == 0
        self._batches = EVERY_BATCH if recurrent else BATCHES
        self._slots = deque(_Slot() for _ in range(self.ahead + 2))
        self._in_flight: deque[_Step] = deque()
        self._graphs = graphs
        self._plans = {
            batch: sampler.plan.view(-1)[: PLAN_ROWS * batch].view(PLAN_ROWS, batch) for batch in self._batches
        }

    @property
    def captured(self) -> int:
        return self._graphs.captured

    def runs_ahead(self, sampler: Sampler, /) -> bool:
        return self.ahead > 0 and sampler.plain

    def launch(self, feeds: Sequence[Feed], /) -> None:
        runner, batch = self._runner, next(size for size in self._batches if size >= len(feeds))
        if runner is None or len(self._in_flight) > self.ahead:
            raise ValueError("too many steps are in flight, or the stepper was closed")
        if not self._in_flight and any(feed.token is None for feed in feeds):
            raise ValueError("a row without a token: nothing was launched before it")
        slot = self._slots.popleft()
        positions = runner.buffers.reserve([feed.kv for feed in feeds], batch)
        draws = self._send_plan(slot, batch, feeds, positions)
        if self._early:
            self._sampler.feed(self._plans[batch], runner.buffers.ids, runner.buffers.positions)
            tokens = [feed.token for feed in feeds if feed.token is not None]
            runner.buffers.prepare(batch, tokens if len(tokens) == batch else ())
        self._graphs.run((batch, draws), partial(self._step, runner, batch, draws))
        self._fetch_chosen(slot, batch)
        for feed in feeds:
            feed.kv.advance(1)
            feed.kv.keep_checkpoint(written=True)
        if len(feeds) == 1 and feeds[0].token is not None:
            runner.note_computed(feeds[0].kv, [feeds[0].token])
        self._in_flight.append(_Step(feeds, slot, runner.scratch.logits(batch)))

    def collect(self) -> list[Picked]:
        step = self._in_flight.popleft()
        self._slots.append(step.slot)
        step.slot.done.synchronize()
        tokens = step.slot.chosen.tolist()
        return [self._picked(feed, tokens[row], step.scores[row]) for row, feed in enumerate(step.feeds)]

    def check(self, sequence: SequenceKV, sampler: Sampler, ids: Sequence[int], known: int, /) -> Checked:
        runner, count = self._runner, len(ids)
        if runner is None or self._in_flight or not self.checks:
            raise ValueError("steps are in flight, or the stepper checks nothing")
        slot, drawn = self._slots[0], range(1 - known, count + 1 - known)
        feeds = [
            Feed(sequence, sampler, token, -1, sampler.drawn + max(0, index), wanted=index >= 0)
            for token, index in zip(ids, drawn, strict=True)
        ]
        draws = self._send_plan(slot, count, feeds, range(sequence.length, sequence.length + count))
        runner.buffers.fill_verify(sequence, ids)
        runner.buffers.prepare(count, ids, verify=True)
        self._graphs.run(("check", count, draws), partial(self._verify, runner, count, draws))
        self._fetch_chosen(slot, count)
        runner.note_computed(sequence, ids, ahead=True)
        slot.done.synchronize()
        first = known - 1
        return Checked(sampler, runner.scratch.logits(count)[first:], slot.chosen.tolist()[first:count], sampler.drawn)

    def close(self) -> None:
        self._runner = None
        self._in_flight.clear()
        self._graphs.close()
        self._plans.clear()
        del self._sampler

    def _send_plan(self, slot: _Slot, batch: int, feeds: Sequence[Feed], positions: Sequence[int]) -> bool:
        """Copy the plan of a pass to the device; returns whether any of its rows draws."""
        draws = write_plan(slot.arrays[batch], feeds, positions)
        self._plans[batch].copy_(slot.plans[batch], non_blocking=True)
        return draws

    def _fetch_chosen(self, slot: _Slot, batch: int) -> None:
        """Copy the tokens that a pass chooses to the host, when it is done."""
        slot.chosen[:batch].copy_(self._sampler.chosen[:batch], non_blocking=True)
        slot.done.record()

    def _picked(self, feed: Feed, token: int, scores: torch.Tensor) -> Picked:
        if not feed.wanted:
            return Picked(-1)
        return picked_by_device(token) if feed.sampler.plain else pick(feed.sampler, scores)

    def _step(self, runner: Runner, batch: int, draws: bool) -> None:
        plan = self._plans[batch]
        if not self._early:
            self._sampler.feed(plan, runner.buffers.ids, runner.buffers.positions)
        self._sampler.choose(runner.buffers.step(batch, runner.kv.context, prepared=True), plan, draws=draws)

    def _verify(self, runner: Runner, count: int, draws: bool) -> None:
        self._sampler.choose(
            runner.buffers.step(count, runner.kv.context, prepared=True, verify=True), self._plans[count], draws=draws
        )


def graph_stepper(runner: Runner, lease: Lease, vocab: int, graphs: Graphs) -> GraphStepper | None:
    """Graphs for the network of `runner`, where its kernels can be captured; buffers come from `lease`."""
    network = runner.network
    if not network.captured:
        return None
    half = "bf16" if network.kernels.activation == torch.bfloat16 else "fp16"
    early = torch.cuda.get_device_capability() >= EARLY_FROM
    return GraphStepper(runner, DeviceSampler(lease, MAX_BATCH, vocab, half, early=early), graphs)


def graph_stepper_bytes(device: torch.device, vocab: int) -> int:
    """Bytes that `graph_stepper` may carve, alignment included."""
    return DeviceSampler.nbytes(MAX_BATCH, vocab) if device.type == "cuda" else 0
