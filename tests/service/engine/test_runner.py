"""Batches, chunks, forks and verify passes compute what single tokens compute, in the bytes that were stated before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from onedesk.service.cache.paged import SequenceKV
from onedesk.service.engine import runner as runner_module
from onedesk.service.engine import session as session_module
from onedesk.service.engine.buffers import MAX_BATCH
from onedesk.service.engine.runner import Runner
from onedesk.service.engine.session import Opening, Session, draw_blueprint, open_session
from onedesk.service.kernels.choose import workspace_bytes
from onedesk.service.kernels.forward_batch import BLOCK
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.lease import carved_bytes
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from tiny_qwen3 import write_tiny_qwen3

CPU = torch.device("cpu")
CONTEXT = 160
LENGTHS = (1, 31, 32, 33, 70, 5, 64, 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny", layers=3, dtype="bfloat16", tokenizer=False)


def start(folder: Path, cache: Path, context: int, sequences: int, pool: Pool | None = None) -> Session:
    pool = pool or Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))
    blueprint = replace(draw_blueprint(open_checkpoint(folder), CPU, context), sequences=sequences)
    session = open_session("test", blueprint, Opening(pool, cache))
    session.settle()
    return session


@pytest.fixture(scope="module", params=["reference", "fast"])
def session(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setattr(session_module, "choose_kernels", lambda *_: ReferenceKernels())
        opened = start(folder, tmp_path_factory.mktemp("kernels"), CONTEXT, MAX_BATCH)
    yield opened
    opened.release()


@pytest.fixture
def runner(session: Session) -> Iterator[Runner]:
    """The session's runner; every block must be returned afterwards."""
    runner = session.runner
    yield runner
    runner.kv.check()
    assert runner.kv.available == runner.kv.blocks


def prompt(length: int) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def read(runner: Runner, sequence: SequenceKV, ids: list[int]) -> torch.Tensor:
    return runner.prefill(sequence, ids, None, lambda _: None).clone()


def alone(runner: Runner, ids: list[int], steps: int) -> tuple[list[int], torch.Tensor]:
    """Greedy ids, and the scores that each was chosen by."""
    chosen, rows = [], []
    with runner.kv.open(CONTEXT) as sequence:
        scores = read(runner, sequence, ids)
        for _ in range(steps):
            rows.append(scores.clone())
            chosen.append(int(scores.argmax()))
            scores = runner.decode([sequence], [chosen[-1]])[0]
    return chosen, torch.stack(rows)


def test_a_batch_of_mixed_lengths_writes_what_each_writes_alone(runner: Runner) -> None:
    """Sequences leave one after another, so that batches of every size are decoded and rows change their places."""
    steps = [3 + 5 * i for i in range(len(LENGTHS))]
    wanted = [alone(runner, prompt(length), count) for length, count in zip(LENGTHS, steps, strict=True)]
    sequences = [runner.kv.open(CONTEXT) for _ in LENGTHS]
    scores = [read(runner, sequence, prompt(length)) for sequence, length in zip(sequences, LENGTHS, strict=True)]
    chosen: list[list[int]] = [[] for _ in LENGTHS]
    running = list(range(len(LENGTHS)))
    while running:
        for i in running:
            torch.testing.assert_close(scores[i], wanted[i][1][len(chosen[i])], rtol=1e-4, atol=1e-4)
            chosen[i].append(int(scores[i].argmax()))
        running = [i for i in running if len(chosen[i]) < steps[i]]
        if running:
            rows = runner.decode([sequences[i] for i in running], [chosen[i][-1] for i in running])
            scores = [rows[running.index(i)].clone() if i in running else scores[i] for i in range(len(LENGTHS))]
    assert chosen == [ids for ids, _ in wanted]
    for sequence in sequences:
        sequence.close()


@pytest.mark.parametrize("size", [1, 3, 16])
def test_chunks_of_any_size_read_the_same(runner: Runner, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(70)
    with runner.kv.open(CONTEXT) as whole, runner.kv.open(CONTEXT) as chunked:
        wanted = read(runner, whole, ids)
        monkeypatch.setattr(runner_module, "CHUNK", size)
        torch.testing.assert_close(read(runner, chunked, ids), wanted, rtol=1e-4, atol=1e-4)
        rows = runner.decode([whole, chunked], [7, 7])
        torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)


def test_forks_share_the_past_and_go_their_own_ways(runner: Runner) -> None:
    ids = prompt(BLOCK + 9)
    ways = [[11, 12, 13], [21, 22, 23], [31, 32, 33]]
    wanted = []
    for way in ways:
        with runner.kv.open(CONTEXT) as sequence:
            wanted.append(read(runner, sequence, ids + way))
    parent = runner.kv.open(CONTEXT)
    read(runner, parent, ids)
    family = [parent, parent.fork(), parent.fork()]
    assert {tuple(sequence.table) for sequence in family} == {tuple(parent.table)}
    rows = torch.empty(0)
    for step in range(3):
        rows = runner.decode(family, [way[step] for way in ways])
    for row, scores in zip(rows, wanted, strict=True):
        torch.testing.assert_close(row, scores, rtol=1e-4, atol=1e-4)
    assert [len({sequence.table[block] for sequence in family}) for block in range(2)] == [1, 3]
    for sequence in family:
        sequence.close()


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("length", [4, BLOCK - 3])
def test_a_few_ids_at_once_score_as_one_after_another(runner: Runner, count: int, length: int) -> None:
    draft = prompt(200)[:count]
    with runner.kv.open(CONTEXT) as stepped, runner.kv.open(CONTEXT) as extended:
        for sequence in (stepped, extended):
            read(runner, sequence, prompt(length))
        wanted = torch.stack([runner.decode([stepped], [token])[0].clone() for token in draft])
        torch.testing.assert_close(runner.check(extended, draft), wanted, rtol=1e-4, atol=1e-4)
        extended.advance(len(draft))
        # A draft that was half right: the rejected tokens are dropped, and both continue together.
        for sequence in (stepped, extended):
            sequence.truncate(length + count // 2)
        rows = runner.decode([extended, stepped], [9, 9])
        torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)


def test_rows_beyond_the_sequences_change_nothing(runner: Runner) -> None:
    """A graph of four rows computes three sequences."""
    with runner.kv.open(CONTEXT) as one, runner.kv.open(CONTEXT) as two, runner.kv.open(CONTEXT) as three:
        sequences = [one, two, three]
        for sequence, length in zip(sequences, (5, 40, 31), strict=True):
            read(runner, sequence, prompt(length))
        wanted = runner.buffers.step(3, runner.buffers.fill(sequences, [7, 8, 9])).clone()
        longest = runner.buffers.fill(sequences, [7, 8, 9], batch=4)
        assert longest == 41
        padded = runner.buffers.step(4, CONTEXT).clone()
        torch.testing.assert_close(padded[:3], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(padded[3], wanted[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(runner.decode(sequences, [7, 8, 9]), wanted, rtol=1e-4, atol=1e-4)


def test_a_step_writes_where_the_step_before_wrote(runner: Runner) -> None:
    """What a captured graph relies on: the same buffers for the same batch, filled in place."""
    with runner.kv.open(CONTEXT) as one, runner.kv.open(CONTEXT) as two:
        places = set()
        for token in range(3, 3 + BLOCK + 2):
            rows = runner.decode([one, two], [token, token + 1])
            places.add((rows.data_ptr(), runner.buffers.ids.data_ptr(), runner.buffers.positions.data_ptr()))
        assert len(places) == 1
        assert runner.buffers.positions[:2].tolist() == [BLOCK + 1] * 2
        assert runner.buffers.tables[0, :2].tolist() == one.table


@pytest.mark.parametrize(("context", "sequences"), [(2, 1), (33, 1), (64, 3), (512, 2)])
def test_the_stated_need_is_what_is_carved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int, sequences: int
) -> None:
    monkeypatch.setattr(session_module, "choose_kernels", lambda *_: ReferenceKernels())
    pool = Pool("cpu", MemorySettings(floor=0, debug=True), lambda: read_truth("cpu"))
    session = start(folder, tmp_path, context, sequences, pool)
    widths = draw_blueprint(open_checkpoint(folder), CPU, context).widths
    asked = (widths.shape, context, torch.float32, widths.columns)
    unused = workspace_bytes(CPU, *asked) - sum(
        carved_bytes(*buffer) for buffer in ReferenceKernels.workspace_spec(*asked)
    )
    weights, kv, scratch = session.leases
    assert (weights.free < 256, kv.free < 256, 0 <= scratch.free - unused < 256) == (True, True, True)
    with session.runner.kv.open(context) as sequence:
        scores = read(session.runner, sequence, [5])
        before = pool.counters()
        for _ in range(context - 1):
            scores = session.runner.decode([sequence], [int(scores.argmax())])[0]
        assert pool.counters() == before, "decode asked the pool for something"
        assert torch.isfinite(scores).all()
    pool.verify()
    session.release()
