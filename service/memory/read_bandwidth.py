"""The machine's measured read bandwidth, kept in the cache by the benchmark for the counters of every generation."""

from __future__ import annotations

import json
import logging
import math
import platform
from pathlib import Path

import torch

log = logging.getLogger(__name__)

FILE = "read-ceiling.json"


def keep_ceiling(cache: Path, device: str, value: float) -> None:
    """Save `value` bytes per second for this machine and `device`. A cache that cannot be written only loses it."""
    keep_figure(cache, device, value)


def known_ceiling(cache: Path, device: str) -> float | None:
    """Measured bytes per second of this machine for `device`, None if not measured."""
    return known_figure(cache, device)


def keep_figure(cache: Path, device: str, value: float, name: str = "") -> None:
    """Save a figure of this machine's `device` under `name`; the unnamed one is its read bandwidth."""
    known = _read(cache) | {_key(device, name): value}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        started = cache / f".{FILE}.tmp"
        started.write_text(json.dumps(known, indent=2), encoding="utf-8")
        started.replace(cache / FILE)
    except OSError as error:
        log.debug("the read ceiling is not kept: %s", error.strerror)


def known_figure(cache: Path, device: str, name: str = "") -> float | None:
    """The figure saved under `name` for this machine's `device`, None if there is none."""
    return _read(cache).get(_key(device, name))


def _read(cache: Path) -> dict[str, float]:
    try:
        document = json.loads((cache / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {
        key: float(value)
        for key, value in document.items()
        if isinstance(value, int | float) and math.isfinite(value) and value > 0
    }


def _key(device: str, name: str) -> str:
    """A cache can move between machines, and the thread count decides what the CPU reads."""
    ending = f", {name}" if name else ""
    if device == "cuda" and torch.cuda.is_available():
        return f"cuda {torch.cuda.get_device_name()}{ending}"
    return f"cpu {platform.machine()} {_processor()} {torch.get_num_threads()} threads{ending}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))),
        platform.processor(),
    )
