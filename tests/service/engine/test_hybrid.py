"""A network with recurrent layers through the whole engine: whatever is kept, shared, cut or stopped, the texts are the
same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kept_kernels import keep_kernels
from onedesk.service.api import OpenModel, open_model
from onedesk.service.cache.hybrid_kv import HybridKV
from onedesk.service.cache.paged import SequenceKV
from onedesk.service.core import Event, Request, Result, Sampling
from onedesk.service.engine import session as session_module
from onedesk.service.engine.buffers import MAX_BATCH
from onedesk.service.engine.runner import Runner, Stopped, first_piece, last_checkpoint
from onedesk.service.engine.session import KEPT_STATES, Opening, draw_blueprint, open_session
from onedesk.service.kernels.choose import workspace_bytes
from onedesk.service.kernels.forward_batch import BLOCK, FEW_ROWS
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.lease import carved_bytes
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from stepping import stepping
from tiny_families import write_family

CONTEXT = 512
CPU = torch.device("cpu")
MOVES = ("read", "step", "draft", "snapshot", "restore", "truncate", "fork")
LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.fixture(scope="module", params=["qwen3_5_moe", "qwen4_exp"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = LAYERS | ({"ple_layer_ids": [1]} if request.param == "qwen4_exp" else {})
    return write_family(tmp_path_factory.mktemp("models") / "tiny", request.param, seed=5, **changes)


@pytest.fixture(scope="module")
def model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    pool = Pool("cpu", MemorySettings(floor=64 << 20), lambda: read_truth("cpu"))
    kernels = tmp_path_factory.mktemp("kernels")
    keep_kernels(kernels)
    opened = open_model(folder, pool=pool, context=CONTEXT, sequences=3, kernel_cache=kernels)
    yield opened
    opened.close()


@pytest.fixture
def runner(model: OpenModel) -> Iterator[Runner]:
    model.load()
    assert model.session is not None
    runner = model.session.runner
    yield runner
    runner.kv.check()
    assert runner.kv.available == runner.kv.blocks


def ids_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(3, 490, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def ask(ids: Sequence[int], **changes: Any) -> Request:
    """Draws that never end a text."""
    sampling = Sampling(temperature=0.8, top_k=20, seed=7, logit_bias={2: -100.0})
    return replace(Request(ids=tuple(ids), sampling=sampling, max_tokens=20), **changes)


def results(events: Iterator[Event]) -> list[Result]:
    found = {(event.request, event.choice): event.result for event in events if event.result is not None}
    return [found[place] for place in sorted(found)]


def one(model: OpenModel, request: Request) -> Result:
    return results(model.generate(request))[0]


def read(runner: Runner, sequence: SequenceKV, ids: Sequence[int]) -> torch.Tensor:
    return runner.prefill(sequence, list(ids), None, lambda _: None).clone()


def test_a_conversation_continues_after_prompt_and_answer(model: OpenModel) -> None:
    prompt = ids_of(3 * BLOCK + 20, 1)
    first = one(model, ask(prompt, max_tokens=40))
    again = one(model, ask(prompt, max_tokens=40))
    alone = one(model, ask(prompt, max_tokens=40, prefix_reuse=False))
    assert (first.usage.cached, again.usage.cached, alone.usage.cached) == (0, 3 * BLOCK, 0)
    assert first.ids == again.ids == alone.ids
    longer = (*prompt, *first.ids, *ids_of(15, 2))
    reused, fresh = one(model, ask(longer)), one(model, ask(longer, prefix_reuse=False))
    assert (reused.usage.cached, fresh.usage.cached) == (4 * BLOCK, 0), "the last block boundary of the answer"
    assert reused.ids == fresh.ids
    branched = (*prompt[: 2 * BLOCK], *ids_of(40, 3))
    assert one(model, ask(branched)).ids == one(model, ask(branched, prefix_reuse=False)).ids


def test_choices_lists_and_a_later_prompt_are_what_each_is_alone(model: OpenModel) -> None:
    prompts = [ids_of(length, length) for length in (5, 290, 70, 33, 2, 41)]
    requests = [ask(ids, max_tokens=8 + 3 * place, sampling=Sampling(seed=place)) for place, ids in enumerate(prompts)]
    requests[2] = replace(requests[2], n=4)
    alone = [one(model, replace(request, n=1, prefix_reuse=False)).ids for request in requests]
    found = results(model.generate_batch(requests))
    assert [found[place].ids for place in (0, 1, 2, 6, 7, 8)] == alone
    for choice in range(1, 4):
        seed = Sampling(seed=2 + choice)
        assert found[2 + choice].ids == one(model, replace(requests[2], n=1, sampling=seed)).ids


def test_decode_asks_the_pool_for_nothing(model: OpenModel) -> None:
    """Nor for the states of draft tokens, of which a text that repeats itself has many."""
    bias = {2: -100.0} | {token: 1e4 * (1 + token % 2) for token in range(3, 7)}
    result = one(model, ask([3, 4, 5] * 20, max_tokens=200, sampling=Sampling(temperature=0.0, logit_bias=bias)))
    assert result.stages["decode"].allocations == 0


def test_beams_find_texts_whose_score_is_that_of_the_raw_model(model: OpenModel) -> None:
    prompt = ids_of(40, 9)
    found = results(model.generate(ask(prompt, beams=3, n=2, max_tokens=6, sampling=Sampling())))
    assert len({result.ids for result in found}) == 2
    for result in found:
        scores = model.score((*prompt, *result.ids))[len(prompt) - 1 :]
        assert result.logprob == pytest.approx(sum(scores), abs=1e-3)


def test_a_chunk_that_was_stopped_leaves_the_sequence_as_it_was(runner: Runner) -> None:
    stops = iter([False, False, True])
    with runner.kv.open(CONTEXT) as kv, runner.kv.open(CONTEXT) as other:
        for sequence in (kv, other):
            read(runner, sequence, ids_of(11))
        with pytest.raises(Stopped):
            runner.prefill(kv, list(ids_of(30)), lambda: next(stops), lambda _: None)
        torch.testing.assert_close(runner.decode([kv], [3]).clone(), runner.decode([other], [3]), rtol=0, atol=0)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 70)), max_size=8))
def test_snapshots_and_cuts_continue_alike(runner: Runner, moves: list[tuple[str, int]]) -> None:
    tail = list(ids_of(12, 4))
    known: list[int] = list(ids_of(40, 5))
    kept: list[tuple[Any, list[int]]] = []
    kv = runner.kv.open(CONTEXT)
    read(runner, kv, known)
    for move, amount in moves:
        if move == "read" and amount:
            read(runner, kv, new := list(ids_of(amount, amount)))
            known += new
        elif move == "step":
            runner.decode([kv], [amount])
            known.append(amount)
        elif move == "draft":
            runner.check(kv, new := list(ids_of(1 + amount % FEW_ROWS, amount)))
            for token in new[: amount // FEW_ROWS]:  # none, some, all
                kv.advance(1)
                kv.keep_checkpoint(written=True)
                known.append(token)
            if amount % 2:
                kv.truncate(len(known))
        elif move == "snapshot" and len(kept) < 3:
            kept.append((kv.snapshot(), list(known)))
        elif move == "restore" and kept:
            snapshot, known = kept[amount % len(kept)]
            kv.restore(snapshot)
            known = list(known)
        elif move == "truncate":
            known = known[: kv.truncate(len(known) * amount // 71)]
        elif move == "fork":
            fork, before = kv.fork(), kv
            before.close()
            kv, kept = fork, []
        kept = [pair for pair in kept if len(pair[1]) <= len(known)]
    with runner.kv.open(CONTEXT) as fresh:
        wanted = read(runner, fresh, known + tail)
    torch.testing.assert_close(read(runner, kv, tail), wanted, rtol=1e-3, atol=1e-3)
    runner.kv.check()
    kv.close()


def states_of(runner: Runner, kv: SequenceKV) -> list[torch.Tensor]:
    """Copies of all that a sequence leaves in constant size."""
    states = runner.kv.states
    assert states is not None
    return [part[kv.slots[0]].clone() for layer in range(len(states.shape.layers)) for part in states.of_layer(layer)]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_verify_pass_leaves_the_states_of_single_steps(
    model: OpenModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    model.load()
    session = model.session
    if not compiled:
        monkeypatch.setattr(session_module, "choose_kernels", lambda *_: ReferenceKernels())
        pool = Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))
        session = open_session("test", draw_blueprint(open_checkpoint(folder), CPU, CONTEXT), Opening(pool, tmp_path))
        session.settle()
    assert session is not None
    runner = session.runner
    for count in range(1, FEW_ROWS + 1):
        draft = ids_of(count, count)
        with runner.kv.open(64) as stepped, runner.kv.open(64) as kv:
            for sequence in (stepped, kv):
                read(runner, sequence, ids_of(29 - count % 3))  # the draft crosses a block boundary
            found = runner.check(kv, draft).clone()
            for row, token in enumerate(draft):
                wanted = runner.decode([stepped], [token])[0]
                torch.testing.assert_close(found[row], wanted, rtol=1e-4, atol=1e-4)
                kv.advance(1)
                for one, other in zip(states_of(runner, kv), states_of(runner, stepped), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            runner.kv.check()
    if not compiled:
        session.release()


def test_drafts_are_no_longer_than_there_are_states(runner: Runner) -> None:
    others = [runner.kv.open(8) for _ in range(MAX_BATCH + KEPT_STATES - 3)]
    with runner.kv.open(CONTEXT) as kv:
        read(runner, kv, ids_of(9))
        assert kv.verifiable == 2
        runner.check(kv, [5, 6])
        assert (kv.verifiable, runner.kv.openable) == (2, 0)
        kv.advance(1)
        assert kv.truncate(kv.length) == 10
        assert runner.kv.openable == 2
    for other in others:
        other.close()


def test_prefill_pieces_end_at_the_last_checkpoint() -> None:
    for start in (0, 5, BLOCK, 70):
        for tokens in (1, FEW_ROWS, FEW_ROWS + 1, BLOCK, BLOCK + FEW_ROWS + 1, 300):
            at, pieces = start, []
            while at < start + tokens:
                left = start + tokens - at
                pieces.append(first_piece(left, 256, last_checkpoint(at, left)))
                at += pieces[-1]
            assert at == start + tokens
            assert all(0 < piece <= 256 for piece in pieces)
            border = (start + tokens - FEW_ROWS - 1) // BLOCK * BLOCK
            assert border <= start or sum(pieces[:-1]) == border - start


def test_a_prompt_is_solved_in_chunks_not_token_by_token(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []
    solve = torch.linalg.solve_triangular

    def counted(system: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        solved.append(system.shape[-1])
        return solve(system, *rest, **more)

    monkeypatch.setattr(torch.linalg, "solve_triangular", counted)
    for tokens in (128, 256, 512):
        with runner.kv.open(CONTEXT) as kv:
            solved.clear()
            read(runner, kv, ids_of(tokens))
        assert sum(solved) == tokens
        assert len(solved) <= tokens // 64 + 2


@pytest.mark.parametrize(("context", "sequences"), [(2, 1), (33, 1), (300, 2)])
def test_the_stated_need_is_what_is_carved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int, sequences: int
) -> None:
    monkeypatch.setattr(session_module, "choose_kernels", lambda *_: ReferenceKernels())
    pool = Pool("cpu", MemorySettings(floor=0, debug=True), lambda: read_truth("cpu"))
    blueprint = replace(draw_blueprint(open_checkpoint(folder), CPU, context), sequences=sequences)
    session = open_session("test", blueprint, Opening(pool, tmp_path))
    session.settle()
    asked = (blueprint.widths.shape, context, torch.float32, blueprint.widths.columns)
    unused = workspace_bytes(CPU, *asked) - sum(
        carved_bytes(*buffer) for buffer in ReferenceKernels.workspace_spec(*asked)
    )
    weights, kv, scratch = session.leases
    assert (weights.free < 256, kv.free < 256, 0 <= scratch.free - unused < 256) == (True, True, True)
    pages = session.runner.kv
    assert isinstance(pages, HybridKV)
    assert pages.openable == MAX_BATCH + KEPT_STATES
    with pages.open(context) as sequence:
        scores = read(session.runner, sequence, [5])
        before = pool.counters()
        for _ in range(context - 1):
            scores = session.runner.decode([sequence], [int(scores.argmax())])[0]
        assert pool.counters() == before, "decode asked the pool for something"
        assert torch.isfinite(scores).all()
    pool.verify()
    session.release()


def test_rows_of_a_table_are_a_stage_of_their_own(model: OpenModel) -> None:
    """A pass reads each different row once: of 40 tokens that are all the same few, far fewer than 40 times the rows of
    one."""
    same = results(model.generate(ask([7] * 40, max_tokens=1, prefix_reuse=False)))[0]
    other = results(model.generate(ask(ids_of(40), max_tokens=1, prefix_reuse=False)))[0]
    if not model._blueprint.plan.tables:
        assert "table" not in same.stages
        return
    assert 0 < same.stages["table"].bytes < other.stages["table"].bytes
    assert same.stages["table"].seconds > 0


def test_graph_steps_change_no_text(model: OpenModel, monkeypatch: pytest.MonkeyPatch):
    """Rows of a table are there before a step that a graph does, no row is there twice, and none is stepped ahead of
    its token."""
    model.load()
    ids = [
        tuple(torch.randint(3, 512, (40 + 9 * row,), generator=torch.Generator().manual_seed(row)).tolist())
        for row in range(3)
    ]
    requests = [Request(ids=row, sampling=Sampling(temperature=0.0), max_tokens=12, prefix_reuse=False) for row in ids]
    expected = [
        event.result.ids for request in requests for event in model.generate(request) if event.result is not None
    ]
    with stepping(model, monkeypatch) as stepper:
        found = {
            event.request: event.result.ids for event in model.generate_batch(requests) if event.result is not None
        }
        assert stepper.ahead == 0
        assert max(stepper.steps) == 3
    assert [found[row] for row in range(3)] == expected
    assert model.session is not None
    model.session.runner.kv.check()
