"""The watch: rules on replayed readings, and the real thread with its real periods."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from onedesk.service.errors import FileError
from onedesk.service.memory.budget import GIB, MIB, MemorySettings
from onedesk.service.memory.lease import Released
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.thermal import Thermal
from onedesk.service.memory.truth import Truth, read_truth
from onedesk.service.memory.watch import Alarm, Gauge, MemoryWatch, Rules, rules_for

SPARK = Truth(
    total=int(121.7 * GIB),
    available=52 * GIB,
    device_free=int(2.8 * GIB),
    integrated=True,
    page_cache=49 * GIB,
    mem_free=int(2.8 * GIB),
    psi_some_avg10=0.0,
    host_available=52 * GIB,
    swap_free=0,
    cgroup_limit=None,
    rule="MemAvailable",
)


def left(gib: float, *, free: float | None = None, psi: float = 0.0) -> Truth:
    available = int(gib * GIB)
    mem_free = available if free is None else int(free * GIB)
    return replace(SPARK, available=available, host_available=available, mem_free=mem_free, psi_some_avg10=psi)


def feed(readings: list[Truth], period: float = 1.0, rules: Rules | None = None) -> list[Alarm | None]:
    gauge = Gauge(rules or rules_for(SPARK.total))
    return [gauge.feed(number * period, truth) for number, truth in enumerate(readings)]


def test_thresholds_scale_down():
    assert rules_for(int(121.7 * GIB)) == rules_for(512 * GIB) == Rules(low=6 * GIB, free_low=2 * GIB, gate=10 * GIB)
    small = rules_for(16 * GIB)
    assert small.low == pytest.approx(16 * GIB * 6 / 121.7, rel=1e-6)
    assert small.free_low < small.low < small.gate < 2 * GIB


def test_five_low_looks_in_a_row():
    alarms = feed([left(5.9), left(5.8), left(5.9), left(5.8), left(5.9), left(5.8)])
    assert [alarm is not None for alarm in alarms] == [False] * 4 + [True] * 2
    assert alarms[4] is not None
    assert "5.9 GiB available for 5 looks, under 6 GiB" in alarms[4].reason
    assert alarms[4].lacking == 10 * GIB - int(5.9 * GIB)


def test_a_short_dip_is_no_alarm():
    assert feed([left(5.9), left(5.9), left(5.9), left(5.9), left(7), left(5.9), left(5.9)]) == [None] * 7


def test_a_full_page_cache_is_no_alarm():
    """MemFree alone means nothing: a rule without the gate killed healthy loads."""
    assert feed([left(52, free=0.5)] * 10) == [None] * 10


def test_little_free_while_little_is_available_is_one():
    (alarm,) = feed([left(9.9, free=1.9)])
    assert alarm is not None
    assert "1.9 GiB free and 9.9 GiB available" in alarm.reason


def test_steep_fall_alarms_before_low_level():
    """34 to 12.7 GiB in 1.5 s was seen on a Spark."""
    alarms = feed([left(34), left(26.9), left(19.8), left(12.7)], period=0.5)
    assert [alarm is not None for alarm in alarms] == [False, False, False, True]
    assert alarms[3] is not None
    assert "falling by 14.2 GiB a second" in alarms[3].reason


def test_a_load_that_ends_in_time_is_no_alarm():
    assert feed([left(60 - 1.25 * number) for number in range(30)], period=0.25) == [None] * 30


def test_pressure_alarms_only_when_memory_is_low():
    assert feed([left(30, psi=60)]) == [None]
    (alarm,) = feed([left(9, psi=35)])
    assert alarm is not None
    assert "35 % of the time waits for memory" in alarm.reason


def test_a_discrete_gpu_is_judged_by_its_own_memory():
    truth = replace(
        left(20, free=20), integrated=False, device_free=int(0.4 * GIB), available=int(0.4 * GIB), total=24 * GIB
    )
    alarms = feed([truth] * 5, rules=rules_for(24 * GIB))
    assert alarms[4] is not None


def watch_of(readings: list[Truth], **options: object) -> tuple[MemoryWatch, list[int]]:
    shrunk: list[int] = []
    source = iter(readings)
    watch = MemoryWatch(lambda: next(source), shrunk.append, MemorySettings(), **options)  # type: ignore[arg-type]
    return watch, shrunk


def test_room_is_asked_for_once_and_then_given_a_moment(caplog: pytest.LogCaptureFixture):
    watch, shrunk = watch_of([left(9, free=1)] * 5)
    with caplog.at_level(logging.WARNING):
        for now in (0.0, 0.25, 0.5, 1.9, 2.0):
            watch.look(now)
    assert shrunk == [GIB, GIB]
    assert watch.alarms == 2
    assert watch.slow
    assert "memory is short: 1 GiB free and 9 GiB available; asking for 1 GiB" in caplog.text


def test_slow_ends_with_the_alarm():
    watch, _ = watch_of([left(9, free=1), left(20)])
    watch.look(0)
    assert watch.slow
    watch.look(1)
    assert not watch.slow


def test_heat_slows_admission_and_frees_nothing(caplog: pytest.LogCaptureFixture):
    readings = iter([Thermal(95.0, ("GPU 0: hardware thermal slowdown",)), Thermal(60.0)])
    watch, shrunk = watch_of([left(50)] * 3, thermal=lambda: next(readings))
    with caplog.at_level(logging.WARNING):
        watch.look(0)
    assert watch.slow
    assert "too hot or short of power: GPU 0: hardware thermal slowdown" in caplog.text
    watch.look(5)
    assert watch.slow
    watch.look(10)
    assert not watch.slow
    assert watch.thermal.celsius == 60.0
    assert shrunk == []


def test_watch_polls_more_often_while_loading():
    loading = threading.Event()
    settings = MemorySettings(poll_loading=0.02, poll=60)
    watch = MemoryWatch(read_truth, lambda _: None, settings, loading=loading.is_set)
    with watch:
        assert wait_for(lambda: watch.looks == 1)
        time.sleep(0.2)
        assert watch.looks == 1
        loading.set()
        assert wait_for(lambda: watch.looks >= 5)
    assert not watch.running


def test_watch_shrinks_a_real_pool(make_pool: Callable[..., Pool]):
    pool = make_pool(kept_back=0.0)
    released: list[Released] = []
    lease = pool.lease("idle", "weights", 8 * MIB)
    lease.offer(lambda: [lease.release()])
    lease.populate()
    short = threading.Event()

    def truth() -> Truth:
        return left(9, free=1) if short.is_set() and not lease.released else read_truth()

    def shrink(lacking: int) -> None:
        released.extend(pool.make_room(lacking))

    ticks: list[int] = []
    with MemoryWatch(
        truth,
        shrink,
        MemorySettings(poll=0.02, poll_loading=0.02),
        tick=lambda: ticks.append(1),
        rules=rules_for(SPARK.total),
    ):
        assert wait_for(lambda: len(ticks) > 3)
        assert released == []
        short.set()
        assert wait_for(lambda: bool(released))
    assert (released[0].owner, released[0].measured) == ("idle", 8 * MIB)


def test_unreadable_truth_is_logged_and_retried(caplog: pytest.LogCaptureFixture):
    failures = iter([FileError("meminfo cannot be read"), OSError(5, "Input/output error")])

    def truth() -> Truth:
        for error in failures:
            raise error
        return left(50)

    watch = MemoryWatch(truth, lambda _: None, MemorySettings(poll=0.02, poll_loading=0.02))
    with caplog.at_level(logging.WARNING), watch:
        assert wait_for(lambda: watch.looks >= 4)
    assert "could not look at memory: meminfo cannot be read" in caplog.text
    assert "Input/output error" in caplog.text
    assert watch.alarm is None


def test_it_stops_from_anywhere_and_twice():
    watch = MemoryWatch(read_truth, lambda _: None, MemorySettings(poll=60, poll_loading=60)).start()
    assert watch.running
    watch.stop()
    watch.stop()
    assert not watch.running
    own = MemoryWatch(read_truth, lambda _: None, MemorySettings(poll=0.02, poll_loading=0.02), tick=lambda: own.stop())
    own.start()
    assert wait_for(lambda: not own.running)


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until `condition` holds. False if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
