"""A real memory limit: a control group created for a measurement and removed after it (Linux, root)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

from ..service.errors import FileError

MOUNT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
REMOVE_SECONDS = 5.0
SWAP_ROOM = 1 << 20


class MemoryGroup:
    """A group with a memory limit, under the memory controller of cgroup v1 or v2. A context manager that removes the
    group.

    Raises FileError with the reason if no group can be created.
    """

    def __init__(self, name: str, limit: int) -> None:
        """`limit` in bytes; almost no swap on top of it."""
        v1 = MOUNT / "memory"
        self._v1 = (v1 / "memory.limit_in_bytes").exists()
        self.folder = (_own_folder(v1) if self._v1 else _v2_parent()) / name
        try:
            self.folder.mkdir()
        except OSError as error:
            raise FileError(
                f"cannot make a memory control group: {error.strerror}; run this as root, on a cgroup that may be"
                " written"
            ) from error
        self.limit = limit
        try:
            self._write("memory.limit_in_bytes" if self._v1 else "memory.max", str(limit))
            swap = self.folder / ("memory.memsw.limit_in_bytes" if self._v1 else "memory.swap.max")
            if swap.exists():
                # v1 checks the sum of memory and swap first and does not count those hits: set it a little higher, so
                # that memory.failcnt counts
                swap.write_text(str(limit + SWAP_ROOM) if self._v1 else "0", encoding="ascii")
        except OSError as error:
            self.close()
            raise FileError(f"cannot set the group's memory limit to {limit} bytes: {error.strerror}") from error

    def join(self) -> None:
        """Move the calling process into the group; its later allocations count."""
        self._write("cgroup.procs", str(os.getpid()))

    @property
    def usage(self) -> int:
        """Bytes charged to the group now."""
        return int(self._read("memory.usage_in_bytes" if self._v1 else "memory.current"))

    @property
    def droppable(self) -> int:
        """Bytes of the usage that are inactive file pages."""
        return self._counter("memory.stat", "total_inactive_file" if self._v1 else "inactive_file")

    @property
    def kills(self) -> int:
        """How many of the group's processes the kernel has killed for memory."""
        return self._counter("memory.oom_control" if self._v1 else "memory.events", "oom_kill")

    @property
    def hits(self) -> int:
        """How often the limit was reached; the kernel then drops file pages or kills."""
        return int(self._read("memory.failcnt")) if self._v1 else self._counter("memory.events", "max")

    def close(self) -> None:
        """Remove the group; its processes must have ended."""
        end = time.monotonic() + REMOVE_SECONDS
        while True:
            try:
                self.folder.rmdir()
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise FileError(
                        f"the control group {self.folder.name} cannot be removed: {error.strerror}"
                    ) from error
                time.sleep(0.02)

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="ascii")

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="ascii")

    def _counter(self, name: str, key: str) -> int:
        pairs = (line.split() for line in self._read(name).splitlines())
        return next((int(value) for found, value in pairs if found == key), 0)


def _own_folder(mount: Path) -> Path:
    """The v1 folder of this process's memory group; the mount itself in a container without its own names."""
    for line in SELF.read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            named = mount / path.lstrip("/")
            return named if named.is_dir() else mount
    return mount


def _v2_parent() -> Path:
    """The v2 mount, with the memory controller enabled for its children."""
    try:
        if "memory" not in (MOUNT / "cgroup.controllers").read_text(encoding="ascii").split():
            raise FileError(f"{MOUNT} has no memory controller; this needs one, of cgroup v1 or v2")
        (MOUNT / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
    except OSError as error:
        raise FileError(
            f"the memory controller of {MOUNT} cannot be used: {error.strerror}; run this as root"
        ) from error
    return MOUNT
