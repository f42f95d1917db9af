"""The local service as a peer, for real: started on demand, the same events as in this process, gone and found
again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from onedesk.service.api import OpenModel
from onedesk.service.config import load_config, package_folder
from onedesk.service.core import (
    Event,
    Message,
    ModelSpec,
    Progress,
    Request,
    Result,
    Sampling,
)
from onedesk.service.errors import Cancelled, ModelError, PeerError, RequestError
from onedesk.service.loader.names import ModelRoots
from onedesk.service.memory.policy import Policy
from onedesk.service.peers.dialect import Reader
from onedesk.service.peers.note import read_note, running, taken
from onedesk.service.peers.peer import PeerAddress
from onedesk.service.peers.remote import RemoteModel
from onedesk.service.peers.service import LocalService, find_service
from onedesk.service.peers.tenancy import Tenancy
from onedesk.service.peers.wire import ask
from onedesk.service.registry import Registry
from serving import MODEL, THINKER, alive, write_tree
from tiny_models import write_language_model

STRAY = "stray"


def request(text: str = "a cat", *, tokens: int = 24, seed: int = 7, **more: object) -> Request:
    return Request(
        (Message("user", text),), sampling=Sampling(seed=seed), max_tokens=tokens, repetition_stop=False, **more
    )  # type: ignore[arg-type]


def answer(events: Iterator[Event]) -> tuple[list[Event], Result]:
    came = list(events)
    result = came[-1].result
    assert result is not None
    return came, result


class Desk:
    """A tree, a registry as a ComfyUI has it, and a folder of models that the tree does not know."""

    def __init__(self, folder: Path) -> None:
        self.tree = write_tree(folder / "tree", "linger = 1\n", context=2048)
        write_language_model(folder / "more" / STRAY, seed=9, context=512)
        self.config = load_config(self.tree / "onedesk.toml")
        self.cache = self.config.cache
        self.roots = ModelRoots([folder / "more", *self.config.model_roots])
        self.registry = Registry()
        self.registry.configure(self.config)

    def remote(self, name: str = MODEL, *, context: int = 1024, quant: str = "none") -> RemoteModel:
        return self.registry.open_in_service(ModelSpec(name, context, quant, "cpu"), roots=self.roots)

    def here(self, name: str = MODEL, *, context: int = 1024, quant: str = "none") -> OpenModel:
        return self.registry.open(name, roots=self.roots, context=context, quant=quant, device="cpu", load=False)

    @property
    def service(self) -> LocalService:
        return self.registry.service(self.roots, "cpu")

    def memory(self) -> list[dict[str, object]]:
        return ask(self.service.reach(), "GET", "/memory")["leases"]

    def kill(self) -> int:
        pid = self.service.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while alive(pid) or taken(self.cache):  # its last thread lets go of the lock, some ms after the first has ended
            time.sleep(0.01)
        return pid


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    made = Desk(tmp_path_factory.mktemp("peers"))
    yield made
    made.registry.close()


def test_opening_starts_nothing_and_the_first_text_starts_it(desk: Desk) -> None:
    model = desk.remote()
    assert (model.loaded, model.busy, model.give_way()) == (False, False, ())
    assert not taken(desk.cache)
    _, result = answer(model.generate(request()))
    assert len(result.text) == 24
    note = running(desk.cache)
    assert note is not None
    assert note.pid == desk.service.pid
    assert (desk.cache / "service.token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_the_same_seed_is_the_same_text_as_in_this_process(desk: Desk, quant: str) -> None:
    for seed in (0, 7, 2**64 - 1):
        asked = request(seed=seed)
        _, there = answer(desk.remote(quant=quant).generate(asked))
        _, here = answer(desk.here(quant=quant).generate(asked))
        assert (there.text, there.ids, there.finish, there.seed) == (here.text, here.ids, here.finish, here.seed)
        assert (there.usage.prompt, there.usage.completion) == (here.usage.prompt, here.usage.completion)
        assert set(there.seconds) >= {"first_token", "total"}
        assert there.stages["decode"].seconds > 0


def test_it_streams_tokens_text_and_progress(desk: Desk) -> None:
    heard = []
    model = desk.remote()
    model.give_way()
    came, result = answer(model.generate(request(tokens=60), progress=heard.append))
    assert "".join(event.text for event in came) == result.text
    assert sum(event.token is not None for event in came) == result.usage.completion
    assert len([event for event in came if event.text]) > 1
    assert {progress.stage for progress in heard} >= {"load", "prefill"}
    assert result.seconds["load"] > 0


def test_a_place_in_its_queue_is_told(desk: Desk) -> None:
    address, told = desk.service.reach(), []
    ask(address, "POST", "/memory/sleep", {"wake": "manual"}, seconds=60)

    def tell(progress: Progress) -> None:
        told.append(progress)
        if progress.stage == "queue":
            ask(address, "POST", "/memory/wake", {}, seconds=60)

    assert answer(desk.remote().generate(request(), progress=tell))[1].finish == "length"
    assert told[0] == Progress("queue", 1, 0)


def test_thoughts_are_apart_and_their_budget_holds(desk: Desk) -> None:
    asked = request(tokens=8, thinking="on", thinking_budget=5)
    _, there = answer(desk.remote(THINKER).generate(asked))
    _, here = answer(desk.here(THINKER).generate(asked))
    assert (there.text, there.reasoning, there.usage.reasoning) == (here.text, here.reasoning, here.usage.reasoning)
    assert there.usage.reasoning > 0


def test_a_list_and_choices_are_each_what_they_are_alone(desk: Desk) -> None:
    asked = [request("one", seed=1), request("two", seed=2, n=2), *(request(str(i), seed=i) for i in range(10))]
    texts = {(e.request, e.choice): e.result.text for e in desk.remote().generate_batch(asked) if e.result}
    alone = {(e.request, e.choice): e.result.text for e in desk.here().generate_batch(asked) if e.result}
    assert texts == alone
    assert len(texts) == 13


def test_a_model_in_a_folder_of_this_process_is_served(desk: Desk) -> None:
    assert answer(desk.remote(STRAY, context=256).generate(request(tokens=3)))[1].usage.completion == 3


def test_an_unknown_model_is_refused_with_the_served_ones(desk: Desk) -> None:
    with pytest.raises(
        ModelError, match="the local service serves no model 'ghost'; put it into the tree's models, or end"
    ):
        RemoteModel(ModelSpec("ghost"), desk.service).generate(request())


def test_the_context_that_is_asked_for_is_what_it_has(desk: Desk) -> None:
    with pytest.raises(RequestError, match="64"):
        list(desk.remote(context=64).generate(request("x" * 200)))
    with pytest.raises(ModelError, match="4096"):
        desk.remote(context=4096).generate(request())
    with pytest.raises(RequestError, match=r"item 2 of 2: .*context"):
        list(desk.remote(context=64).generate_batch([request(tokens=2), request("x" * 200)]))


def test_cancel_closes_the_connection_and_frees_the_place(desk: Desk) -> None:
    model, stop = desk.remote(), threading.Event()
    came = []
    for event in model.generate(request(tokens=900), cancel=stop.is_set):
        came.append(event)
        if len(came) == 5:
            stop.set()
    result = came[-1].result
    assert result is not None
    assert result.finish == "cancelled"
    assert 0 < result.usage.completion < 900
    assert result.text == "".join(event.text for event in came)
    assert not model.busy
    until = time.monotonic() + 30
    while not model.give_way():  # it keeps its bytes only while it writes
        assert time.monotonic() < until
        time.sleep(0.01)
    events = model.generate(request(tokens=900))
    next(events)
    assert model.busy
    assert model.give_way() == ()
    events.close()
    assert not model.busy


def test_it_gives_way_measured_and_the_next_text_is_the_same(desk: Desk) -> None:
    model = desk.remote()
    _, before = answer(model.generate(request()))
    desk.remote(quant="int8").give_way()
    held = model.held_bytes()
    assert 0 < held <= sum(row["bytes"] for row in desk.memory() if row["owner"] == MODEL)
    assert held <= model.need_bytes
    assert desk.remote(quant="int8").held_bytes() == 0
    released = model.give_way()
    asked, measured = (sum(getattr(row, name) for row in released) for name in ("asked", "measured"))
    assert measured >= 0.98 * asked > 0
    assert model.held_bytes() == 0
    assert answer(model.generate(request()))[1].text == before.text
    assert model.loaded


def test_its_policy_holds_there(desk: Desk) -> None:
    model = desk.remote()
    model.policy = Policy("pinned")
    answer(model.generate(request(tokens=2)))
    assert "pinned" in {row["policy"] for row in desk.memory() if row["owner"] == MODEL}
    model.policy = Policy("stay")
    assert "pinned" not in {row["policy"] for row in desk.memory() if row["owner"] == MODEL}
    model.policy = Policy("ttl", 0.0)
    until = time.monotonic() + 30
    while model.loaded:
        assert time.monotonic() < until
        time.sleep(0.05)
    model.policy = Policy("stay")


def test_a_token_by_its_text(desk: Desk) -> None:
    model = desk.remote()
    assert model.encode("a cat") == desk.here().encode("a cat")


def test_a_tenant_tells_what_it_holds_and_is_asked_for_room(desk: Desk) -> None:
    freed = threading.Event()
    held = [5000]

    def free(nbytes: int) -> None:
        held[0] -= nbytes
        freed.set()

    tenancy = Tenancy("an image server", lambda: held[0], free)
    desk.service.reach()
    desk.service.join(tenancy)
    until = time.monotonic() + 30
    while not any(row["owner"] == "an image server" for row in desk.memory()):
        assert time.monotonic() < until
        time.sleep(0.05)
    ask(desk.service.reach(), "POST", "/memory/release", {"owner": "an image server"}, seconds=30)
    assert freed.is_set()
    assert held == [0]
    tenancy.end()
    assert not any(row["owner"] == "an image server" for row in desk.memory())


def test_another_version_is_refused_and_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.service, "_version", "9.9")
    with pytest.raises(PeerError, match=r"version 0\.1\.0, and these nodes are 9\.9; end it \(process \d+\)"):
        desk.remote().generate(request())


def test_a_service_that_was_killed_is_reported_and_started_anew(desk: Desk) -> None:
    """It dies while it reads a prompt. The new start is left by Stop on the way, and gone on with by the next use."""
    model = desk.remote(context=2048)
    _, before = answer(model.generate(request()))
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.stage == "prefill" and not killed:
            killed.append(desk.kill())

    with pytest.raises(PeerError, match="the local service"):
        list(model.generate(request("x" * 1900, tokens=120), progress=kill))  # long enough not to be done by then
    (pid,) = killed
    assert not model.busy
    assert model.held_bytes() == 0
    assert model.give_way() == ()
    assert find_service(desk.cache) is None
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(Cancelled):
        desk.remote().generate(request(), cancel=stop.is_set)
    begun = desk.service.pid
    assert begun not in (None, pid)
    assert answer(model.generate(request()))[1].text == before.text
    assert desk.service.pid == begun


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    broken = LocalService(tmp_path / "cache", ["--port", "x"])
    with pytest.raises(PeerError, match=r"ended while it started, with status 2; its log.*--port"):
        broken.reach()
    broken.close()


def test_an_answer_that_the_ending_service_cut_is_no_answer() -> None:
    reader = Reader(PeerAddress("the local service", dialect="onedesk"), 1, 0.0)
    told = {"finish": "cancelled", "text": "a", "reasoning": "", "ids": [5]}
    list(
        reader.events(
            {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}], "onedesk": told | {"tokens": [5]}}
        )
    )
    with pytest.raises(PeerError, match="was asked to end, after 1 tokens"):
        list(reader.end())


def test_closing_ends_what_was_started_and_nothing_else(desk: Desk) -> None:
    service = desk.service
    service.reach()
    pid = service.pid
    assert pid is not None
    guest = LocalService(desk.cache, [])
    guest.reach()
    guest.close()
    assert alive(pid)
    desk.registry.close()
    assert not alive(pid)
    assert read_note(desk.cache) is None
    assert not taken(desk.cache)


USER = """
import sys
from pathlib import Path
from onedesk.service.peers import service

service.package_command = lambda *words: [sys.executable, sys.argv[1], sys.argv[3]]
local = service.LocalService(Path(sys.argv[2]), [])
local.reach()
print(local.pid, flush=True)
"""
STAND_IN = """
import os, sys, time
from pathlib import Path
sys.path[0] = sys.argv[1] + "/.."
from onedesk.service.config import own_version
from onedesk.service.peers.note import Note, noted, only_one

cache = Path(sys.argv[0]).parent
with only_one(cache), noted(cache, Note(os.getpid(), own_version(), "127.0.0.1", 1, None, None)):
    time.sleep(60)
"""


def test_a_process_that_ends_by_itself_ends_what_it_started(tmp_path: Path) -> None:
    """With a stand-in that does nothing but hold the place of a service."""
    (tmp_path / "launch.py").write_text(STAND_IN)
    ended = subprocess.run(
        [sys.executable, "-c", USER, tmp_path / "launch.py", tmp_path, package_folder()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not alive(int(ended.stdout))
    assert not taken(tmp_path)
