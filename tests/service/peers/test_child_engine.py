"""Engines that we start: on demand, inside the pool's budget, with every way in which they fail told in words."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from onedesk.service.config import PeerSettings, load_config
from onedesk.service.core import Message, ModelSpec, Request
from onedesk.service.errors import Cancelled, FileError, MemoryFull, PeerError
from onedesk.service.memory.budget import MIB, MemorySettings
from onedesk.service.memory.policy import Policy
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.peers.child_engine import ChildEngine
from onedesk.service.peers.remote import RemoteModel
from onedesk.service.registry import Registry
from serving import alive

FAKE = Path(__file__).with_name("fake_engine.py")
HELD = 48  # MiB that the fake takes
REQUEST = Request(messages=(Message("user", "a cat"),))
WANTED = ModelSpec("writer")


class Desk:
    """A pool of 512 MiB on this machine's memory, and the engines that a test starts."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.model = folder / "m.gguf"
        self.model.write_bytes(b"GGUF" + bytes(1000))
        self.pool = Pool(
            "cpu",
            MemorySettings(limit_bytes=512 * MIB, floor=64 * MIB, kept_back=0.0, initial_slab=4 * MIB),
            read_truth,
        )
        self.engines: list[ChildEngine] = []

    def engine(
        self, fault: str = "none", *, kind: str = "llama-server", mib: int = HELD, **settings: Any
    ) -> ChildEngine:
        chosen: dict[str, Any] = {"model": str(self.model), "memory": 128 * MIB, "start": 30.0, **settings}
        command = (sys.executable, "-I", "-S", str(FAKE), fault, str(mib))
        made = ChildEngine(PeerSettings("writer", kind, command=command, **chosen), self.cache, lambda: self.pool)  # type: ignore[arg-type]
        self.engines.append(made)
        return made

    def log(self) -> str:
        return (self.cache / "logs" / "peer-writer.log").read_text()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    for engine in made.engines:
        engine.close()
    assert made.pool.used() == 0


def write(engine: ChildEngine) -> str:
    return "".join(event.text for event in RemoteModel(WANTED, engine).generate(REQUEST))


@pytest.fixture(autouse=True)
def as_small_as_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onedesk.service.peers.child_engine._ABOUT_TO_ASK", 0.0)
    monkeypatch.setattr("onedesk.service.peers.vllm.PROCESS_BYTES", 0)  # the fake is one small process


@pytest.mark.parametrize("kind", ["llama-server", "vllm"])
def test_it_starts_on_demand_and_releases_its_bytes(desk, kind):
    if kind == "vllm":
        desk.model = desk.model.rename(desk.model.with_name("m.safetensors"))
    engine = desk.engine(kind=kind, context=4096)
    model = RemoteModel(WANTED, engine)
    assert (engine.pid, model.held_bytes(), desk.pool.leases()) == (None, 0, [])
    assert write(engine) == "a cat on a mat"
    pid = engine.pid
    assert pid is not None
    [lease] = desk.pool.leases()
    assert (lease.owner, lease.nbytes, lease.residency, str(lease.policy)) == ("writer", 128 * MIB, "process", "stay")
    assert engine.held(WANTED) > HELD * MIB
    assert engine.describe(WANTED) == replace(engine.describe(WANTED), context=77, nbytes=128 * MIB)
    [released] = model.give_way()
    assert not alive(pid)
    assert released.asked > HELD * MIB
    assert released.measured == released.asked
    assert desk.pool.used() == 0
    assert write(engine) == "a cat on a mat"
    assert engine.pid != pid


def test_its_words_name_no_key_and_nobody_else_may_ask_it(desk):
    engine = desk.engine()
    address = engine.reach()
    assert address.key is not None
    assert address.key not in Path(f"/proc/{engine.pid}/cmdline").read_text()
    assert address.key not in repr(address)
    key_file = desk.cache / "peers" / "writer.key"
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert address.host == "127.0.0.1"
    assert address.key in desk.log()  # the fake writes it down, and a message must not quote it
    with pytest.raises(PeerError) as raised:
        desk.engine("dies").reach()
    assert "starting with key ***" in str(raised.value)


@pytest.mark.parametrize(
    ("fault", "settings", "wanted"),
    [
        (
            "dies",
            {},
            "the engine writer ended with status 1; the end of peer-writer.log:.*cannot load: the file is not a model",
        ),
        ("hangs", {"start": 0.5}, "is not ready after 0.5 s: nothing listens yet .*raise start in its table"),
        ("loads-for-ever", {"start": 0.5}, "is not ready after 0.5 s: /health says 503"),
        ("no-http", {"start": 0.5}, "is not ready after 0.5 s: what listens there does not speak HTTP"),
        ("no-json", {}, "the engine writer .*the end of peer-writer.log"),
        ("another-model", {}, "does not offer the model writer; is it the engine that its table says"),
        ("old", {"idle": 60}, r"\[peers.writer\]: this llama-server has no --sleep-idle-seconds; take idle out"),
        ("none", {"options": ("--port=1",)}, "--port in options is set from its table or by us; take it out"),
        ("none", {"memory": 1000}, r"memory is 1000 B and the weights alone take 1004 B; use more, or a smaller file"),
        ("none", {"model": "/no/such.gguf"}, "there is no model such.gguf; correct model in its table"),
    ],
)
def test_what_goes_wrong_at_the_start_is_told_and_leaves_nothing(desk, fault, settings, wanted):
    engine = desk.engine(fault, **settings)
    with pytest.raises((PeerError, FileError), match=f"(?s){wanted}"):
        engine.reach()
    assert engine.pid is None
    assert desk.pool.used() == 0


def test_a_missing_program_names_the_way_out(desk):
    engine = ChildEngine(
        PeerSettings("writer", "vllm", model=str(desk.model), memory=64 * MIB), desk.cache, lambda: desk.pool
    )
    with pytest.raises(
        PeerError, match=r"there is no program 'vllm'; install it, or name it with command = \[...\] in its table"
    ):
        engine.reach()
    assert desk.pool.used() == 0


def test_a_port_in_use_is_told_by_its_number(desk):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            PeerError, match=f"port {port} is in use by another program; write another in its table, or 0 for any"
        ):
            desk.engine(port=port).reach()


def test_one_that_does_not_fit_is_refused_with_the_figures(desk):
    with pytest.raises(MemoryFull, match="writer asks for 1 GiB of memory for its process, but 512 MiB can be leased"):
        desk.engine(memory=1 << 30).reach()
    assert not (desk.cache / "logs").exists()


def test_a_start_can_be_stopped(desk):
    engine = desk.engine("hangs")
    began = time.monotonic()
    with pytest.raises(Cancelled, match="stopped while the engine writer was starting"):
        engine.reach(lambda: time.monotonic() - began > 0.3)
    assert engine.pid is None


def test_it_can_be_ended_while_it_starts(desk):
    engine = desk.engine("hangs")
    failed: list[Exception] = []

    def start() -> None:
        try:
            engine.reach()
        except Cancelled as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    while engine.pid is None:
        time.sleep(0.01)
    engine.close()
    thread.join(20)
    assert len(failed) == 1
    assert engine.pid is None


def test_one_that_is_killed_between_two_uses_is_started_anew(desk, caplog):
    engine = desk.engine()
    assert write(engine) == "a cat on a mat"
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while engine.pid is not None:
        time.sleep(0.01)
    assert engine.held(WANTED) == 0
    assert write(engine) == "a cat on a mat"
    assert "the engine writer ended with signal SIGKILL" in caplog.text
    assert len(desk.pool.leases()) == 1


def test_a_crash_reports_why_and_the_next_run_works(desk):
    engine = desk.engine("dies-while-writing")
    with pytest.raises(PeerError, match=r"(?s)ended with signal SIGKILL.*illegal memory access"):
        write(engine)
    with pytest.raises(PeerError, match="ended with signal SIGKILL"):  # it was started anew, and dies anew
        write(engine)
    assert desk.log().count("starting with key") == 1


def test_a_model_that_needs_memory_ends_it_when_idle(desk):
    engine = desk.engine("slow", memory=400 * MIB)
    events = RemoteModel(WANTED, engine).generate(REQUEST)
    next(events)
    with pytest.raises(MemoryFull):
        desk.pool.lease("model", "weights", 300 * MIB)
    assert "".join(event.text for event in events).endswith("mat")
    desk.pool.lease("model", "weights", 300 * MIB).release()
    assert engine.pid is None
    assert desk.pool.counters().give_ways == 1


def test_its_policy_ends_it(desk):
    engine = desk.engine()
    model = RemoteModel(WANTED, engine)
    model.policy = Policy("ttl", 0.0)
    assert write(engine) == "a cat on a mat"
    assert [released.owner for released in desk.pool.arbiter.release_due()] == ["writer"]
    assert engine.pid is None


def test_many_who_ask_at_once_start_one(desk):
    engine = desk.engine()
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(write(engine))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["a cat on a mat"] * 6
    assert desk.log().count("starting with key") == 1


def test_the_registry_opens_it_by_its_entry_and_ends_it(desk, tmp_path):
    entry = f"""
    [memory]
    limit_bytes = "512MiB"
    floor = "64MiB"
    [peers.writer]
    kind = "llama-server"
    model = "m.gguf"
    memory = "128MiB"
    command = {json.dumps([sys.executable, "-I", "-S", str(FAKE), "none", str(HELD)])}
    """
    (tmp_path / "onedesk.toml").write_text(entry)
    registry = Registry()
    registry.configure(load_config(tmp_path / "onedesk.toml"))
    try:
        model = registry.open_at_peer(registry.config.peers["writer"])
        assert registry.open_at_peer(registry.config.peers["writer"]) is model
        assert (model.loaded, model.has_memory) == (False, True)
        assert "".join(event.text for event in model.generate(REQUEST)) == "a cat on a mat"
        assert model.loaded
        [info] = registry.pool().leases()
        assert (info.owner, info.residency) == ("writer", "process")
        pid = model.peer.pid
    finally:
        registry.close()
    assert not alive(pid)


def test_a_router_serves_several_models_with_one_process(desk, tmp_path):
    other = desk.model.with_name("b.gguf")
    other.write_bytes(b"GGUF" + bytes(2000))
    entry = f"""
    [memory]
    limit_bytes = "512MiB"
    floor = "64MiB"
    [peers.many]
    kind = "llama-server"
    models = ["m.gguf", "b.gguf"]
    memory = "128MiB"
    context = 512
    idle = 90
    command = {json.dumps([sys.executable, "-I", "-S", str(FAKE), "none", str(HELD)])}
    """
    (tmp_path / "onedesk.toml").write_text(entry)
    registry = Registry()
    registry.configure(load_config(tmp_path / "onedesk.toml"))
    try:
        peers = registry.config.peers
        assert list(peers) == ["many/m", "many/b"]
        first, second = (registry.open_at_peer(peers[name]) for name in peers)
        assert first.peer is second.peer
        assert "".join(event.text for event in first.generate(REQUEST)) == f"m with {desk.model}"
        pid = first.peer.pid
        assert "".join(event.text for event in second.generate(REQUEST)) == f"b with {other}"
        assert second.peer.pid == pid
        [info] = registry.pool().leases()
        assert (info.owner, info.nbytes) == ("many", 128 * MIB)
        log = (registry.config.cache / "logs" / "peer-many.log").read_text()
        assert [line for line in log.splitlines() if line.startswith("loaded")] == ["loaded: m", "loaded: b"]
        preset = registry.config.cache / "peers" / "many.ini"
        assert preset.stat().st_mode & 0o777 == 0o600
        assert preset.read_text().splitlines()[8:] == [
            *("[b]", f"model = {other}", "ctx-size = 512", "parallel = 1", "load-mode = none", "n-gpu-layers = 0"),
            "sleep-idle-seconds = 90",
        ]
        [released] = second.give_way()
        assert released.measured == released.asked > HELD * MIB
        assert not alive(pid)
    finally:
        registry.close()


def test_what_is_wrong_with_several_models_is_told(desk):
    other = desk.model.with_name("b.gguf")
    other.write_bytes(b"GGUF" + bytes(2000))
    both = {"model": "", "models": (str(desk.model), str(other))}
    with pytest.raises(PeerError, match="this llama-server takes one model; write a table for each"):
        desk.engine("old", **both).reach()
    with pytest.raises(PeerError, match="the engine writer does not offer the model m;"):
        desk.engine("another-model", **both).reach()
    with pytest.raises(PeerError, match=r"memory is 2.4 KiB and the weights alone take 2.9 KiB"):
        desk.engine(**both, memory=2500, loaded=2).reach()
    other = other.rename(other.with_name("b\n[c].gguf"))
    with pytest.raises(FileError, match="has signs that its list of models cannot hold; rename it"):
        desk.engine(**{**both, "models": (str(other),)}).reach()
    assert desk.pool.used() == 0


def test_one_that_cannot_sleep_is_ended(desk, monkeypatch, caplog):
    desk.model = desk.model.rename(desk.model.with_name("m.safetensors"))
    monkeypatch.setattr("onedesk.service.peers.launch.LaunchMachine.one_pool", False)
    engine = desk.engine("sleepless", kind="vllm", sleep=True)
    engine.reach()
    [released] = engine.release(WANTED)
    assert released.measured == released.asked
    assert (engine.pid, desk.pool.used()) == (None, 0)
    assert "the engine writer does not do as it is asked: /sleep?level=1 says 500; the end of" in caplog.text


def test_one_that_sleeps_keeps_its_process(desk, monkeypatch):
    desk.model = desk.model.rename(desk.model.with_name("m.safetensors"))
    monkeypatch.setattr("onedesk.service.peers.launch.LaunchMachine.one_pool", False)
    engine = desk.engine(kind="vllm", sleep=True)
    assert write(engine) == "a cat on a mat"
    pid = engine.pid
    [released] = engine.release(WANTED)
    assert (engine.pid, desk.pool.used()) == (pid, 0)
    assert released.asked > HELD * MIB
    assert write(engine) == "a cat on a mat"
    assert engine.pid == pid
    assert len(desk.pool.leases()) == 1
