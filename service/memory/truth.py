"""The truth: what the operating system and the device each measure, and which of it may be believed on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import RequestError
from .cgroup import read_cgroup
from .meminfo import read_meminfo, read_pressure, read_psutil

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_DEVICE = re.compile(r"cpu|cuda(?::(\d{1,3}))?")


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What the device's own runtime says, in bytes. `reserved` and `allocated` are torch's caching allocator's."""

    integrated: bool
    free: int
    total: int
    reserved: int
    allocated: int


class DeviceProbe(Protocol):
    """Asks a device for its figures; tests replay other machines through it."""

    def __call__(self, device: str) -> DeviceFigures: ...


@dataclass(frozen=True, slots=True)
class Truth:
    """One reading, in bytes (`psi_some_avg10` in percent).

    `available` is what a new owner can get; `rule` says how it was found: "MemAvailable", "cgroup", "HugePages" or
    "device".
    `host_available` is MemAvailable within the cgroup limit, whatever the rule: anonymous host memory can never be more
    than that.
    """

    total: int
    available: int
    device_free: int | None
    integrated: bool
    page_cache: int
    mem_free: int
    psi_some_avg10: float | None
    host_available: int
    swap_free: int
    cgroup_limit: int | None
    rule: str


def device_index(device: str) -> int | None:
    """Return N of "cuda:N" (0 for "cuda"), or None for "cpu". Raises RequestError for anything else."""
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise RequestError(f"device is {device!r}; use cpu, cuda or cuda:N")
    return None if device == "cpu" else int(match.group(1) or 0)


def probe_torch(device: str) -> DeviceFigures:
    """Ask torch about a CUDA device. NVML is never asked: on an integrated GPU it has no memory figures."""
    import torch

    index = device_index(device) or 0
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise RequestError(
            f"device is {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices here; use cpu, or a torch"
            " for this GPU"
        )
    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    integrated = bool(getattr(properties, "is_integrated", 0))
    return DeviceFigures(
        integrated, free, total, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    )


def read_truth(
    device: str = "cpu", *, proc: Path = _PROC, cgroup: Path = _CGROUP, probe: DeviceProbe = probe_torch
) -> Truth:
    """Measure now. `device` is "cpu" or a CUDA device ("cuda", "cuda:1").

    CPU and integrated GPU (one pool): available = min(MemAvailable, cgroup headroom); if huge pages are reserved, the
    vendor's rule HugePages_Free x Hugepagesize, with no free swap. The device's own free figure counts page cache as
    used there and is only shown. Discrete GPU: device free + what torch's cache holds unused.
    Raises FileError if meminfo cannot be read, RequestError if there is no such device.
    """
    on_host = device_index(device) is None
    meminfo = read_psutil() if proc == _PROC and not _PROC.exists() else read_meminfo(proc)
    pressure = read_pressure(proc)
    group = read_cgroup(proc, cgroup)
    figures = None if on_host else probe(device)
    total = meminfo["MemTotal"]
    host = _mem_available(meminfo)
    rule = "MemAvailable"
    if group is not None and group.headroom < host:
        host, rule = group.headroom, "cgroup"
    available = host
    swap_free = meminfo.get("SwapFree", 0)
    if figures is not None and not figures.integrated:
        total, available, rule = figures.total, figures.free + max(0, figures.reserved - figures.allocated), "device"
    elif meminfo.get("HugePages_Total", 0):
        available, swap_free, rule = meminfo.get("HugePages_Free", 0) * meminfo.get("Hugepagesize", 0), 0, "HugePages"
        if group is not None and group.headroom < available:
            available, rule = group.headroom, "cgroup"
    return Truth(
        total=total,
        available=available,
        device_free=None if figures is None else figures.free,
        integrated=figures is not None and figures.integrated,
        page_cache=meminfo.get("Cached", 0) + meminfo.get("Buffers", 0) - meminfo.get("Shmem", 0),
        mem_free=meminfo.get("MemFree", 0),
        psi_some_avg10=None if pressure is None else pressure.some_avg10,
        host_available=host,
        swap_free=swap_free,
        cgroup_limit=None if group is None else group.limit,
        rule=rule,
    )


def _mem_available(meminfo: Mapping[str, int]) -> int:
    """MemAvailable; kernels before 3.14 lack it, there free plus file cache is the nearest figure."""
    fallback = (
        meminfo.get("MemFree", 0) + meminfo.get("Cached", 0) + meminfo.get("Buffers", 0) - meminfo.get("Shmem", 0)
    )
    return meminfo.get("MemAvailable", fallback)
