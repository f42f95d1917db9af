"""The random walk over the arena, at a length for every day, and its command."""

from __future__ import annotations

import json

import pytest
from onedesk.lab import fragmentation
from onedesk.lab.fragmentation import LIMIT, main, random_walk, steady_loop


def test_a_random_walk_keeps_the_invariants():
    walk = random_walk(200_000, seed=7, check_every=5_000)
    assert walk.operations == 200_000
    assert walk.allocations > 50_000
    assert walk.worst_fragmentation <= LIMIT
    assert walk.fragmentation <= walk.worst_fragmentation
    assert 0 < walk.used <= walk.held


def test_the_walk_is_the_same_for_one_seed():
    first, second = random_walk(5_000, seed=3), random_walk(5_000, seed=3)
    assert (first.held, first.used, first.fragmentation, first.blocks) == (
        second.held,
        second.used,
        second.fragmentation,
        second.blocks,
    )


def test_a_steady_loop_gives_everything_back(monkeypatch: pytest.MonkeyPatch):
    made: list[fragmentation.Arena] = []

    class Seen(fragmentation.Arena):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(fragmentation, "Arena", Seen)
    monkeypatch.setattr(fragmentation, "ROUNDS", 3)
    assert 0 <= steady_loop() < 1
    (arena,) = made
    arena.check()
    assert (arena.blocks, arena.allocations) == (3, 3 + 3 * fragmentation.REPEATS * len(fragmentation.STEP))


def test_the_command_prints_one_document(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fragmentation, "ROUNDS", 3)
    assert main(["--operations", "20000", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["walk"]["operations"] == 20_000
    assert "20,000 operations" in printed.err
    monkeypatch.setattr(fragmentation, "LIMIT", -1.0)
    assert main(["--operations", "10"]) == 1
    with pytest.raises(SystemExit) as ended:
        main(["--operations", "0"])
    assert ended.value.code == 2
