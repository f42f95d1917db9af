"""Decode steps on a CUDA device as graphs: network and token choice in one launch, one step ahead of the host where
possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from ..cache.paged import SequenceKV
from ..errors import Caught, OnedeskError
from ..memory.lease import Lease
from .buffers import MAX_BATCH
from .cuda_graphs import Graphs
from .device_plan import PLAN_ROWS, FirstChoice, Needs, RowState, write_plan
from .device_sampler import MEASURED, DeviceSampler, mask_words, read_measures, write_mask
from .runner import Runner
from .sampler import Sampler, measured
from .stepper import Checked, Feed, Picked, picked_by_device

if TYPE_CHECKING:
    from .device_plan import RowChoice

# A step with another number of rows is padded to the next of these.
BATCHES = (1, 2, 4, 8)
# Where sequences have recurrent states no row can repeat another: both would write the same state.
EVERY_BATCH = tuple(range(1, MAX_BATCH + 1))
# Compute capability that has programmatic dependent launch.
EARLY_FROM = (9, 0)


class _Slot:
    """Host memory of one step in flight: its plan, masks, chosen tokens and log-probabilities, and an event when it is
    done. Pinned, so that no copy waits."""

    def __init__(self, rows: int, vocab: int) -> None:
        plan = torch.zeros(PLAN_ROWS * rows, dtype=torch.int32).pin_memory()
        self.plans = {batch: plan[: PLAN_ROWS * batch].view(PLAN_ROWS, batch) for batch in range(1, rows + 1)}
        self.arrays = {batch: view.numpy() for batch, view in self.plans.items()}
        self.masks = torch.zeros(rows, mask_words(vocab), dtype=torch.int32).pin_memory()
        self.chosen = torch.zeros(rows, dtype=torch.int32).pin_memory()
        self.measures = torch.zeros(rows, MEASURED, dtype=torch.int32).pin_memory()
        self.done = torch.cuda.Event()


@dataclass(slots=True)
class _Step:
    """`errors`: of the rows for which nothing is allowed."""

    feeds: Sequence[RowChoice]
    slot: _Slot
    scores: torch.Tensor
    errors: Mapping[int, OnedeskError] = field(default_factory=dict)


class GraphStepper:
    """See Stepper. The first step of a batch size runs without a graph, and then captures one for the next steps.

    No step runs ahead where sequences have recurrent states: if the host decides otherwise (another token is forced), a
    state cannot be cut back by one token as keys and values can. Nor where the network has tables in files: the host
    needs the tokens to read their rows. Draft tokens are only verified where no step runs ahead: after a step in flight
    the tokens to draft from are not known yet.

    Where a grammar binds a row, network and choice are two graphs: the host makes the masks while the device computes
    the scores. All buffers are reserved before.
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
        self._slots = deque(_Slot(MAX_BATCH, sampler.vocab) for _ in range(self.ahead + 2))
        self._first = _Slot(1, sampler.vocab)
        self._in_flight: deque[_Step] = deque()
        self._graphs = graphs
        self._plans = {
            batch: sampler.plan.view(-1)[: PLAN_ROWS * batch].view(PLAN_ROWS, batch) for batch in self._batches
        }

    @property
    def captured(self) -> int:
        return self._graphs.captured

    def runs_ahead(self, sampler: Sampler, /) -> bool:
        return self.ahead > 0 and sampler.allowed is None

    def launch(self, feeds: Sequence[Feed], /) -> None:
        runner, batch = self._runner, next(size for size in self._batches if size >= len(feeds))
        if runner is None or len(self._in_flight) > self.ahead:
            raise ValueError("too many steps are in flight, or the stepper was closed")
        if not self._in_flight and any(feed.token is None for feed in feeds):
            raise ValueError("a row without a token: nothing was launched before it")
        slot = self._slots.popleft()
        positions = runner.buffers.reserve([feed.kv for feed in feeds], batch)
        needs = self._send_plan(slot, batch, feeds, positions, self._sampler.slots.rows(feeds))
        if self._early:
            self._sampler.feed(self._plans[batch], runner.buffers.ids, runner.buffers.positions)
            tokens = [feed.token for feed in feeds if feed.token is not None]
            runner.buffers.prepare(batch, tokens if len(tokens) == batch else ())
        step = _Step(feeds, slot, runner.scratch.logits(batch))
        if any(feed.wanted and feed.sampler.allowed is not None for feed in feeds):
            self._graphs.run((batch, "scores"), partial(self._compute, runner, batch))
            step.errors = self._send_masks(slot, feeds)
            self._graphs.run((batch, "choice", needs), partial(self._choose, step.scores, batch, needs))
        else:
            self._graphs.run((batch, needs), partial(self._step, runner, batch, needs))
        self._fetch_chosen(slot, batch, needs)
        for feed in feeds:
            feed.kv.advance(1)
            feed.kv.keep_checkpoint(written=True)
        if len(feeds) == 1 and feeds[0].token is not None:
            runner.note_computed(feeds[0].kv, [feeds[0].token])
        self._in_flight.append(step)

    def collect(self) -> list[Picked]:
        step = self._in_flight.popleft()
        self._slots.append(step.slot)
        step.slot.done.synchronize()
        tokens = step.slot.chosen.tolist()
        return [self._picked(step, row, token) for row, token in enumerate(tokens[: len(step.feeds)])]

    def pick(self, sampler: Sampler, scores: torch.Tensor, /) -> Picked:
        slot, feeds = self._first, [FirstChoice(sampler, sampler.drawn)]
        step = _Step(feeds, slot, scores[None])
        needs = self._send_plan(slot, 1, feeds, (0,), self._sampler.slots.rows(feeds))
        step.errors = self._send_masks(slot, feeds)
        self._sampler.choose(step.scores, self._plans[1], needs, first=True)
        self._fetch_chosen(slot, 1, needs, first=True)
        slot.done.synchronize()
        return self._picked(step, 0, int(slot.chosen[0]))

    def check(self, sequence: SequenceKV, sampler: Sampler, ids: Sequence[int], known: int, /) -> Checked:
        runner, count = self._runner, len(ids)
        if runner is None or self._in_flight or not self.checks:
            raise ValueError("steps are in flight, or the stepper checks nothing")
        slot, drawn = self._slots[0], range(1 - known, count + 1 - known)
        feeds = [
            Feed(sequence, sampler, token, -1, sampler.drawn + max(0, index), wanted=index >= 0)
            for token, index in zip(ids, drawn, strict=True)
        ]
        states = self._sampler.slots.verify_rows(feeds)
        positions = range(sequence.length, sequence.length + count)
        needs = self._send_plan(slot, count, feeds, positions, states, drafted=known)
        runner.buffers.fill_verify(sequence, ids)
        runner.buffers.prepare(count, ids, verify=True)
        self._graphs.run(("check", count, needs), partial(self._verify, runner, count, needs))
        self._fetch_chosen(slot, count, needs)
        runner.note_computed(sequence, ids, ahead=True)
        slot.done.synchronize()
        first = known - 1
        return Checked(sampler, runner.scratch.logits(count)[first:], slot.chosen.tolist()[first:count], sampler.drawn)

    def close(self) -> None:
        self._runner = None
        self._in_flight.clear()
        self._graphs.close()
        self._plans.clear()
        self._sampler.close()
        del self._sampler

    def _send_plan(
        self,
        slot: _Slot,
        batch: int,
        feeds: Sequence[RowChoice],
        positions: Sequence[int],
        states: Sequence[RowState],
        *,
        drafted: int | None = None,
    ) -> Needs:
        """Copy the plan of a pass to the device; returns what its rows need."""
        needs = write_plan(slot.arrays[batch], feeds, positions, states, drafted=drafted)
        self._plans[batch].copy_(slot.plans[batch], non_blocking=True)
        return needs

    def _send_masks(self, slot: _Slot, feeds: Sequence[RowChoice]) -> Mapping[int, OnedeskError]:
        """Ask the grammars what may come next and copy the masks to the device; returns the errors of rows where
        nothing may."""
        errors, masks = dict[int, OnedeskError](), slot.masks.numpy()
        bound = [row for row, feed in enumerate(feeds) if feed.wanted and feed.sampler.allowed is not None]
        for row in bound:
            with Caught("asking the grammar for the next tokens") as caught:
                write_mask(masks[row], feeds[row].sampler.mask())
            if caught.error is not None:
                errors[row] = caught.error
        if bound:
            count = bound[-1] + 1
            self._sampler.masks[:count].copy_(slot.masks[:count], non_blocking=True)
        return errors

    def _fetch_chosen(self, slot: _Slot, batch: int, needs: Needs, *, first: bool = False) -> None:
        """Copy the tokens that a pass chooses to the host, when it is done."""
        chosen = self._sampler.first if first else self._sampler.chosen
        slot.chosen[:batch].copy_(chosen[:batch], non_blocking=True)
        if needs.measures:
            slot.measures[:batch].copy_(self._sampler.measures[:batch], non_blocking=True)
        slot.done.record()

    def _picked(self, step: _Step, row: int, token: int) -> Picked:
        feed = step.feeds[row]
        sampler, error = feed.sampler, step.errors.get(row)
        if not feed.wanted:
            return Picked(-1)
        self._sampler.slots.note_chosen(sampler, token)
        if error is not None or token < 0:
            return picked_by_device(token) if error is None else Picked(-1, error=error)
        taken = token if sampler.corrected is None else sampler.corrected(token)
        if sampler.top is None:
            return Picked(taken)
        if taken == token:
            return Picked(taken, read_measures(step.slot.measures[row].numpy(), sampler.top))
        return Picked(taken, measured(step.scores[row].float().log_softmax(0), taken, sampler.top))

    def _step(self, runner: Runner, batch: int, needs: Needs) -> None:
        self._choose(self._compute(runner, batch), batch, needs)

    def _compute(self, runner: Runner, batch: int) -> torch.Tensor:
        if not self._early:
            self._sampler.feed(self._plans[batch], runner.buffers.ids, runner.buffers.positions)
        return runner.buffers.step(batch, runner.kv.context, prepared=True)

    def _choose(self, scores: torch.Tensor, batch: int, needs: Needs) -> None:
        self._sampler.choose(scores, self._plans[batch], needs)

    def _verify(self, runner: Runner, count: int, needs: Needs) -> None:
        self._choose(runner.buffers.step(count, runner.kv.context, prepared=True, verify=True), count, needs)


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
