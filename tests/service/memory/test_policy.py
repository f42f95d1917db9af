"""Policies as data: what may be evicted, in which order, and what is due."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.errors import RequestError
from onedesk.service.memory.policy import (
    KINDS,
    PHASE,
    PINNED,
    STAY,
    Kind,
    Policy,
    due,
    eviction_order,
)


@dataclass(frozen=True)
class Holder:
    name: str
    kind: Kind = "weights"
    policy: Policy = STAY
    idle: float = 1.0
    in_use: bool = False
    cold: bool = False


def names(holders: list[Holder]) -> list[str]:
    return [holder.name for holder in holders]


def test_the_designs_order():
    holders = [
        Holder("old weights", "weights", idle=90),
        Holder("young weights", "weights", idle=10),
        Holder("idle kv", "kv", idle=50),
        Holder("state", "state", idle=60),
        Holder("young prefix", "kv", idle=1, cold=True),
        Holder("old prefix", "kv", idle=5, cold=True),
        Holder("scratch", "scratch", idle=0.1),
        Holder("busy", "weights", idle=0, in_use=True),
        Holder("pinned", "weights", policy=PINNED, idle=1000),
    ]
    order = ["scratch", "old prefix", "young prefix", "state", "idle kv", "old weights", "young weights"]
    assert names(eviction_order(holders)) == order


HOLDERS = st.builds(
    Holder,
    name=st.text(min_size=1, max_size=3),
    kind=st.sampled_from(KINDS),
    policy=st.sampled_from([STAY, PHASE, PINNED, Policy("ttl", 30)]),
    idle=st.floats(0, 1000),
    in_use=st.booleans(),
    cold=st.booleans(),
)


@given(st.lists(HOLDERS, max_size=12))
def test_no_busy_or_pinned_holder_is_ever_asked(holders: list[Holder]):
    order = eviction_order(holders)
    assert not any(holder.in_use or holder.policy is PINNED for holder in order)
    assert len(order) == sum(not holder.in_use and holder.policy is not PINNED for holder in holders)
    ranks = {"scratch": 0, "kv": 2, "state": 2, "weights": 3, "table": 3}
    keyed = [
        (1 if holder.cold and holder.kind in ("kv", "state") else ranks[holder.kind], -holder.idle) for holder in order
    ]
    assert all(first <= second for first, second in pairwise(keyed))


def test_what_is_due():
    holders = [
        Holder("stays", policy=STAY, idle=9999),
        Holder("phase", policy=PHASE, idle=1),
        Holder("busy phase", policy=PHASE, in_use=True),
        Holder("young", policy=Policy("ttl", 30), idle=29),
        Holder("run out", policy=Policy("ttl", 30), idle=30),
        Holder("at once", policy=Policy("ttl", 0), idle=0.0),
        Holder("pinned", policy=PINNED, idle=9999),
    ]
    assert names(due(holders, phase_over=False)) == ["run out", "at once"]
    assert names(due(holders, phase_over=True)) == ["run out", "phase", "at once"]


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (STAY, "stay"),
        (PHASE, "phase"),
        (PINNED, "pinned"),
        (Policy("ttl", 300), "ttl 300"),
        (Policy("ttl", 0.5), "ttl 0.5"),
    ],
)
def test_policies_are_written_for_people(policy: Policy, text: str):
    assert str(policy) == text


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("ttl", None), ("ttl", -1), ("ttl", math.nan), ("ttl", True), ("stay", 5.0), ("pinned", 0.0), ("later", None)],
)
def test_wrong_policy_values_are_refused(name: str, seconds: float | None):
    with pytest.raises(RequestError, match="memory policy"):
        Policy(name, seconds)  # type: ignore[arg-type]
