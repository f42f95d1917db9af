"""Budgets: the numbers of the design, what is refused, and what a refusal says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.errors import RequestError
from onedesk.service.memory.budget import (
    GIB,
    KIB,
    MIB,
    Budget,
    MemorySettings,
    Need,
    PoolRoom,
    explain_lease_refusal,
    explain_refusal,
    fitting_context,
    make_budget,
    show,
)
from onedesk.service.memory.truth import Truth

TRUTH = Truth(
    total=16 * GIB,
    available=10 * GIB,
    device_free=None,
    integrated=False,
    page_cache=2 * GIB,
    mem_free=8 * GIB,
    psi_some_avg10=0.0,
    host_available=10 * GIB,
    swap_free=0,
    cgroup_limit=None,
    rule="MemAvailable",
)


def test_the_designs_numbers_are_the_defaults():
    settings = MemorySettings()
    assert (settings.initial_slab, settings.limit, settings.kept_back, settings.headroom) == (
        512 * MIB,
        0.70,
        0.05,
        0.20,
    )
    assert (settings.align, settings.weight_align, settings.guard) == (64, 256, 16)
    assert (settings.poll_loading, settings.poll, settings.shortfall) == (0.25, 1.0, 0.02)
    assert settings.limit_bytes is None
    assert settings.debug is False


def test_limit_kept_back_and_floor():
    budget = make_budget(TRUTH, MemorySettings())
    assert budget.limit == int(10 * GIB * 0.7)
    assert budget.kept_back == int(budget.limit * 0.05)
    assert budget.spendable == budget.limit - budget.kept_back
    assert budget.floor == 512 * MIB


def test_the_floor_binds_when_it_is_the_tighter_one():
    assert make_budget(TRUTH, MemorySettings(floor=6 * GIB)).limit == 4 * GIB
    assert make_budget(TRUTH, MemorySettings(limit=0.10, floor=6 * GIB)).limit == GIB


def test_less_than_floor_gives_empty_budget():
    assert make_budget(replace(TRUTH, available=256 * MIB), MemorySettings()) == Budget(0, 0, 512 * MIB)


def test_what_the_pool_holds_itself_counts_as_available():
    assert make_budget(TRUTH, MemorySettings(), own=2 * GIB).limit == int(12 * GIB * 0.7)
    assert make_budget(TRUTH, MemorySettings(), own=20 * GIB).limit == int(16 * GIB * 0.7)


def test_an_absolute_limit():
    budget = make_budget(TRUTH, MemorySettings(limit_bytes=4 * GIB))
    assert budget.limit == 4 * GIB
    assert budget.kept_back == int(4 * GIB * 0.05)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit": 0}, "limit is 0%; use 10% to 95%"),
        ({"limit": 1.01}, "limit is 101%; use 10% to 95%"),
        ({"limit": 0.96}, "limit is 96%"),
        ({"limit": math.nan}, "limit is nan"),
        ({"limit": True}, "limit is True"),
        ({"limit": "70%"}, "limit is '70%'"),
        ({"limit_bytes": 0}, "limit_bytes is 0; use a whole number of bytes from 1"),
        ({"limit_bytes": -5}, "limit_bytes is -5"),
        ({"limit_bytes": 1.5}, "limit_bytes is 1.5"),
        ({"kept_back": -0.1}, "kept_back is -10%; use 0% to 50%"),
        ({"headroom": 2.0}, "headroom is 200%"),
        ({"shortfall": -1}, "shortfall is -100%"),
        ({"floor": -1}, "floor is -1; use a whole number of bytes from 0"),
        ({"initial_slab": 0}, "initial_slab is 0"),
        ({"own_slab": "big"}, "own_slab is 'big'"),
        ({"guard": 0}, "guard is 0"),
        ({"align": 48}, "align is 48 bytes; use a power of two"),
        ({"weight_align": 100}, "weight_align is 100 bytes"),
        ({"poll": 0}, "poll is 0; use 0.01 to 60 seconds"),
        ({"poll_loading": 120}, "poll_loading is 120"),
    ],
)
def test_settings_that_no_machine_can_meet_are_refused(settings: dict[str, object], words: str):
    with pytest.raises(RequestError) as caught:
        MemorySettings(**settings)  # type: ignore[arg-type]
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (MemorySettings(floor=16 * GIB), ("floor is 16 GiB", "has 16 GiB in all")),
        (MemorySettings(floor=20 * GIB), ("floor is 20 GiB", "has 16 GiB in all")),
        (MemorySettings(limit_bytes=17 * GIB), ("limit_bytes is 17 GiB", "more than the machine's 16 GiB")),
        (
            MemorySettings(limit_bytes=12 * GIB),
            ("limit_bytes is 12 GiB", "of 16 GiB", "hold 6 GiB", "floor keeps 512 MiB", "at most 9.5 GiB"),
        ),
    ],
)
def test_unmeetable_settings_are_refused_with_figures(settings: MemorySettings, words: tuple[str, ...]):
    with pytest.raises(RequestError) as caught:
        make_budget(TRUTH, settings)
    for word in words:
        assert word in str(caught.value)


@given(
    total=st.integers(GIB, 256 * GIB),
    share=st.floats(0, 1),
    limit=st.floats(0.10, 0.95),
    floor=st.integers(0, 512 * MIB),
    kept=st.floats(0, 0.5),
)
def test_a_budget_never_eats_the_floor(total: int, share: float, limit: float, floor: int, kept: float):
    available = int(total * share)
    budget = make_budget(
        replace(TRUTH, total=total, available=available), MemorySettings(limit=limit, floor=floor, kept_back=kept)
    )
    assert 0 <= budget.spendable <= budget.limit <= available
    assert budget.limit <= max(0, available - floor)
    assert budget.limit <= available * limit


def test_a_need_with_its_headroom():
    need = Need(weights=100, kv=30, scratch=7)
    assert need.total == 137
    assert need.with_headroom(0.20) == 137 + 28
    assert need.with_headroom(0) == 137


def refusal(need: Need, room: PoolRoom) -> str:
    return explain_refusal("qwen3-8b", need, MemorySettings(), Budget(7 * GIB, 358 * MIB, 512 * MIB), room)


ROOM = PoolRoom(budget=6 * GIB, machine=9 * GIB, yielding=GIB, neighbours=2 * GIB, used=3 * GIB, available=10 * GIB)


def test_a_refusal_has_every_figure():
    words = refusal(Need(weights=16 * GIB, kv=2 * GIB, scratch=512 * MIB), ROOM)
    for figure in (
        "qwen3-8b needs 22.2 GiB",
        "weights 16 GiB",
        "KV 2 GiB",
        "scratch 512 MiB",
        "20% headroom 3.7 GiB",
        "7 GiB can be had",
        "limit 7 GiB",
        "kept back 358 MiB",
        "used 3 GiB",
        "1 GiB would give way",
        "floor 512 MiB",
        "available 10 GiB",
        "neighbours would free 2 GiB",
    ):
        assert figure in words
    assert "another model of at most 5.3 GiB" in words


def test_a_refusal_names_the_context_that_fits():
    need = Need(weights=4 * GIB, kv=4 * GIB, scratch=256 * MIB, context=32768)
    words = refusal(need, ROOM)
    context = fitting_context(need, 0.20, ROOM.most)
    assert f"a context of {context} (asked: 32768)" in words
    assert context % 256 == 0
    fits = replace(need, kv=need.kv * context // need.context, context=context)
    more = replace(need, kv=need.kv * (context + 256) // need.context)
    assert fits.with_headroom(0.20) <= ROOM.most < more.with_headroom(0.20)


def test_a_refusal_names_the_weights_that_fit():
    need = Need(weights=16 * GIB, kv=GIB, scratch=0, context=8192, weights_of={"int8": 8 * GIB, "int4": 4 * GIB})
    words = refusal(need, ROOM)
    assert "What fits: int4 (4 GiB of weights)." in words
    assert "int8" not in words


@pytest.mark.parametrize(("tokens", "told"), [(63, False), (64, True)])
def test_too_short_context_is_not_offered(tokens: int, told: bool):
    need = Need(weights=GIB, kv=4096 * MIB, context=4096)
    most = -(-(GIB + tokens * MIB) * 12 // 10)
    words = refusal(need, replace(ROOM, budget=most, machine=most, yielding=0, neighbours=0))
    assert (f"a context of {tokens} " in words) == told


def test_a_refusal_on_a_full_machine():
    words = refusal(Need(weights=GIB), replace(ROOM, budget=0, yielding=0))
    assert "0 B can be had" in words
    assert "Nothing fits now" in words


def test_a_refusal_by_little_says_by_how_much():
    """In GiB with one decimal both figures read the same."""
    words = refusal(Need(weights=5 * GIB), replace(ROOM, budget=6 * GIB - 3 * MIB, yielding=0))
    assert "needs 6 GiB" in words
    assert "6 GiB can be had" in words
    assert "It lacks 3 MiB." in words


@given(
    weights=st.integers(0, 8 * GIB),
    kv=st.integers(1, 8 * GIB),
    context=st.integers(1, 300_000),
    most=st.integers(-GIB, 20 * GIB),
)
def test_the_context_named_really_fits(weights: int, kv: int, context: int, most: int):
    need = Need(weights=weights, kv=kv, context=context)
    tokens = fitting_context(need, 0.20, most)
    assert 0 <= tokens <= context
    if tokens:
        smaller = Need(weights=weights, kv=kv * tokens // context)
        assert smaller.with_headroom(0.20) <= most + 2  # two bytes of rounding


def test_a_lease_refusal_has_every_figure():
    words = explain_lease_refusal("a", "kv", 8 * GIB, Budget(7 * GIB, 358 * MIB, 512 * MIB), ROOM)
    for figure in (
        "8 GiB of kv",
        "6 GiB can be leased",
        "limit 7 GiB",
        "kept back 358 MiB",
        "used 3 GiB",
        "available 10 GiB",
    ):
        assert figure in words


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (1536, "1.5 KiB"),
        (512 * MIB, "512 MiB"),
        (int(121.7 * GIB), "121.7 GiB"),
        (-3 * MIB, "-3 MiB"),
    ],
)
def test_bytes_for_people(nbytes: int, words: str):
    assert show(nbytes) == words
