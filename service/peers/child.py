"""A child process of another engine: started with fixed arguments, watched, and ended by its own process group, never
by name.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from ..errors import FileError, PeerError
from ..python_process import SAFE_FOLDER, isolated_command

_GUARDIAN = Path(__file__).with_name("guardian.py")
_START_SECONDS = 30.0  # for the guardian, a bare Python, on a busy machine
_MARGIN_SECONDS = 5.0  # after the grace period, until the guardian itself is killed
_TAIL_BYTES, _TAIL_LINES = 4096, 8
# Seconds for which a reading of the processes' memory stays valid: it takes milliseconds, and every lease asks.
_FRESH_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Order:
    """What to start: `argv` unchanged, without a shell; `environment` is everything that the child sees. `secret` is
    removed from quotations of its log.

    `grace`: seconds between SIGTERM and SIGKILL.
    """

    title: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    secret: str | None = field(default=None, repr=False)
    grace: float = 20.0


class Child:
    """A child that runs or has ended. Every method may be called from any thread."""

    def __init__(self, order: Order) -> None:
        """Start it. Raises PeerError if the program is missing or cannot be run, FileError if its log cannot be
        written.
        """
        self.title = order.title
        self._order = order
        self._lock = threading.Lock()
        self._measured = (0.0, 0)
        program = check_program(order.title, order.argv[0], order.environment.get("PATH"))
        words = isolated_command("-S", _GUARDIAN, f"{order.grace:g}", Path(program).absolute(), *order.argv[1:])
        with _open_log(order.log) as log:
            self._guardian = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(order.environment),
                # engines start other Pythons, which would import files of the working directory
                cwd=SAFE_FOLDER,
                start_new_session=True,  # Ctrl-C is for this process, which ends the child in order
            )
        self.pid = self._hear_pid()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._guardian.poll() is None

    def ending(self) -> str:
        """How it ended, with the last lines of its log. Only valid after it has ended."""
        status = self._guardian.poll()
        if status is None:
            return f"{self.title} runs"
        how = f"signal {_signal_name(status - 128)}" if status > 128 else f"status {status}"
        if status < 0:  # the guardian was killed, and the kernel killed the child with it
            how = f"signal {_signal_name(-status)}"
        return f"{self.title} ended with {how}{self.last_words()}"

    def last_words(self) -> str:
        """The last lines of its log, for the end of an error message; secrets are removed."""
        try:
            with self._order.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                raw = file.read(_TAIL_BYTES)
        except OSError:
            return ""
        lines = [line.rstrip() for line in raw.decode("utf-8", "replace").splitlines() if line.strip()][-_TAIL_LINES:]
        if not lines:
            return f"; it wrote nothing to {self._order.log.name}"
        text = "\n  ".join(lines)
        if self._order.secret:
            text = text.replace(self._order.secret, "***")
        return f"; the end of {self._order.log.name}:\n  {text}"

    def own_bytes(self) -> int:
        """Bytes of host memory that only it and its children hold: anonymous and shared memory; 0 once it has ended."""
        when, nbytes = self._measured
        if time.monotonic() - when >= _FRESH_SECONDS:
            nbytes = _group_bytes(self.pid) if self.running else 0
            self._measured = (time.monotonic(), nbytes)
        return nbytes

    def stop(self) -> None:
        """End its process group: SIGTERM, then SIGKILL; returns when it has ended. Raises PeerError if it survives
        both.
        """
        with self._lock:
            self._measured = (0.0, 0)
            if self.running:
                self._guardian.terminate()
            try:
                self._guardian.wait(self._order.grace + _MARGIN_SECONDS)
            except subprocess.TimeoutExpired:
                self._guardian.kill()  # and the kernel kills the child with it
                try:
                    self._guardian.wait(_MARGIN_SECONDS)
                except subprocess.TimeoutExpired:
                    raise PeerError(
                        f"{self.title} (process {self.pid}) does not end, not by SIGKILL either; its memory is not back"
                    ) from None
            for pipe in (self._guardian.stdin, self._guardian.stdout):
                if pipe is not None:
                    pipe.close()

    def _hear_pid(self) -> int:
        """Read the guardian's first line: the child's process id or an error."""
        heard = self._guardian.stdout
        ready = heard is not None and select.select([heard], [], [], _START_SECONDS)[0]
        said = heard.readline().decode("utf-8", "replace").strip() if heard is not None and ready else ""
        if said.isdecimal():
            return int(said)
        self._guardian.kill()
        self._guardian.wait()
        reason = said.removeprefix("!") or f"its guardian does not start{self.last_words()}"
        raise PeerError(f"{self.title}: {self._order.argv[0]} cannot be run: {reason}")


def check_program(title: str, name: str, path: str | None) -> str:
    """The path of the program. Raises PeerError if it is missing."""
    program = shutil.which(name, path=path)
    if program is None:
        raise PeerError(
            f"{title}: there is no program {name!r}; install it, or name it with command = [...] in its table"
        )
    return program


def _open_log(path: Path) -> BinaryIO:
    """A new log; the previous run's log is kept next to it. Only the owner may read them, since engines log prompts."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(path.with_name(f"{path.name}.old"))
        return open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600))
    except OSError as error:
        raise FileError(
            f"the log {path.name} cannot be written in the cache: {error.strerror}; check the rights and the room there"
        ) from error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _group_bytes(pid: int) -> int:
    try:
        first = psutil.Process(pid)
        processes = [first, *first.children(recursive=True)]
    except psutil.Error:
        return 0
    return sum(_process_bytes(process.pid) for process in processes)


def _process_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
