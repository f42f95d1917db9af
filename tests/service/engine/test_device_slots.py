"""What the device has counted of each sequence follows what the host accepted, also where that is another token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from adjusted_rows import Carver
from onedesk.service.core import Sampling
from onedesk.service.engine import device_slots
from onedesk.service.engine.device_plan import BIASED, CHAINED, MASKED, PENALIZED, RowState
from onedesk.service.engine.device_sampler import write_mask
from onedesk.service.engine.device_slots import DeviceSlots
from onedesk.service.engine.sampler import Sampler
from onedesk.service.engine.stepper import Feed
from stepping import Event

VOCAB = 100


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> DeviceSlots:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(device_slots.torch.cuda, "Event", Event)
    return DeviceSlots(Carver(), 2, VOCAB)  # type: ignore[arg-type]


def sampler(*written: int, prompt: tuple[int, ...] = (), **changes: Any) -> Sampler:
    made = Sampler(Sampling(1.0, 0, 1.0, 0.0, **({"presence_penalty": 1.0} | changes)), 3, prompt, 90)
    for token in written:
        made.accept(token)
    return made


def feed(one: Sampler, token: int | None, *, wanted: bool = True) -> Feed:
    return Feed(None, one, token, 0, one.drawn, wanted)  # type: ignore[arg-type]


def step(slots: DeviceSlots, one: Sampler, token: int | None, chosen: int = -1) -> RowState:
    """Launch a step and count what its plan names, as the kernel does; `chosen`: what the step before chose."""
    state = slots.rows([feed(one, token)])[0]
    for new in [*state.new, *([chosen] if state.flags & CHAINED else [])]:
        if new < VOCAB:
            slots.written[state.slot, new] += 1
    return state


def counted(slots: DeviceSlots, state: RowState) -> dict[int, int]:
    row = slots.written[state.slot] & 0x7FFFFFFF
    return {token: int(row[token]) for token in row.nonzero()[:, 0].tolist()}


def test_a_new_sequence_sends_its_prompt_and_its_tokens(slots: DeviceSlots):
    one = sampler(5, 5, 7, 250, prompt=(1, 2, 99), repetition_penalty=1.1)
    state = step(slots, one, 7)
    assert state.flags == PENALIZED
    assert counted(slots, state) == {5: 2, 7: 1}  # 250 is no token of this vocabulary
    assert (slots.written[state.slot] < 0).nonzero()[:, 0].tolist() == [1, 2]


def test_tokens_go_with_the_plan_and_many_of_them_as_a_whole_row(slots: DeviceSlots):
    one = sampler(5)
    step(slots, one, 5)
    one.accept(6)
    one.accept(5)
    state = step(slots, one, 5)
    assert list(state.new) == [6, 5]
    for token in range(20):
        one.accept(token)
    assert list(step(slots, one, 19).new) == []
    assert counted(slots, state) == Counter([5, 6, 5, *range(20)])


def test_a_step_ahead_counts_what_the_device_chose(slots: DeviceSlots):
    one = sampler(5)
    step(slots, one, 5)
    state = step(slots, one, None, chosen=8)
    assert state.flags == PENALIZED | CHAINED
    slots.note_chosen(one, 8)
    one.accept(8)
    step(slots, one, None, chosen=9)
    slots.note_chosen(one, 9)
    one.accept(9)
    one.accept(10)
    assert list(step(slots, one, 10).new) == [10]
    assert counted(slots, state) == {5: 1, 8: 1, 9: 1, 10: 1}


@pytest.mark.parametrize("forced", [1, 3])
def test_a_forced_token_takes_the_count_of_the_chosen_one(slots: DeviceSlots, forced: int):
    one = sampler(5)
    step(slots, one, 5)
    step(slots, one, None, chosen=8)
    slots.note_chosen(one, 8)
    for token in range(20, 20 + forced):
        one.accept(token, forced=True)
    state = step(slots, one, 20 + forced - 1)
    assert counted(slots, state) == {5: 1} | dict.fromkeys(range(20, 20 + forced), 1)


def test_a_sequence_that_lost_its_slot_gets_everything_again(slots: DeviceSlots):
    one, other, third = sampler(5, logit_bias={3: 2.0}), sampler(6), sampler(7)
    for each, token in ((one, 5), (other, 6), (third, 7), (one, 5)):
        state = step(slots, each, token)
        assert counted(slots, state) == {token: 1}
    assert state.flags == PENALIZED | BIASED
    assert slots.bias[state.slot].nonzero()[:, 0].tolist() == [3]


def test_slots_of_the_same_step_are_kept_apart(slots: DeviceSlots):
    one, other = sampler(5), sampler(6)
    step(slots, sampler(4), 4)
    first, second = slots.rows([feed(one, 5), feed(other, 6)])
    assert {first.slot, second.slot} == {0, 1}
    assert slots.rows([feed(one, 5, wanted=False)]) == [RowState()]


def test_a_verify_pass_counts_the_known_tokens_once(slots: DeviceSlots):
    one = sampler(5, 6)
    states = slots.verify_rows([feed(one, 5, wanted=False), feed(one, 6), feed(one, 9)])
    assert [state.flags for state in states] == [0, PENALIZED, PENALIZED]
    assert counted(slots, states[1]) == {5: 1, 6: 1}
    assert not states[2].new


def test_a_grammar_alone_needs_no_slot(slots: DeviceSlots):
    one = sampler(presence_penalty=0.0)
    one.allowed = lambda: np.ones(90, np.bool_)
    assert slots.rows([feed(one, 5)]) == [RowState(MASKED)]


def test_a_mask_is_one_bit_per_token():
    words = np.zeros(4, np.int32)
    write_mask(words, np.array([True, False, True] + [False] * 30 + [True]))
    assert words.tolist() == [5, 2, 0, 0]
    write_mask(words, None)
    assert words.tolist() == [-1] * 4
