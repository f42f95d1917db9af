"""The parent's side of jinja_child.py: starts it, sends requests, enforces limits, ends it.

Why a process: a chat template is a program from a downloaded file, and one expression of it ('a' * 10**10, two lists
nested forty deep compared with each other) can take minutes or all memory inside a single C call. Such a call cannot be
interrupted by a thread, tracer or operator hook, and it holds the interpreter lock: ComfyUI would stop. A process can
be killed at any point, and the kernel limits its memory. It stays open between renders: starting it takes 0.1 s, a
render 1 ms.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from ..core import CancelCheck
from ..errors import ModelError, RequestError
from ..python_process import isolated_command

log = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("jinja_child.py")
_LOOK_EVERY = 0.05  # seconds between two checks of a long render
_ALARM_AFTER = 1.0  # seconds past the limit after which the child ends itself, in case the parent is gone


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one render: seconds, bytes of text as UTF-8, and resident bytes of its process."""

    seconds: float = 5.0
    text: int = 16 * 2**20
    memory: int = 512 * 2**20
    start_seconds: float = 30.0  # for the process to start on a busy machine


Why = Literal["time", "memory", "ended", "cancelled"]


class ChildEndedError(Exception):
    """The process has ended; `why`: the reason, `status`: its exit status."""

    def __init__(self, why: Why, status: int | None) -> None:
        super().__init__(f"{why}, status {status}")
        self.why: Why = why
        self.status = status


class JinjaProcess:
    """One child process, started at its first use and again after it has ended. Thread-safe."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._release: weakref.finalize | None = None
        self._source: str | None = None  # the template that the child has compiled

    @property
    def pid(self) -> int | None:
        """Process id of the child, None without one."""
        return self._process.pid if self._process else None

    def render(self, source: str, values: Mapping[str, Any], cancel: CancelCheck | None = None) -> dict[str, Any]:
        """The child's answer (see jinja_child.py). Raises ChildEndedError past a limit or once `cancel()` is true,
        ModelError where it cannot be started, RequestError for values far beyond the limit of text, TypeError or
        ValueError for such that JSON cannot say."""
        limits = self._limits
        with self._turn(cancel):
            known = self._running() and self._source == source
            request = {"source": None if known else source, "values": dict(values), "limit": limits.text}
            body = json.dumps(request | {"seconds": limits.seconds + _ALARM_AFTER}).encode("ascii")
            if len(body) > 4 * limits.text:
                raise RequestError(
                    f"the conversation has {len(body):,} bytes; a prompt has at most {limits.text:,}: "
                    "shorten the messages"
                )
            if self._process is None:
                self._start()
            answer = self._exchange(body, limits.seconds, cancel)
            self._source = source if "text" in answer else None
            return answer

    @contextlib.contextmanager
    def _turn(self, cancel: CancelCheck | None) -> Iterator[None]:
        while not self._lock.acquire(timeout=_LOOK_EVERY):
            if cancel is not None and cancel():
                raise ChildEndedError("cancelled", None)
        try:
            yield
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the child; a later render starts a new one."""
        with self._lock:
            self._end()

    def _running(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            log.info("the template process %d had ended (status %s)", self._process.pid, self._process.returncode)
            self._end()
        return self._process is not None

    def _start(self) -> None:
        folders = _folders_of("jinja2", "markupsafe")
        if not sys.executable:
            raise ModelError(
                "chat templates are rendered in a Python process of their own, and this program does not say "
                "where Python is"
            )
        # -I -S: no user site, no .pth files, no environment; the child imports the standard library and the two folders
        # only
        command = isolated_command("-S", "-X", "utf8", _CHILD, str(self._limits.memory), *folders)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ModelError(f"the process that renders chat templates cannot be started: {error.strerror}") from error
        self._release = weakref.finalize(self, _kill, self._process)
        try:
            self._exchange(None, self._limits.start_seconds)
        except ChildEndedError as error:
            raise ModelError(
                f"the process that renders chat templates did not come up ({error}); is jinja2 installed whole?"
            ) from error

    def _exchange(self, body: bytes | None, seconds: float, cancel: CancelCheck | None = None) -> dict[str, Any]:
        """Send a frame (None: nothing) and wait for one, ending the child past a limit."""
        process = self._process
        if process is None:
            raise ChildEndedError("ended", None)
        watch = _Watch(process, seconds, self._limits.memory, cancel)
        frame = None
        try:
            with watch:
                frame = _talk(process, body, cap=8 * self._limits.text + 2**20)
        finally:
            # Past a limit, out of sync, or interrupted: this child cannot be used again
            if watch.why or frame is None:
                self._end()
        if watch.why or frame is None:
            alarm = -getattr(signal, "SIGALRM", 0)
            by_itself: Why = "time" if alarm and process.returncode == alarm else "ended"
            raise ChildEndedError(watch.why or by_itself, process.returncode)
        return json.loads(frame)

    def _end(self) -> None:
        self._process = self._source = None
        if self._release:
            self._release()
            self._release = None


class _Watch:
    """A thread that kills `process` past its time or memory or once `cancel()` is true, for as long as the block runs;
    `why` tells that it did."""

    def __init__(
        self, process: subprocess.Popen[bytes], seconds: float, memory: int, cancel: CancelCheck | None
    ) -> None:
        self.why: Why | None = None
        self._cancel = cancel
        self._process, self._memory = process, memory
        self._deadline = time.monotonic() + seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="onedesk-template-watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(min(_LOOK_EVERY, max(0.0, self._deadline - time.monotonic()))):
            if time.monotonic() >= self._deadline:
                self.why = "time"
            elif _resident(self._process.pid) > self._memory:
                self.why = "memory"
            elif self._cancel is not None and self._cancel():
                self.why = "cancelled"
            if self.why:
                self._process.kill()
                return


def _resident(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _talk(process: subprocess.Popen[bytes], body: bytes | None, cap: int) -> bytes | None:
    """Write one frame and read one; None if the child is gone or answers more than `cap` bytes."""
    if process.stdin is None or process.stdout is None:
        return None
    try:
        if body is not None:
            process.stdin.write(len(body).to_bytes(4, "big"))
            process.stdin.write(body)
            process.stdin.flush()
        head = process.stdout.read(4)
        length = int.from_bytes(head, "big")
        if len(head) < 4 or length > cap:
            return None
        frame = process.stdout.read(length)
    except OSError:  # a broken pipe
        return None
    return frame if len(frame) == length else None


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with contextlib.suppress(OSError):  # data that was not written yet
                pipe.close()


def _folders_of(*packages: str) -> list[str]:
    """The folders of `packages`, in this process's import order."""
    folders = []
    for package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise ModelError(
                f"chat templates need the package {package}; install it into this environment (pip install {package})"
            )
        folders.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(folders))
