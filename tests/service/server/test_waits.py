"""No wait without an end where others need the thread: silent leases, templates that never end, contexts asked for
one after the other.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from inside import Inside
from onedesk.service.api import OpenModel
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.server import tenants as tenants_module
from onedesk.service.server.models import VARIANTS_LIMIT
from onedesk.service.server.tenants import Tenant, Tenants
from serving import MODEL, THINKER, Server, write_tree

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "a cat"}], "max_tokens": 2}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SILENT = {"owner": "painter", "bytes": 1 << 20, "held": 1 << 20, "heartbeat": 3600, "gives_way": True}


def in_threads(work: Any, count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


@pytest.fixture
def ending(tmp_path: Path) -> Iterator[Server]:
    """A service that a test ends: its grace is short."""
    folder = write_tree(tmp_path, "grace = 0.5\n", context=256)
    (folder / "models" / THINKER / "chat_template.jinja").write_text(ENDLESS, encoding="utf-8")
    made = Server(folder).start()
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait()


def test_a_silent_lease_blocks_neither_service_nor_shutdown(ending: Server) -> None:
    assert ending.ask("POST", CHAT, ASK)[0] == 200
    assert ending.ask("POST", "/v1/memory/leases", SILENT)[0] == 200
    answers: list[int] = []
    releases = in_threads(lambda: answers.append(ending.ask("POST", "/v1/memory/release", {"owner": "painter"})[0]), 4)
    until = time.monotonic() + 30
    while not [row for row in ending.ask("GET", "/v1/memory")[2]["leases"] if row["owner"] == "painter"]:
        assert time.monotonic() < until
    for method, path, body in (
        ("POST", CHAT, ASK),
        ("GET", "/v1/models", None),
        ("GET", "/metrics", None),
        ("GET", "/health", None),
    ):
        assert ending.ask(method, path, body)[0] == 200
    assert ending.stop() == 0
    for thread in releases:
        thread.join(30)
    assert answers == [200] * 4
    assert "did not end" not in ending.log()


@pytest.mark.parametrize("state", ["template", "half a request", "asleep"])
def test_it_ends_in_every_state(ending: Server, state: str) -> None:
    assert ending.ask("POST", CHAT, ASK)[0] == 200
    with ExitStack() as stack:
        if state == "template":
            stack.enter_context(closing(ending.open_stream({"model": THINKER})))
        elif state == "half a request":
            stack.enter_context(closing(ending.open_stream({"model": MODEL}, cut=True)))
        else:
            ending.ask("POST", "/v1/memory/sleep", {"wake": "manual"})
            stack.enter_context(closing(ending.open_stream({"model": MODEL})))
            ending.until("onedesk_waiting", 1)
        assert ending.stop(signal.SIGTERM) == 0
    assert "did not end" not in ending.log()
    assert "Traceback" not in ending.log()


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    made = Inside(write_tree(tmp_path_factory.mktemp("waits"), context=256)).start()
    (made.tree / "models" / THINKER / "chat_template.jinja").write_text(ENDLESS, encoding="utf-8")
    yield made
    made.stop()


def test_a_template_that_never_ends_delays_no_other_model(inside: Inside) -> None:
    assert inside.ask("POST", CHAT, ASK)[0] == 200
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(closing(inside.open_stream({"model": THINKER})))
        until = time.monotonic() + 30
        while inside.on_loop(
            lambda: THINKER not in inside.service._workers or inside.service._workers[THINKER].preparing < 8
        ):
            assert time.monotonic() < until
        assert inside.ask("POST", CHAT, ASK)[0] == 200
        assert inside.ask("GET", "/v1/memory")[0] == 200
        # None of the eight was done before: each takes seconds, and they are rendered one after the other.
        assert inside.on_loop(lambda: inside.service._workers[THINKER].preparing) >= 7
    until = time.monotonic() + 30
    while inside.on_loop(
        lambda: inside.service._workers[THINKER].preparing
    ):  # their clients have gone: nobody's template is rendered on
        assert time.monotonic() < until


def test_only_so_many_requests_of_a_model_are_prepared(inside: Inside) -> None:
    limit = inside.service.settings.queue + inside.service.settings.concurrency
    assert inside.ask("POST", CHAT, ASK)[0] == 200
    inside.on_loop(lambda: setattr(inside.service._workers[MODEL], "preparing", limit))
    status, headers, document = inside.ask("POST", CHAT, ASK)
    inside.on_loop(lambda: setattr(inside.service._workers[MODEL], "preparing", 0))
    assert (status, document["error"]["code"]) == (429, "queue_full")
    assert "Retry-After" in headers


def test_a_queued_request_keeps_its_model_open(inside: Inside) -> None:
    assert inside.ask("POST", CHAT, ASK)[0] == 200
    assert inside.ask("POST", "/v1/memory/sleep", {"wake": "manual"})[0] == 200
    answers: list[Any] = []
    waiting = in_threads(lambda: answers.append(inside.ask("POST", CHAT, ASK | {"onedesk": {"context": 40}})), 1)
    inside.until("onedesk_waiting", 1)
    for context in range(50, 50 + 3 * VARIANTS_LIMIT):
        assert inside.ask("GET", f"/v1/models/{MODEL}?context={context}")[0] == 200
    assert inside.ask("POST", "/v1/memory/wake", {})[0] == 200
    waiting[0].join(60)
    assert answers[0][0] == 200, answers
    assert inside.on_loop(lambda: inside.service.models._uses) == {}


@pytest.fixture
def pool() -> Pool:
    return Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))


def test_a_silent_lease_is_waited_for_again_after_a_heartbeat(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants_module, "WAIT_SECONDS", 0.2)
    tenants, tenant = Tenants(lambda: pool), Tenant("painter", 100, 100, 3600.0, True)
    tenants.take(tenant)
    looks: list[float] = []
    monkeypatch.setattr(tenants._stopped, "wait", lambda seconds: looks.append(seconds) or time.sleep(seconds))
    assert tenants.free(60) == 0
    first = len(looks)
    assert first > 0
    assert (tenant.silent, tenant.asked) == (True, 60)
    assert tenants.free(60) == 0
    assert len(looks) == first  # it was asked for more, and not waited for
    assert tenant.asked == 100  # never more than it holds
    tenants.tell(tenant.key, 100, None)
    assert tenants.free(10) == 0
    assert len(looks) > first


def test_nobody_waits_for_a_lease_once_the_service_ends(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants_module, "WAIT_SECONDS", 3600.0)
    tenants, tenant = Tenants(lambda: pool), Tenant("painter", 100, 100, 3600.0, True)
    tenants.take(tenant)
    thread = in_threads(lambda: tenants.release("painter"), 1)[0]
    tenants.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_a_load_for_waking_ends_with_the_service(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = OpenModel.load

    def load(self: OpenModel, **options: Any) -> None:
        asked.append(options["cancel"]())
        real(self, **options)

    monkeypatch.setattr(OpenModel, "load", load)
    assert inside.ask("POST", CHAT, ASK)[0] == 200
    assert inside.ask("POST", "/v1/memory/sleep", {"wake": "manual"})[0] == 200
    assert inside.ask("POST", "/v1/memory/wake", {})[0] == 200
    assert asked
    assert not any(asked)
