"""Temperature and throttle flags, if the machine has them: thermal zones of the kernel, clock event reasons of
nvidia-smi.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .meminfo import read_text

_SYS = Path("/sys")
_NVIDIA_SMI: tuple[str, ...] = ("nvidia-smi",)
# Idle, application clocks and power cap (0x4) are normal. The reasons below slow a machine down unexpectedly.
ALARMS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_NEAR = 3.0  # degrees below a zone's hot or critical trip point


@dataclass(frozen=True, slots=True)
class Thermal:
    """The hottest reading in degrees Celsius (None without a sensor), and alarms in words."""

    celsius: float | None
    alarms: tuple[str, ...] = ()


def read_zones(sys: Path = _SYS) -> Thermal:
    """Read <sys>/class/thermal: the hottest zone, and an alarm for each zone within 3 degrees of its hot or critical
    trip point.
    """
    hottest: float | None = None
    alarms: list[str] = []
    for zone in sorted((sys / "class" / "thermal").glob("thermal_zone*")):
        celsius = _degrees(zone / "temp")
        if celsius is None:
            continue
        hottest = celsius if hottest is None else max(hottest, celsius)
        trips = [
            _degrees(kind.with_name(kind.name.replace("_type", "_temp")))
            for kind in zone.glob("trip_point_*_type")
            if _is_hot(kind)
        ]
        limit = min((trip for trip in trips if trip is not None and trip > 0), default=None)
        if limit is not None and celsius >= limit - _NEAR:
            name = (read_text(zone / "type") or zone.name).strip()
            alarms.append(f"{name} at {celsius:.0f} of {limit:.0f} degrees")
    return Thermal(hottest, tuple(alarms))


def read_nvidia(command: Sequence[str] = _NVIDIA_SMI) -> Thermal:
    """Temperature and clock event reasons of every GPU from nvidia-smi. Needs no root; takes
    about 0.1 s, at most 5 s.
    """
    query = ("--query-gpu=temperature.gpu,clocks_event_reasons.active", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(
            [*command, *query], capture_output=True, text=True, errors="replace", timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return Thermal(None)
    readings = [_parse_gpu(line) for line in done.stdout.splitlines() if "," in line]
    degrees = [celsius for celsius, _ in readings if celsius is not None]
    alarms = [
        f"GPU {gpu}: {words}"
        for gpu, (_, reasons) in enumerate(readings)
        for bit, words in ALARMS.items()
        if reasons & bit
    ]
    return Thermal(max(degrees, default=None), tuple(alarms))


def merge(*readings: Thermal) -> Thermal:
    """The hottest of several readings, with all alarms."""
    degrees = [reading.celsius for reading in readings if reading.celsius is not None]
    return Thermal(max(degrees, default=None), tuple(alarm for reading in readings for alarm in reading.alarms))


def _parse_gpu(line: str) -> tuple[float | None, int]:
    """Parse "61, 0x0000000000000004". An unsupported field ("[N/A]") counts as unknown or none."""
    celsius, _, reasons = (part.strip() for part in line.partition(","))
    number = float(celsius) if celsius.replace(".", "", 1).isdigit() else None
    try:
        return number, int(reasons, 16)
    except ValueError:
        return number, 0


def _degrees(path: Path) -> float | None:
    text = (read_text(path) or "").strip()
    return int(text) / 1000 if text.lstrip("-").isdigit() else None


def _is_hot(path: Path) -> bool:
    return (read_text(path) or "").strip() in ("hot", "critical")
