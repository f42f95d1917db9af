"""What the processes of this user have promised themselves of one memory, so that two of them never size themselves by
the same bytes.

Each process that makes a pool writes a claim, a file of its own in a folder that only its user can enter. Sizing
happens under one lock. A claim counts as long as its process runs: by its id and its start time, since ids are used
again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from .budget import Budget
from .truth import Truth, device_index

log = logging.getLogger(__name__)

HOST = "host"
_LOCK = "lock"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Claim:
    """What one process may hold of one memory, in bytes. `started`: seconds since the epoch, of the process, by psutil.

    `before`: its own memory when it made the pool; `leased`: what its pool has leased, None where nobody keeps count.
    """

    pid: int
    started: float
    memory: str
    limit: int
    before: int
    leased: int | None = None

    def running(self) -> bool:
        """Whether the process that wrote it still runs."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def outstanding(self) -> int:
        """Bytes of the limit that it has not taken yet: those it has taken are missing from what the machine has
        available already.
        """
        if self.memory != HOST:  # no device says how much one process has taken; what it has leased there, it has
            return max(0, self.limit - (self.leased or 0))
        grown = max(0, own_bytes(self.pid) - self.before)
        held = grown if self.leased is None else min(grown, self.leased)
        return max(0, self.limit - held)


class Claims:
    """The claim of this process on the memory of `device`, and those of the others. Every method may be called from
    any thread.
    """

    def __init__(self, device: str, folder: Path | None) -> None:
        """`folder`: see claims_folder; with None this process sizes itself alone."""
        self._device = device
        self._folder = folder
        self._claim: Claim | None = None

    def size(self, truth: Truth, make: Callable[[int], Budget]) -> Budget:
        """Make a budget by `make`, which is given the bytes that others were promised and have not taken, and claim
        its limit.
        """
        if self._folder is None:
            return make(0)
        process, memory = psutil.Process(), memory_of(self._device, truth)
        with _locked(self._folder):
            budget = make(sum(claim.outstanding() for claim in self.others(memory)))
            self._claim = Claim(process.pid, process.create_time(), memory, budget.limit, own_bytes(process.pid))
            self._write(self._claim)
        weakref.finalize(self, _withdraw, self._file, process.pid)
        return budget

    def others(self, memory: str) -> list[Claim]:
        """Claims of running processes on `memory`, but for ours. Files of processes that have ended, or that hold no
        claim, are removed.
        """
        found = []
        for file in self._folder.glob("*.json") if self._folder else ():
            claim = _read(file)
            if claim is None or not claim.running():
                file.unlink(missing_ok=True)
            elif claim.memory == memory and file != self._file:
                found.append(claim)
        return sorted(found, key=lambda claim: claim.pid)

    def update(self, leased: int) -> None:
        """Tell what the pool has leased by now; changes below 1 MiB are not worth a write."""
        claim = self._claim
        if (claim is not None and abs(leased - (claim.leased or 0)) >= _MIB) or (
            claim is not None and claim.leased is None
        ):
            self._claim = replace(claim, leased=leased)
            self._write(self._claim)

    def withdraw(self) -> None:
        """Give the claim back; it also goes with this object and with the process."""
        if self._claim is not None:
            _withdraw(self._file, self._claim.pid)
            self._claim = None

    @property
    def _file(self) -> Path:
        return (self._folder or Path()) / f"{os.getpid()}-{re.sub('[^a-z0-9]', '-', self._device)}.json"

    def _write(self, claim: Claim) -> None:
        part = self._file.with_suffix(".part")
        try:
            part.write_text(json.dumps(asdict(claim)), encoding="utf-8")
            part.replace(self._file)
        except OSError as error:
            log.warning(
                "other processes of this user cannot see what this one may hold (%s): they may plan with the same"
                " memory",
                error,
            )


def _read(file: Path) -> Claim | None:
    try:
        claim = Claim(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    numbers = (claim.pid, claim.started, claim.limit, claim.before, claim.leased or 0)
    sound = all(isinstance(number, int | float) and number >= 0 for number in numbers) and isinstance(claim.memory, str)
    return claim if sound else None


def _withdraw(file: Path, pid: int) -> None:
    if os.getpid() == pid:  # a fork of this process has no claim
        file.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder for one process that sizes itself; the lock goes with the process, however it ends."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def memory_of(device: str, truth: Truth) -> str:
    """Which memory a pool of `device` takes from: "host" where it is the host's, else the card by its own id."""
    if device_index(device) is None or truth.integrated:
        return HOST
    import torch

    properties = torch.cuda.get_device_properties(device)
    return f"cuda {getattr(properties, 'uuid', device_index(device))}"


def own_bytes(pid: int) -> int:
    """Bytes of host memory that a process and its children hold: anonymous and shared memory. Children with claims
    of their own too.
    """
    try:
        first = psutil.Process(pid)
        processes = [first, *first.children(recursive=True)]
    except psutil.Error:
        return 0
    return sum(_anonymous_bytes(process) for process in processes)


def _anonymous_bytes(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def claims_folder() -> Path | None:
    """The folder of this user's claims, made if need be: in the user's run-time folder, else in /tmp. None, with a
    warning, if another user could write there.
    """
    user = os.getuid()
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    for parent in (Path(named) if named.startswith("/") else None, Path("/run/user") / str(user)):
        if parent is not None and os.access(parent, os.W_OK | os.X_OK) and parent.stat().st_uid == user:
            return _private(parent / "onedesk", user)
    return _private(Path("/tmp") / f"onedesk-{user}", user)  # noqa: S108 - looked at below


def _private(folder: Path, user: int) -> Path | None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError as error:
        log.warning(
            "%s cannot be made (%s): processes of this user may plan with the same memory", folder, error.strerror
        )
        return None
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != user or state.st_mode & 0o077:
        log.warning(
            "%s is not a folder that only this user can enter: processes of this user may plan with the same memory",
            folder,
        )
        return None
    return folder


def promised_elsewhere(device: str, truth: Truth) -> int:
    """Bytes of the memory of `device` that other processes of this user were promised and have not taken."""
    folder = claims_folder()
    return sum(claim.outstanding() for claim in Claims(device, folder).others(memory_of(device, truth)))
