"""This machine's decode speed figures for estimates: its read bandwidth is measured once and kept in the cache."""

from __future__ import annotations

import logging
from pathlib import Path

from ..catalog.decode_speed import DecodeSpeed
from ..errors import OnedeskError
from ..kernels.cpu.compile import has_library
from ..memory.read_bandwidth import keep_ceiling, known_ceiling
from ..memory.truth import read_truth
from .ceiling import read_ceiling

log = logging.getLogger(__name__)

REPEATS = 3
MOST_MEMORY = 2 << 30  # an eighth of it is read: 256 MiB


def machine_speed(device: str, cache: Path, bandwidth: int | None = None) -> DecodeSpeed | None:
    """The figures of this machine's `device` (cpu or cuda); with `bandwidth` in bytes per second, of another machine.
    None if the bandwidth cannot be measured.

    Measuring takes 0.1 s. It is kept if the compiled reader, the fastest, was there; `onedesk bench` measures longer.
    """
    if bandwidth is not None:
        return DecodeSpeed(device, bandwidth)
    ceiling = known_ceiling(cache, device)
    if ceiling is not None:
        return DecodeSpeed(device, ceiling, cache)
    compiled = device == "cuda" or has_library(cache)
    try:
        available = min(MOST_MEMORY, read_truth(device).available)
        ceiling = read_ceiling(device, available=available, cache=cache if compiled else None, repeats=REPEATS)
    except (OnedeskError, RuntimeError) as error:  # torch has no memory for the buffer
        log.info("the read bandwidth is not measured: %s", str(error).splitlines()[0])
        return None
    if compiled:
        keep_ceiling(cache, device, ceiling)
    return DecodeSpeed(device, ceiling, cache)
