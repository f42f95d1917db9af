"""The service of this machine as a peer: found by its note, started on demand, ended by its process id if we started
it.
"""

from __future__ import annotations

import atexit
import logging
import math
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from ..config import own_version
from ..core import CancelCheck, ModelSpec
from ..errors import Cancelled, ModelError, OnedeskError, PeerError
from ..loader.files import short
from ..memory.policy import Policy
from ..memory.pool import Released
from ..python_process import SAFE_FOLDER, package_command
from .dialect import policy_fields
from .note import Note, note_stamp, running, taken
from .peer import Described, Peer, PeerAddress
from .tenancy import Tenancy
from .token_file import read_token
from .wire import ask

log = logging.getLogger(__name__)

TITLE = "the local service"
LOG_NAME = "logs/service.log"
# Seconds until a service that we start must listen (torch takes several on a busy machine), and between two checks.
_STARTS_WITHIN, _LOOK = 120.0, 0.05
# Seconds that a service has to exit after it was asked to, since it finishes responses first; and for a killed one to
# be gone.
_ENDS_WITHIN, _GOES_WITHIN = 30.0, 1.0
# Seconds without a byte after which our own service counts as dead: it sends something every 10 s in a stream.
_SILENCE = 60.0
# Timeouts in seconds for a response about memory: one that must not delay ComfyUI, and one that includes a release.
_GLANCE, _RELEASE = 2.0, 120.0
_LOG_LINES, _LOG_BYTES = 3, 4096


@dataclass(frozen=True, slots=True)
class RunningService:
    """A running service, by its note, and its address."""

    note: Note
    address: PeerAddress


def find_service(cache: Path) -> RunningService | None:
    """The service of the tree with this cache, None if none is running. Raises FileError for a token that cannot be
    read.
    """
    note = running(cache)
    return None if note is None else RunningService(note, _address(note))


class Finder:
    """Finds the service of a tree, and reads each note and its token once. That takes 5 system calls before each first
    token instead of 24. Thread-safe.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._known: tuple[tuple[int, int, int], RunningService] | None = None

    def find(self) -> RunningService | None:
        """As `find_service`."""
        if not taken(self._cache):
            return None
        stamp, known = note_stamp(self._cache), self._known
        if known is not None and known[0] == stamp:
            return known[1]
        found = find_service(self._cache)
        self._known = None if stamp is None or found is None else (stamp, found)
        return found


def _address(note: Note) -> PeerAddress:
    key = None if note.token_file is None else read_token(Path(note.token_file))
    host = note.host or "127.0.0.1"
    return PeerAddress(
        TITLE, host=host, port=note.port or 0, uds=note.uds, key=key, dialect="onedesk", silence=_SILENCE
    )


class LocalService(Peer):
    """The service of a tree. `arguments` are those of `onedesk serve`, used if we start it."""

    title = TITLE
    has_memory = True

    def __init__(self, cache: Path, arguments: Sequence[str]) -> None:
        self._cache = cache
        self._log = cache / LOG_NAME
        self._arguments = tuple(arguments)
        self._version = own_version()
        self._lock = threading.Lock()
        self._finder = Finder(cache)
        self._child: subprocess.Popen[bytes] | None = None
        self._up = False  # whether our child was seen to listen
        self._tenancy: Tenancy | None = None
        self._busy: frozenset[ModelSpec] = frozenset()  # models that kept their bytes at their last release

    @property
    def pid(self) -> int | None:
        """Process id of the service that we started, None if we did not, or it has ended."""
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    def reach(self, cancel: CancelCheck | None = None) -> PeerAddress:
        """Its address; starts it first if none is running. Raises PeerError for another version or a failed start,
        FileError for a token that cannot be read, Cancelled; after that, the start continues and the next call finds
        it.
        """
        while not self._lock.acquire(timeout=_LOOK):
            _check(cancel)
        try:
            found = self._running() or self._started(cancel)
        finally:
            self._lock.release()
        self._check_version(found.note)
        return found.address

    def join(self, tenancy: Tenancy) -> None:
        """Report this process's own memory to the service for as long as it runs. A second call does nothing."""
        with self._lock:
            if self._tenancy is None:
                self._tenancy = tenancy
                tenancy.begin(self._running_address)

    def describe(self, wanted: ModelSpec) -> Described:
        """What it reports about a model. Raises ModelError for one that it does not have or cannot open, PeerError."""
        try:
            document = self._model(wanted, _SILENCE)
        except ModelError:
            advice = (
                "put it into the tree's models, or end the service, so that it is started with the folders of this"
                " process"
            )
            raise ModelError(f"{self.title} serves no model {short(wanted.name)}; {advice}") from None
        if document.get("reason"):
            raise ModelError(f"{wanted.name}: {document['reason']}")
        return Described(_whole(document.get("context")), _whole(document.get("bytes")))

    def held(self, wanted: ModelSpec) -> int:
        """Bytes that the model holds, as the service reports."""
        try:
            return _whole(self._model(wanted, _GLANCE).get("held")) if taken(self._cache) else 0
        except OnedeskError as error:
            log.debug("%s does not tell what %s holds: %s", self.title, wanted.name, error)
            return 0

    def release(self, wanted: ModelSpec) -> tuple[Released, ...]:
        """Release the model there; returns once its bytes are back, measured by the service."""
        if not taken(self._cache):
            return ()
        try:
            document = self._ask("POST", "/memory/release", {"owner": wanted.name, **_form(wanted)}, seconds=_RELEASE)
        except PeerError:
            if self._ends():
                return ()
            raise
        with self._lock:
            busy = wanted.name in document.get("busy", ())
            self._busy = self._busy | {wanted} if busy else self._busy - {wanted}
        rows = document.get("released")
        return tuple(_released(row) for row in rows if isinstance(row, Mapping)) if isinstance(rows, list) else ()

    def busy(self, wanted: ModelSpec) -> bool:
        return wanted in self._busy

    def offer(self, wanted: ModelSpec, policy: Policy) -> None:
        """Set when the model gives way, if the service is running. Every request sends it too."""
        if not taken(self._cache):
            return
        try:
            self._ask(
                "POST",
                "/memory/policy",
                {"owner": wanted.name, **policy_fields(policy), **_form(wanted)},
                seconds=_GLANCE,
            )
        except OnedeskError as error:
            log.debug("%s does not take the policy of %s: %s", self.title, wanted.name, error)

    def close(self) -> None:
        """End this process's lease, and end the service if we started it."""
        atexit.unregister(self.close)
        with self._lock:
            tenancy, self._tenancy = self._tenancy, None
            child, self._child = self._child, None
        if tenancy is not None:
            tenancy.end()
        if child is None or child.poll() is not None:
            return
        child.terminate()
        try:
            child.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            log.warning("%s (process %d) did not end within %g s; killing it", self.title, child.pid, _ENDS_WITHIN)
            child.kill()
            child.wait()

    def _model(self, wanted: ModelSpec, seconds: float) -> Mapping[str, Any]:
        """What it reports about a model in this variant, besides OpenAI's fields."""
        more = self._ask("GET", f"/models/{quote(wanted.name)}?{urlencode(_form(wanted))}", seconds=seconds).get(
            "onedesk"
        )
        return more if isinstance(more, Mapping) else {}

    def _ask(
        self, method: str, route: str, body: Mapping[str, Any] | None = None, *, seconds: float = _SILENCE
    ) -> Mapping[str, Any]:
        address = self._running_address()
        if address is None:
            raise PeerError(f"{self.title} has ended; run again: it is started again")
        document = ask(address, method, route, body, seconds=seconds)
        if not isinstance(document, Mapping):
            raise PeerError(f"{self.title} answers {route.partition('?')[0]} with no object; is it another program?")
        return document

    def _ends(self) -> bool:
        """Whether the service has ended or is ending: a killed one stops listening some moments before its lock is
        free.
        """
        until = time.monotonic() + _GOES_WITHIN
        while taken(self._cache):
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK)
        return True

    def _running(self) -> RunningService | None:
        """The service if it is running. Records the end of one that we started."""
        if self._child is not None and self._child.poll() is not None:
            log.info("%s (process %d) has ended with status %d", self.title, self._child.pid, self._child.returncode)
            self._child, self._up = None, False
        found = self._finder.find()
        self._up = self._up or (found is not None and self._child is not None and found.note.pid == self._child.pid)
        return found

    def _running_address(self) -> PeerAddress | None:
        found = self._running()
        return None if found is None else found.address

    def _started(self, cancel: CancelCheck | None) -> RunningService:
        """Start it, or continue to wait for an earlier start."""
        if self._child is not None and self._up:
            while self._child.poll() is None:  # it was up and has released its lock: it is ending
                _check(cancel)
                time.sleep(_LOOK)
            self._child, self._up = None, False
        if self._child is None:
            self._child = self._start()
        child, until = self._child, time.monotonic() + _STARTS_WITHIN
        # If another service holds the tree, it was started at the same moment: ours exits, and we wait for the other.
        while child.poll() is None or taken(self._cache):
            found = self._running()
            if found is not None:
                return found
            _check(cancel)
            if time.monotonic() > until:
                raise PeerError(
                    f"{self.title} does not listen {_STARTS_WITHIN:g} s after its start; {self._last_words()}"
                )
            time.sleep(_LOOK)
        self._child = None
        raise PeerError(f"{self.title} ended while it started, with status {child.returncode}; {self._last_words()}")

    def _start(self) -> subprocess.Popen[bytes]:
        command = package_command("onedesk.service", "serve", *self._arguments)
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            if self._log.exists():
                self._log.replace(self._log.with_name(f"{self._log.name}.old"))
            with self._log.open("wb") as out:
                # A session of its own: Ctrl-C in this process's terminal is for this process, which then ends the
                # service.
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=SAFE_FOLDER,
                    start_new_session=True,
                )
        except OSError as error:
            raise PeerError(
                f"{self.title} cannot be started: {error.strerror}; start it with `onedesk serve`"
            ) from error
        log.info("started %s as process %d", self.title, child.pid)
        atexit.register(self.close)
        return child

    def _last_words(self) -> str:
        """The end of its log, for an error message."""
        try:
            with self._log.open("rb") as file:
                file.seek(-min(_LOG_BYTES, file.seek(0, 2)), 2)
                lines = file.read().decode("utf-8", "replace").split("\n")
        except OSError:
            lines = []
        said = " / ".join(line.strip() for line in lines[-_LOG_LINES - 1 :] if line.strip())
        return (
            f"its log in the tree's cache, {LOG_NAME}, ends with: {said}"
            if said
            else f"its log in the tree's cache, {LOG_NAME}, is empty"
        )

    def _check_version(self, note: Note) -> None:
        if note.version != self._version:
            raise PeerError(
                f"{self.title} that runs is version {note.version}, and these nodes are {self._version}; end it"
                f" (process {note.pid}), then run again: it is started again"
            )


def _check(cancel: CancelCheck | None) -> None:
    if cancel is not None and cancel():
        raise Cancelled(f"stopped while {TITLE} starts")


def _form(wanted: ModelSpec) -> dict[str, Any]:
    return {"quant": wanted.quant} | ({} if wanted.context is None else {"context": wanted.context})


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _released(row: Mapping[str, Any]) -> Released:
    seconds = row.get("seconds")
    spent = float(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else 0.0
    return Released(str(row.get("owner")), _whole(row.get("asked")), _whole(row.get("measured")), spent)
