"""The memory limits of the process's control groups: v1 and v2, every ancestor, from injectable roots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .meminfo import read_text

# v1 writes "no limit" as the largest page-aligned signed 64-bit number. No real limit comes near 2^60 bytes.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The tightest group: limit, usage and reclaimable usage in bytes."""

    limit: int
    usage: int
    reclaimable: int
    group: str

    @property
    def headroom(self) -> int:
        """Bytes that can still be taken: limit - usage + reclaimable file pages, at least 0."""
        return max(0, self.limit - self.usage + self.reclaimable)


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    limits: tuple[str, ...]
    usage: str
    inactive: str


_V1 = _CgroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _CgroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")


def read_cgroup(proc: Path, cgroup: Path) -> CgroupMemory | None:
    """The tightest memory limit on this process, or None if no group sets one.

    Reads <proc>/self/cgroup, then the group's folder and every ancestor up to the mount point. In a container without a
    cgroup namespace of its own the named folder does not exist under the mount; the mount point itself is then the
    container's group.
    """
    text = read_text(proc / "self" / "cgroup")
    if text is None:
        return None
    found = [memory for mount, path, layout in _memberships(text, cgroup) for memory in _walk(mount, path, layout)]
    return min(found, key=lambda memory: memory.headroom, default=None)


def _memberships(text: str, cgroup: Path) -> Iterator[tuple[Path, PurePosixPath, _CgroupFiles]]:
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        path = PurePosixPath(parts[2])
        if parts[1] == "":
            yield cgroup, path, _V2
            yield cgroup / "unified", path, _V2
        elif "memory" in parts[1].split(","):
            named = cgroup / parts[1]
            yield (named if named.is_dir() else cgroup / "memory"), path, _V1


def _walk(mount: Path, path: PurePosixPath, layout: _CgroupFiles) -> Iterator[CgroupMemory]:
    names = [name for name in path.parts if name not in ("/", "..", ".")]
    for depth in range(len(names), -1, -1):
        memory = _read_group(mount.joinpath(*names[:depth]), "/" + "/".join(names[:depth]), layout)
        if memory is not None:
            yield memory


def _read_group(folder: Path, group: str, layout: _CgroupFiles) -> CgroupMemory | None:
    limits = [limit for limit in (_read_bytes(folder / name) for name in layout.limits) if limit is not None]
    usage = _read_bytes(folder / layout.usage) if limits else None
    if usage is None:
        return None
    return CgroupMemory(min(limits), usage, _read_inactive(folder, layout.inactive), group)


def _read_bytes(path: Path) -> int | None:
    text = (read_text(path) or "").strip()
    if not text.isdigit():
        return None
    value = int(text)
    return value if value < _NO_LIMIT else None


def _read_inactive(folder: Path, key: str) -> int:
    for line in (read_text(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0
