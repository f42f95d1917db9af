"""Tasks and threads that live as long as the service: whatever they meet, they go on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from inside import Inside
from onedesk.service.loader import files
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.truth import read_truth
from onedesk.service.memory.watch import MemoryWatch
from onedesk.service.peers import tenancy as tenancy_module
from onedesk.service.peers.tenancy import Tenancy
from onedesk.service.server import tasks
from onedesk.service.server.tasks import kept_up
from onedesk.service.server.worker import Worker
from serving import MODEL, write_tree

ERRORS = (
    OverflowError,
    OSError,
    RecursionError,
    MemoryError,
    StopIteration,
    SystemExit,
    KeyboardInterrupt,
    BaseException,
)
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "a cat"}], "max_tokens": 2}


@pytest.mark.parametrize("kind", ERRORS)
def test_a_task_that_fails_begins_again(monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> None:
    monkeypatch.setattr(tasks, "REST_SECONDS", 0.0)
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 4:
            raise kind

    asyncio.run(kept_up("work", work))
    assert begun == 4


@pytest.mark.parametrize("kind", ERRORS)
def test_the_watch_outlives_what_owners_raise(kind: type[BaseException]) -> None:
    ticks, enough = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks >= 3:
            enough.set()
        raise kind

    with MemoryWatch(
        lambda: read_truth("cpu"), lambda _: None, MemorySettings(poll=0.01, poll_loading=0.01), tick=tick
    ) as watch:
        assert enough.wait(30)
        assert watch.running


@pytest.mark.parametrize("kind", ERRORS)
def test_a_tenancy_outlives_what_its_host_raises(monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> None:
    monkeypatch.setattr(tenancy_module, "BEAT", 0.01)
    beats, enough = 0, threading.Event()

    def find() -> None:
        nonlocal beats
        beats += 1
        if beats >= 3:
            enough.set()
        raise kind

    tenancy = Tenancy("host", lambda: 0, lambda _: None)
    tenancy.begin(find)
    assert enough.wait(30)
    tenancy.end()


def test_the_queue_of_a_model_outlives_a_failure_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "REST_SECONDS", 0.0)
    inside = Inside(write_tree(tmp_path, context=256)).start()
    assert inside.ask("POST", CHAT, ASK)[0] == 200
    for kind in ERRORS:
        with pytest.MonkeyPatch.context() as patch:
            failed = threading.Event()

            def run_in_executor(
                *_: Any, kind: type[BaseException] = kind, failed: threading.Event = failed, **__: Any
            ) -> Any:
                failed.set()
                raise kind

            # As where no thread can be started: the task of the queue fails, not what it gives to its thread.
            loop, real = inside.loop, inside.loop.run_in_executor
            patch.setattr(
                loop,
                "run_in_executor",
                lambda executor, *rest, real=real, fail=run_in_executor, failed=failed: (
                    fail()
                    if executor in (worker._thread for worker in inside.service.workers) and not failed.is_set()
                    else real(executor, *rest)
                ),
            )
            assert inside.ask("POST", CHAT, ASK)[0] == 200
            assert failed.is_set()
    assert isinstance(inside.service.workers[0], Worker)
    inside.stop()


def test_a_model_that_fails_to_load_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inside = Inside(write_tree(tmp_path, context=256)).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "onedesk.service.server.service.BatchSizes.measure",
            lambda *_: (_ for _ in ()).throw(OverflowError("too large")),
        )
        inside.on_loop(lambda: setattr(inside.service, "ready", False))
        asyncio.run_coroutine_threadsafe(inside.service.warm_up([MODEL, "gone", MODEL]), inside.loop).result(60)
    assert inside.ask("GET", "/health")[0] == 200
    assert f"{MODEL} cannot be loaded" in caplog.text
    assert "gone cannot be loaded" in caplog.text
    inside.stop()


def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Inside(write_tree(tmp_path, context=256)).start()
    real = files.os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).name == "tokenizer.json":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "open", refuse)
        status, _, document = inside.ask("POST", CHAT, ASK)
    assert (status, document["error"]["code"]) == (400, "model_unusable")
    assert "tokenizer.json cannot be opened: Permission denied" in document["error"]["message"]
    assert str(tmp_path) not in document["error"]["message"]
    assert inside.ask("POST", CHAT, ASK)[0] == 200
    inside.stop()
