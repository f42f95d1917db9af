"""Reads the kernel's counters: meminfo, PSI, vmstat, page faults. The root folder is a parameter."""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..errors import FileError

KIB = 1024
_LINE = re.compile(r"^([^:\s]+):\s+(\d+)(?:\s+(kB))?\s*$")
_VMSTAT_KEYS = (
    "pgfault",
    "pgmajfault",
    "pswpin",
    "pswpout",
    "workingset_refault_anon",
    "workingset_refault_file",
    "compact_stall",
    "oom_kill",
)


@dataclass(frozen=True, slots=True)
class Faults:
    """Page faults of this process since its start: `minor` found the page in memory, `major` had to read it."""

    major: int
    minor: int

    def since(self, earlier: Faults) -> Faults:
        """Return the faults between `earlier` and this reading."""
        return Faults(self.major - earlier.major, self.minor - earlier.minor)


@dataclass(frozen=True, slots=True)
class Pressure:
    """Memory PSI: share of the last 10 and 60 seconds in which some or all tasks waited for memory, 0 to 100."""

    some_avg10: float
    some_avg60: float
    full_avg10: float


def read_text(path: Path) -> str | None:
    """The text of a small kernel file, or None if this kernel or machine does not have it."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def read_meminfo(proc: Path) -> Mapping[str, int]:
    """Read <proc>/meminfo. Values in kB become bytes; counts (HugePages_*) stay counts.

    Raises FileError if the file is missing or has no MemTotal, because no plan can be made without it.
    """
    text = read_text(proc / "meminfo")
    if text is None:
        raise FileError("meminfo cannot be read from the given proc folder; it must hold a copy of /proc/meminfo")
    figures: dict[str, int] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            figures[match.group(1)] = int(match.group(2)) * (KIB if match.group(3) else 1)
    if "MemTotal" not in figures:
        raise FileError("meminfo has no MemTotal line; the file is not a copy of /proc/meminfo")
    return figures


def read_psutil() -> Mapping[str, int]:
    """The same figures from psutil, in bytes, for machines without /proc (Apple, where wired
    GPU memory stays unseen).
    """
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    names = {
        "MemTotal": "total",
        "MemAvailable": "available",
        "MemFree": "free",
        "Cached": "cached",
        "Buffers": "buffers",
        "Shmem": "shared",
    }
    return {name: int(getattr(memory, field, 0)) for name, field in names.items()} | {"SwapFree": int(swap.free)}


def read_pressure(proc: Path) -> Pressure | None:
    """Read <proc>/pressure/memory. None on kernels without PSI (many Jetson kernels)."""
    text = read_text(proc / "pressure" / "memory")
    if text is None:
        return None
    rows: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        name, *pairs = line.split()
        rows[name] = {key: float(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    some, full = rows.get("some"), rows.get("full", {})
    if some is None:
        return None
    return Pressure(some.get("avg10", 0.0), some.get("avg60", 0.0), full.get("avg10", 0.0))


def read_vmstat(proc: Path) -> Mapping[str, int]:
    """The counters of <proc>/vmstat about paging, swapping, compaction and kills. Absent ones are left out."""
    text = read_text(proc / "vmstat") or ""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in _VMSTAT_KEYS}


def read_faults() -> Faults:
    """The page faults of this process, all threads, from getrusage."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Faults(usage.ru_majflt, usage.ru_minflt)
