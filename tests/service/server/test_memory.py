"""The memory API: what there is, giving it back measured, sleeping and waking."""

from __future__ import annotations

import json
import threading
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from onedesk.service.cli import command
from onedesk.service.config import load_config
from onedesk.service.core import ModelSpec
from onedesk.service.registry import Registry
from onedesk.service.server.models import VARIANTS_LIMIT, Models, ServedModels
from serving import MODEL, THINKER, Server

SHORT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "a cat"}], "max_tokens": 4, "seed": 1}


def post(server: Server, what: str, body: Any = None) -> Any:
    status, _, document = server.ask("POST", f"/v1/memory/{what}", body or {})
    assert status == 200, document
    return document


def held(server: Server) -> int:
    return sum(lease["bytes"] for lease in server.ask("GET", "/v1/memory")[2]["leases"])


def test_the_document_is_that_of_the_command(server: Server) -> None:
    server.client().chat.completions.create(**SHORT)
    document = server.ask("GET", "/v1/memory")[2]
    assert {"truth", "budget", "leases", "counters"} <= set(document)
    assert {lease["owner"] for lease in document["leases"]} >= {MODEL}
    assert {"owner", "kind", "bytes", "residency", "policy", "idle"} <= set(document["leases"][0])
    assert document["budget"]["used"] == held(server)
    assert document["asleep"] is False


def test_an_owner_gives_way_and_what_came_back_is_measured(server: Server) -> None:
    text = server.client().chat.completions.create(**SHORT).choices[0].message.content
    before = held(server)
    released = post(server, "release", {"owner": MODEL})["released"]
    assert {row["owner"] for row in released} == {MODEL}
    asked, measured = (sum(row[key] for row in released) for key in ("asked", "measured"))
    assert measured >= 0.98 * asked > 0
    assert held(server) < before
    assert server.figure("onedesk_released_bytes_total") > 0
    assert post(server, "release", {"owner": MODEL})["released"] == []
    assert server.client().chat.completions.create(**SHORT).choices[0].message.content == text


def test_owners_give_way_for_bytes(server: Server) -> None:
    server.client().chat.completions.create(**SHORT)
    assert post(server, "release", {"bytes": 1})["released"] == []  # there is room already
    report = server.ask("GET", "/v1/memory")[2]
    everything = report["budget"]["limit"]
    assert post(server, "release", {"bytes": everything})["released"]
    assert held(server) == 0


def test_only_who_was_asked_and_writes_is_busy(server: Server) -> None:
    server.client().chat.completions.create(**SHORT)
    with closing(
        server.open_stream({"model": THINKER, "max_tokens": 3500, "temperature": 2.0, "top_p": 1.0, "top_k": 0})
    ) as stream:
        assert stream.recv(64)  # it writes
        assert post(server, "release", {"bytes": 1}) == {"released": [], "busy": []}
        assert post(server, "release", {"owner": MODEL})["busy"] == []
        assert post(server, "release", {"owner": THINKER}) == {"released": [], "busy": [THINKER]}
    server.until("onedesk_working", 0)
    post(server, "release", {"owner": THINKER})


def test_wrong_wishes(server: Server) -> None:
    server.client().chat.completions.create(**SHORT)
    status, _, document = server.ask("POST", "/v1/memory/release", {"owner": "nobody"})
    assert (status, document["error"]["code"]) == (404, "unknown_owner")
    assert MODEL in document["error"]["message"]
    for body in ({}, {"owner": MODEL, "bytes": 5}, {"bytes": 0}, {"owner": 5}):
        assert server.ask("POST", "/v1/memory/release", body)[0] == 400


def test_sleeping_and_waking_ten_times_changes_nothing(server: Server) -> None:
    text = server.client().chat.completions.create(**SHORT).choices[0].message.content
    for _ in range(10):
        released = post(server, "sleep", {"wake": "manual"})["released"]
        assert sum(row["measured"] for row in released) >= 0.98 * sum(row["asked"] for row in released) > 0
        assert held(server) == 0
        woken = {row["owner"]: row for row in post(server, "wake")["woken"]}
        assert woken[MODEL]["bytes"] == held(server) > 0
        assert server.client().chat.completions.create(**SHORT).choices[0].message.content == text


def test_the_next_request_wakes_it(server: Server) -> None:
    text = server.client().chat.completions.create(**SHORT).choices[0].message.content
    for body in ({}, {"wake": "request"}, {"wake": None}):
        assert post(server, "sleep", body)["released"]
        assert (held(server), server.ask("GET", "/health")[2]["wake"]) == (0, "request")
        assert server.client().chat.completions.create(**SHORT).choices[0].message.content == text
        assert (server.ask("GET", "/health")[2]["asleep"], held(server) > 0) == (False, True)
    assert server.ask("POST", "/v1/memory/sleep", {"wake": "later"})[0] == 400


def test_who_asks_while_it_sleeps_waits(server: Server) -> None:
    post(server, "sleep", {"wake": "manual"})
    assert post(server, "sleep", {"wake": "manual"}) == {"released": [], "busy": []}
    assert server.ask("GET", "/v1/memory")[2]["asleep"] is True
    assert {name: server.ask("GET", "/health")[2][name] for name in ("ready", "asleep", "wake")} == {
        "ready": True,
        "asleep": True,
        "wake": "manual",
    }
    with closing(server.open_stream({"model": MODEL, "max_tokens": 2})) as stream:
        assert b"asleep until POST /v1/memory/wake" in stream.recv(4096)
    server.until("onedesk_waiting", 0)
    answers: list[str] = []
    client = server.client()
    thread = threading.Thread(
        target=lambda: answers.append(client.chat.completions.create(**SHORT).choices[0].finish_reason)
    )
    thread.start()
    server.until("onedesk_waiting", 1)
    assert (answers, held(server)) == ([], 0)
    post(server, "wake")
    thread.join(60)
    assert answers == ["length"]


def test_figures_have_no_secrets_and_no_paths(server: Server) -> None:
    server.ask("GET", "/a/path/of/somebody")
    text = server.ask("GET", "/metrics")[2]
    assert server.token not in text
    assert str(server.tree) not in text
    assert "somebody" not in text
    for name in (
        "requests_total",
        "tokens_total",
        "seconds_bucket",
        "working",
        "waiting",
        "fragmentation",
        "leased_bytes",
        "vm_events_total",
    ):
        assert f"onedesk_{name}" in text
    assert server.token not in server.log()


def lease(server: Server, **options: Any) -> Any:
    status, _, document = server.ask("POST", "/v1/memory/leases", {"owner": "images", "bytes": 1 << 20, **options})
    assert status == 200, document
    return document


def rows(server: Server) -> dict[str, Any]:
    return {row["owner"]: row for row in server.ask("GET", "/v1/memory")[2]["leases"] if row["kind"] == "other process"}


def test_a_lease_lasts_as_long_as_its_heartbeat(server: Server) -> None:
    made = lease(server, heartbeat=0.3)
    path = f"/v1/memory/leases/{made['id']}"
    for held in (0, 5000, 1 << 20):
        status, _, document = server.ask("POST", path, {"held": held})
        assert (status, document["held"], document["asked"]) == (200, held, 0)
    assert rows(server)["images"]["held"] == 1 << 20
    until = time.monotonic() + 30
    while rows(server):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert server.ask("POST", path, {})[2]["error"]["code"] == "unknown_lease"
    again = lease(server)
    assert server.ask("DELETE", f"/v1/memory/leases/{again['id']}")[0] == 200
    assert rows(server) == {}
    assert server.ask("DELETE", f"/v1/memory/leases/{again['id']}")[0] == 404


def test_nothing_is_released_for_an_impossible_lease(server: Server) -> None:
    server.client().chat.completions.create(**SHORT)
    loaded, available = held(server), server.ask("GET", "/v1/memory")[2]["truth"]["available"]
    status, _, document = server.ask("POST", "/v1/memory/leases", {"owner": "images", "bytes": 2 * available})
    assert (status, document["error"]["code"]) == (503, "memory_full")
    assert held(server) == loaded > 0  # nobody gave way for what can never be had
    made = lease(server, bytes=available // 4)
    assert server.client().chat.completions.create(**SHORT).usage is not None
    server.ask("DELETE", f"/v1/memory/leases/{made['id']}")


def test_another_process_is_asked_in_the_answer_to_its_heartbeat(server: Server) -> None:
    made = lease(server, heartbeat=5, gives_way=True, held=1 << 20)
    path = f"/v1/memory/leases/{made['id']}"
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(post(server, "release", {"owner": "images"})["released"]))
    thread.start()
    until = time.monotonic() + 30
    while not server.ask("POST", path, {"held": 1 << 20})[2]["asked"]:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert server.ask("POST", path, {"held": 0})[2]["asked"] == 0
    thread.join(30)
    assert [(row["owner"], row["asked"]) for row in found[0]] == [("images", 1 << 20)]
    server.ask("DELETE", path)


def test_the_command_shows_what_the_service_holds(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.client().chat.completions.create(**SHORT)
    config = ["--config", str(server.tree / "onedesk.toml")]
    assert command.main(["memory", "--json", *config]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {lease["owner"] for lease in document["leases"]} >= {MODEL}
    assert document["budget"]["used"] == held(server)
    assert document["truth"]["checkpoint_pages"] > 0
    assert document["service"]["pid"] == (server.note.pid if server.note else 0)
    assert command.main(["memory", *config]) == 0
    assert MODEL in capsys.readouterr().out


def test_a_form_of_a_model_is_one_of_its_own(server: Server) -> None:
    def form(**own: Any) -> Any:
        return server.client().chat.completions.create(**SHORT, extra_body={"onedesk": own}).choices[0].message.content

    def shown(query: str) -> Any:
        return server.ask("GET", f"/v1/models/{MODEL}?{query}")[2]["onedesk"]

    plain = form()
    assert form(context=128) == form(quant="none", repetition_stop=False) == plain
    form(context=96, quant="int8", policy="pinned")
    assert {lease["policy"] for lease in server.ask("GET", "/v1/memory")[2]["leases"]} >= {"pinned"}
    assert (
        post(server, "policy", {"owner": MODEL, "policy": "ttl", "ttl": 300, "context": 96, "quant": "int8"})["policy"]
        == "ttl 300"
    )
    small = shown("context=96&quant=int8")
    assert (small["context"], small["loaded"], small["held"] > 0) == (96, True, True)
    released = post(server, "release", {"owner": MODEL, "context": 96, "quant": "int8"})
    assert sum(row["asked"] for row in released["released"]) > 0
    assert released["busy"] == []
    assert shown("context=96&quant=int8")["held"] == 0
    assert shown("context=128")["held"] > 0
    for wrong in ({"context": 1}, {"quant": "int3"}, {"policy": "ttl"}, {"detail": "yes"}, {"context": 10**9}):
        assert server.ask("POST", "/v1/chat/completions", SHORT | {"onedesk": wrong})[0] == 400
    for query in ("context=x", "context=1", "quant=int3", f"context={'9' * 5000}"):
        assert server.ask("GET", f"/v1/models/{MODEL}?{query}")[0] == 400


def test_only_the_latest_variants_of_a_model_are_kept(server: Server) -> None:
    config, registry = load_config(server.tree / "onedesk.toml"), Registry()
    registry.configure(config)
    models = Models(config, registry, ServedModels(usual=ModelSpec("", device="cpu")))
    usual = models.open(models.spec(MODEL))
    for context in range(200, 220):
        assert models.open(replace(models.spec(MODEL), context=context)).context == context
    kept = registry.models()
    assert sorted(model.context for model in kept if model is not usual) == list(range(220 - VARIANTS_LIMIT, 220))
    assert models.open(models.spec(MODEL)) is usual
    registry.close()
