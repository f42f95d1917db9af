"""Watches available memory and temperature, and evicts before the machine runs out. It never ends a process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .budget import GIB, MemorySettings, show
from .thermal import Thermal
from .truth import Truth

log = logging.getLogger(__name__)

_SPARK = int(121.7 * GIB)  # the thresholds come from this machine; smaller ones get shares
_REST = 2.0  # seconds without a new alarm: bytes need time to come back
_THERMAL_PERIOD = 10.0


@dataclass(frozen=True, slots=True)
class Rules:
    """When memory is short, in bytes of available memory (`low`, `gate`) and of free memory (`free_low`).

    `low` for `samples` readings in a row; or `free_low` while available is under `gate` (free memory alone is only a
    full page cache, and acting on it killed healthy loads); or available falling fast enough to be gone in `horizon`
    seconds; or, as the last sign, `psi` percent of time waiting for memory while under `gate`.
    """

    low: int
    free_low: int
    gate: int
    samples: int = 5
    horizon: float = 1.0
    psi: float = 20.0


def rules_for(total: int) -> Rules:
    """The thresholds of a watchdog that worked on 121.7 GiB (6, 2 and 10 GiB), scaled down for smaller machines."""
    scale = min(1.0, total / _SPARK)
    return Rules(low=int(6 * GIB * scale), free_low=int(2 * GIB * scale), gate=int(10 * GIB * scale))


@dataclass(frozen=True, slots=True)
class Alarm:
    """Memory is short: the reason, and how many bytes would end it."""

    reason: str
    lacking: int


class Gauge:
    """Applies the rules to successive readings. It has no clock and no thread."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._low_in_a_row = 0
        self._last: tuple[float, int] | None = None
        self._slope = 0.0
        self._falling = 0

    def feed(self, when: float, truth: Truth) -> Alarm | None:
        """Take a reading made at `when` (seconds, any origin) and return an alarm if memory is short."""
        rules = self.rules
        available = (
            min(truth.available, truth.host_available)
            if truth.device_free is None or truth.integrated
            else truth.available
        )
        self._follow(when, available)
        self._low_in_a_row = self._low_in_a_row + 1 if available < rules.low else 0
        lacking = max(1, rules.gate - available)
        if self._low_in_a_row >= rules.samples:
            return Alarm(
                f"{show(available)} available for {self._low_in_a_row} looks, under {show(rules.low)}", lacking
            )
        if truth.mem_free < rules.free_low and available < rules.gate:
            return Alarm(f"{show(truth.mem_free)} free and {show(available)} available", lacking)
        if self._falling >= 2 and available + self._slope * rules.horizon < 0:
            return Alarm(f"{show(available)} available, falling by {show(int(-self._slope))} a second", lacking)
        if truth.psi_some_avg10 is not None and truth.psi_some_avg10 > rules.psi and available < rules.gate:
            return Alarm(
                f"{truth.psi_some_avg10:.0f} % of the time waits for memory, {show(available)} available", lacking
            )
        return None

    def _follow(self, when: float, available: int) -> None:
        if self._last is not None and when > self._last[0]:
            self._slope = (available - self._last[1]) / (when - self._last[0])
            self._falling = self._falling + 1 if self._slope < 0 else 0
        self._last = (when, available)


class MemoryWatch:
    """A thread that polls every 250 ms during loads, otherwise every second, and calls `shrink(bytes)` when memory is
    short.

    `shrink` is Pool.make_room. `tick`, if given, is called at every poll (Pool.release_due, for ttl). `slow` is true
    while memory is short or the machine is too hot: new loads wait then (Pool.loads). Start it once; `stop` ends it
    within one poll.
    """

    def __init__(
        self,
        read_truth: Callable[[], Truth],
        shrink: Callable[[int], object],
        settings: MemorySettings,
        *,
        loading: Callable[[], bool] = lambda: False,
        thermal: Callable[[], Thermal] | None = None,
        tick: Callable[[], object] | None = None,
        rules: Rules | None = None,
    ) -> None:
        self._read_truth = read_truth
        self._shrink = shrink
        self._settings = settings
        self._loading = loading
        self._thermal_reader = thermal
        self._tick = tick
        self._rules = rules
        self._gauge: Gauge | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="onedesk-watch", daemon=True)
        self._rest_until = 0.0
        self._next_thermal = 0.0
        self.looks = 0
        self.alarms = 0
        self.alarm: Alarm | None = None
        self.thermal = Thermal(None)

    @property
    def slow(self) -> bool:
        """Whether new work should wait: memory is short or the machine throttles."""
        return self.alarm is not None or bool(self.thermal.alarms)

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> MemoryWatch:
        """Start polling."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop polling and wait for the thread. A running `shrink` finishes first."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> MemoryWatch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def look(self, now: float) -> None:
        """Poll once, at `now` in seconds of a monotonic clock. The thread calls it."""
        self.looks += 1
        truth = self._read_truth()
        if self._gauge is None:
            self._gauge = Gauge(self._rules or rules_for(min(truth.total, truth.cgroup_limit or truth.total)))
        self.alarm = self._gauge.feed(now, truth)
        if self.alarm is not None and now >= self._rest_until:
            self.alarms += 1
            log.warning("memory is short: %s; asking for %s", self.alarm.reason, show(self.alarm.lacking))
            self._shrink(self.alarm.lacking)
            self._rest_until = now + _REST
        if self._thermal_reader is not None and now >= self._next_thermal:
            self._next_thermal = now + _THERMAL_PERIOD
            self._take_thermal(self._thermal_reader())
        if self._tick is not None:
            self._tick()

    def _take_thermal(self, thermal: Thermal) -> None:
        if thermal.alarms and thermal.alarms != self.thermal.alarms:
            log.warning("the machine is too hot or short of power: %s; new loads wait", "; ".join(thermal.alarms))
        self.thermal = thermal

    def _run(self) -> None:
        last = -self._settings.poll
        while not self._stop.is_set():
            now = time.monotonic()
            if now - last >= (self._settings.poll_loading if self._loading() else self._settings.poll) - 1e-3:
                last = now
                try:
                    self.look(now)
                except BaseException as error:  # noqa: BLE001
                    # Owners are asked in here, and what they raise is not known: the thread must outlive it.
                    log.warning("the watch could not look at memory: %s", str(error) or type(error).__name__)
            # A load may start at any moment, so the short period is also the longest delay in noticing it.
            self._stop.wait(min(self._settings.poll_loading, self._settings.poll))
