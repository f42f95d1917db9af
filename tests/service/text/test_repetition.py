from __future__ import annotations

import random

import pytest
from onedesk.service.text.repetition import LONGEST_CYCLE, WINDOW, RepetitionCheck


def by_definition(ids: list[int]) -> bool:
    window = ids[-WINDOW:]
    return len(window) == WINDOW and any(window[cycle:] == window[:-cycle] for cycle in range(1, LONGEST_CYCLE + 1))


@pytest.mark.parametrize("cycle", [1, 2, 3, 7, 63, 64])
def test_a_cycle_is_noticed_with_its_256th_token(cycle: int) -> None:
    check = RepetitionCheck()
    heard = [check.push(1000 + n) for n in range(40)]
    heard += [check.push(n % cycle) for n in range(WINDOW)]
    assert heard == [False] * (40 + WINDOW - 1) + [True]


@pytest.mark.parametrize("cycle", [65, 100, 256])
def test_a_longer_cycle_is_none(cycle: int) -> None:
    check = RepetitionCheck()
    assert not any(check.push(n % cycle) for n in range(2000))


def test_one_other_token_breaks_it() -> None:
    check = RepetitionCheck()
    ids = [n % 5 for n in range(WINDOW - 1)] + [9] + [n % 5 for n in range(WINDOW - 1)]
    assert not any(check.push(token) for token in ids)
    assert check.push((WINDOW - 1) % 5)


@pytest.mark.parametrize("seed", range(12))
def test_as_by_definition(seed: int) -> None:
    dice, ids, check = random.Random(seed), [], RepetitionCheck()
    while len(ids) < 2500:
        block = [dice.randrange(3) for _ in range(dice.choice([1, 2, 5, 30, 64, 66]))]
        ids += block * dice.choice([1, 2, 5, 12, 200 // len(block) + 3])
    heard = [check.push(token) for token in ids]
    assert heard == [by_definition(ids[: n + 1]) for n in range(len(ids))]
    assert any(heard) or seed
