"""An engine that starts when it is first needed: its process, its lease in the pool, and its address."""

from __future__ import annotations

import http.client
import logging
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..config import PeerSettings
from ..core import CancelCheck, ModelSpec
from ..errors import Cancelled, FileError, PeerError
from ..memory.external_lease import ExternalLease
from ..memory.policy import STAY, Policy
from ..memory.pool import Pool, Released
from ..python_process import SAFE_FOLDER, python_environment
from . import llama_server, vllm
from .child import Child, Order, check_program
from .launch import EngineEndpoint, Launch, LaunchMachine, environment
from .peer import Described, Peer, PeerAddress
from .wire import Exchange

log = logging.getLogger(__name__)

_LOOK = 0.1  # seconds between two checks of whether it is ready
_PROBE_SECONDS, _PROBE_LIMIT = 2.0, 1 << 16
_HELP_SECONDS = 20.0
_SLEEP_SECONDS = 120.0
_ENDING_SECONDS = 0.5  # a connection breaks shortly before the process is seen to have ended
# Seconds after `reach` for which it does not give way: the caller is about to send a request.
_ABOUT_TO_ASK = 1.0


class ChildEngine(Peer):
    """The engine of a [peers.NAME] of kind "vllm" or "llama-server". It starts at the first use, and again after it
    gave way or ended.

    `cache` holds its log and its key; `pool` returns the pool when it starts.
    """

    has_memory = True

    def __init__(self, settings: PeerSettings, cache: Path, pool: Callable[[], Pool]) -> None:
        self.title = f"the engine {settings.name}"
        self._settings = settings
        self._cache = cache
        self._find_pool = pool
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._address: PeerAddress | None = None
        self._lease: ExternalLease | None = None
        self._launch: Launch | None = None
        self._policy: Policy = STAY
        self._on_gpu = False
        self._closing = False
        self._taken = 0  # bytes that the machine's available memory fell by while it started
        self._context = 0
        self._reached = -_ABOUT_TO_ASK

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None while it is not running."""
        child = self._child
        return child.pid if child is not None and child.running else None

    def reach(self, cancel: CancelCheck | None = None) -> PeerAddress:
        """Its address. Starts or wakes it first if necessary.

        Raises PeerError with the end of its log if it fails to start, MemoryFull if its memory does not fit, Cancelled,
        FileError.
        """
        while not self._lock.acquire(timeout=_LOOK):
            _check(cancel, self.title)
        try:
            self._look_after()
            if self._child is None:
                self._start(cancel)
            elif self._lease is None:
                self._wake(self._child, cancel)
            self._reached = time.monotonic()
            if self._address is None:
                raise PeerError(f"{self.title} has no address; run again")
            return self._address
        finally:
            self._lock.release()

    @contextmanager
    def using(self, wanted: ModelSpec) -> Generator[None, None, None]:
        """Within the block, it does not give way."""
        lease = self._lease
        if lease is None:
            raise PeerError(f"{self.title} gave way before it was asked; run again")
        with lease.using():
            yield

    def offer(self, wanted: ModelSpec, policy: Policy) -> None:
        """Set when it gives way without being asked."""
        self._policy = policy
        lease = self._lease
        if lease is not None:
            lease.offer(self._give_way, policy=policy)

    def describe(self, wanted: ModelSpec) -> Described:
        """The context length that it was started with, and the bytes that it may hold."""
        return Described(self._context, self._settings.memory)

    def held(self, wanted: ModelSpec) -> int:
        """Bytes that it holds."""
        lease = self._lease
        return lease.held() if lease is not None else 0

    def release(self, wanted: ModelSpec) -> tuple[Released, ...]:
        """Put it to sleep if it can sleep, otherwise end it; returns when its bytes are back, measured."""
        return self._give_way()

    def busy(self, wanted: ModelSpec) -> bool:
        lease = self._lease
        return lease is not None and lease.in_use

    def why(self) -> str:
        child = self._child
        until = time.monotonic() + _ENDING_SECONDS
        while child is not None and child.running and time.monotonic() < until:
            time.sleep(_LOOK)
        return "" if child is None or child.running else child.ending()

    def close(self) -> None:
        """End it, even while it starts or generates."""
        self._closing = True
        with self._lock:
            self._closing = False
            child, self._child = self._child, None
            lease, self._lease = self._lease, None
            self._address = None
            try:
                if child is not None:
                    child.stop()
            finally:
                if lease is not None:
                    lease.process_ended()

    # With the lock held

    def _start(self, cancel: CancelCheck | None) -> None:
        pool = self._find_pool()
        with pool.loads(self.title, cancel):
            before = pool.read_truth().available
            launch, address, order = self._prepared(pool)
            lease = self._counted(pool)
            child: Child | None = None
            try:
                self._child = child = Child(order)
                self._await_ready(child, address, cancel)
                self._context = self._look_at_models(child, address)
            except BaseException:
                self._child = None
                lease.release(child.stop if child is not None else lambda: None)
                raise
            self._taken = max(0, before - pool.read_truth().available)
            self._launch, self._address = launch, address
            self._offer_lease(lease)
        log.info("%s runs (process %d): %s", self.title, child.pid, " ".join(launch.argv[:2]))

    def _wake(self, child: Child, cancel: CancelCheck | None) -> None:
        pool = self._find_pool()
        with pool.loads(self.title, cancel):
            lease = self._counted(pool)
            try:
                self._post("/wake_up")
            except PeerError:
                self._child = None
                lease.release(child.stop)
                raise
            self._offer_lease(lease)

    def _counted(self, pool: Pool) -> ExternalLease:
        return pool.lease_external(self._settings.name, self._settings.memory, self._held, exact=not self._on_gpu)

    def _offer_lease(self, lease: ExternalLease) -> None:
        self._lease = lease
        lease.offer(self._give_way, policy=self._policy)

    def _look_after(self) -> None:
        """Record an exit that was not requested."""
        child = self._child
        if child is None or child.running:
            return
        log.warning("%s; it is started again", child.ending())
        lease, self._lease, self._child = self._lease, None, None
        if lease is not None:
            lease.process_ended()

    def _prepared(self, pool: Pool) -> tuple[Launch, PeerAddress, Order]:
        settings = self._settings
        key = secrets.token_urlsafe(32)
        preset = self._own_file(f"{settings.name}.ini", "")
        endpoint = EngineEndpoint(
            _free_port(settings.port, self.title), key, self._own_file(f"{settings.name}.key", key + "\n"), preset
        )
        truth = pool.read_truth()
        self._on_gpu = torch.device(pool.device).type != "cpu"
        machine = LaunchMachine(
            truth.total, "cpu" if not self._on_gpu else "integrated" if truth.integrated else "discrete"
        )
        if settings.kind == "vllm":
            launch = vllm.launch(settings, machine, endpoint)
        else:
            known = self._help()
            launch = llama_server.launch(settings, machine, endpoint, lambda option: option.encode() in known)
        self._own_file(preset.name, launch.preset)
        address = PeerAddress(self.title, port=endpoint.port, key=key)
        log_file = self._cache / "logs" / f"peer-{settings.name}.log"
        return launch, address, Order(self.title, launch.argv, environment(launch, self._cache), log_file, secret=key)

    def _own_file(self, name: str, text: str) -> Path:
        """A file that only this user can read; without content, only its path."""
        path = self._cache / "peers" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.unlink(missing_ok=True)
            if text:
                with open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                    file.write(text)
        except OSError as error:
            raise FileError(
                f"{name} of {self.title} cannot be written in the cache: {error.strerror}; check the rights there"
            ) from error
        return path

    def _help(self) -> bytes:
        """The program's help text about its options."""
        command = self._settings.command or llama_server.COMMAND
        check_program(self.title, command[0], os.environ.get("PATH"))
        try:
            shown = subprocess.run(
                [*command, "--help"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_HELP_SECONDS,
                check=False,
                cwd=SAFE_FOLDER,
                env=python_environment(),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerError(f"{self.title}: {command[0]} does not tell its options: {error}") from error
        return shown.stdout + shown.stderr

    def _await_ready(self, child: Child, address: PeerAddress, cancel: CancelCheck | None) -> None:
        until = time.monotonic() + self._settings.start
        health = vllm.HEALTH if self._settings.kind == "vllm" else llama_server.HEALTH
        while (said := _probe(address, health)) != "200":
            if not child.running:
                raise PeerError(child.ending())
            _check(lambda: self._closing or (cancel is not None and cancel()), self.title)
            if time.monotonic() > until:
                words = f"{self.title} is not ready after {self._settings.start:g} s: {said}{child.last_words()}"
                raise PeerError(f"{words}\nraise start in its table if it needs longer")
            time.sleep(_LOOK)

    def _look_at_models(self, child: Child, address: PeerAddress) -> int:
        """The context length that it reports. Also checks that it serves the expected model."""
        document = None
        try:
            with Exchange(address, "GET", "/models", silence=_PROBE_SECONDS * 5) as exchange:
                document = exchange.document()
        except PeerError as error:
            raise PeerError(f"{error}{child.last_words()}") from error
        rows = document.get("data") if isinstance(document, dict) else None
        found = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        mine = {row.get("id"): row for row in found}
        for name in served_names(self._settings):
            if name not in mine:
                raise PeerError(f"{self.title} does not offer the model {name}; is it the engine that its table says?")
        length = mine[served_names(self._settings)[0]].get("max_model_len") or self._settings.context
        return length if isinstance(length, int) else 0

    # From any thread

    def _held(self) -> int:
        """On a GPU, how much the machine's available memory fell until it was ready, since not every driver reports a
        process's share. Otherwise its own pages.

        Called with the pool's lock held, so it must not use the pool.
        """
        child = self._child
        if child is None or not child.running:
            return 0
        return self._taken if self._on_gpu else child.own_bytes()

    def _give_way(self) -> tuple[Released, ...]:
        if not self._lock.acquire(blocking=False):
            return ()
        try:
            child, lease = self._child, self._lease
            if child is None or lease is None or lease.in_use or time.monotonic() - self._reached < _ABOUT_TO_ASK:
                return ()
            released = lease.release(lambda: self._quiet(child))
            self._lease = None
            return (released,)
        finally:
            self._lock.release()

    def _quiet(self, child: Child) -> None:
        """Put it to sleep if it can sleep. If that fails, or it cannot, end it."""
        if self._launch is not None and self._launch.sleeps and child.running:
            try:
                return self._post("/sleep?level=1")
            except PeerError as error:
                log.warning("%s; it is ended", error)
        child.stop()
        self._child = self._address = None
        return None

    def _post(self, route: str) -> None:
        if self._address is None:
            raise PeerError(f"{self.title} has no address")
        # Some versions respond with a document, some without.
        said = _probe(self._address, route, "POST", _SLEEP_SECONDS)
        if said != "200":
            raise PeerError(
                f"{self.title} does not do as it is asked: {said}{self._child.last_words() if self._child else ''}"
            )


def _check(cancel: CancelCheck | None, title: str) -> None:
    if cancel is not None and cancel():
        raise Cancelled(f"stopped while {title} was starting")


def _free_port(asked: int, title: str) -> int:
    """`asked`, or any free port for 0. Raises PeerError for a port in use: by another program, or by an engine that is
    still ending.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", asked))
        except OSError as error:
            raise PeerError(
                f"{title}: port {asked} is in use by another program; write another in its table, or 0 for any"
            ) from error
        return probe.getsockname()[1]


def _probe(address: PeerAddress, route: str, method: str = "GET", seconds: float = _PROBE_SECONDS) -> str:
    """The status of a route as text, or the reason why there is none."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=seconds)
    try:
        connection.request(method, route)
        response = connection.getresponse()
        response.read(_PROBE_LIMIT)
    except TimeoutError:
        return f"{route} does not answer"
    except http.client.HTTPException:
        return f"what listens there does not speak HTTP; {route} is answered with something else"
    except OSError as error:
        return f"nothing listens yet ({error.strerror or error})"
    finally:
        connection.close()
    return "200" if response.status == 200 else f"{route} says {response.status}"


def served_names(settings: PeerSettings) -> tuple[str, ...]:
    """The names under which our engines serve their models."""
    return (settings.name,) if settings.kind == "vllm" else tuple(llama_server.named_models(settings))
