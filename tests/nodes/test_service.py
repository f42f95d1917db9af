"""The real ComfyUI drives the real service, and a server of somebody else: the same nodes, the same texts, and one
of them dies.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from comfyui import BoundComfy, Comfy, Message, Outcome
from kept_kernels import keep_kernels
from node_graphs import GIVE_WAY, Graph, free, load, node, show, shown, state, writing
from onedesk.service.peers.note import Note, read_note, running, taken
from onedesk.service.peers.service import find_service
from onedesk.service.peers.wire import ask
from onedesk.service.setup.tree import Tree
from serving import alive
from tiny_models import write_hole, write_language_model

MODEL = "tiny-writer"
SERVICE, FAR = "local service", "other server: far"
KEY = "sk-very-secret-0123456789"
REPOSITORY = Path(__file__).resolve().parents[2]


WAITING = "(waiting for the local service)"
MEMORY = {"budget": 0, "floor": 0.0, "policy": "as their loaders say", "ttl": 300.0}


class Far(BaseHTTPRequestHandler):
    """A server that answers every conversation with the same words."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        known = self.headers.get("Authorization") == f"Bearer {KEY}"
        self.send_response(200 if known else 401)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for text, finish in (("a far ", None), ("cat", "stop")):
            document = {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}
            self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        pass


class Desk(Comfy):
    """A ComfyUI in a tree of its own, as the installer makes it, so that it has settings and a service."""

    port: int

    @property
    def cache(self) -> Path:
        return self.base / "cache"

    @property
    def note(self) -> Note:
        found = running(self.cache)
        assert found is not None
        return found

    def leases(self) -> list[dict[str, Any]]:
        found = find_service(self.cache)
        assert found is not None
        return ask(found.address, "GET", "/memory")["leases"]

    def writes(self, where: str, text: Any = "a cat", **answer: Any) -> Outcome:
        return self.run(writing(text, where=where, **answer))


def streams(message: Message) -> bool:
    """Whether it brings text of the model."""
    return message.kind == "text" and len(message.data["text"]) > 3 and message.data["text"] != WAITING


def loads(message: Message, nbytes: int) -> bool:
    """Whether it brings the progress of a load of so many bytes."""
    return message.kind == "progress_state" and message.data["nodes"].get("write", {}).get("max", 0) == nbytes


@pytest.fixture(scope="module")
def far() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Far)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def tree(base: Path, port: int) -> Path:
    """The folders, the settings, and an environment envs/onedesk that has what this one has; returns its Python."""
    for name in ("models", "custom_nodes", "input", "output", "user", "temp"):
        (base / name).mkdir()
    (base / "custom_nodes" / "onedesk").symlink_to(REPOSITORY, target_is_directory=True)
    (base / "custom_nodes" / "onedesk_tests").symlink_to(
        REPOSITORY / "tests" / "comfyui_pack", target_is_directory=True
    )
    write_language_model(base / "models" / "llm" / MODEL)
    keep_kernels(base / "cache")
    (base / "key").write_text(KEY)
    (base / "key").chmod(0o600)
    peer = f'kind = "openai"\nkey_file = "key"\nmodel = "far-away"\nurl = "http://127.0.0.1:{port}/v1"'
    (base / "onedesk.toml").write_text(
        f'[models]\nroots = ["models/llm"]\n[service]\nlinger = 1\n[peers.far]\n{peer}\n'
    )
    venv.create(base / "envs" / "onedesk", symlinks=True)
    (packages,) = (base / "envs" / "onedesk").glob("lib/python3*/site-packages")
    (ours,) = Path(sys.prefix).glob("lib/python3*/site-packages")
    packages.rmdir()
    packages.symlink_to(ours, target_is_directory=True)
    return base / "envs" / "onedesk" / "bin" / "python"


@pytest.fixture(scope="module")
def desk(comfyui_folder: Path, tmp_path_factory: pytest.TempPathFactory, far: int) -> Iterator[Desk]:
    base = tmp_path_factory.mktemp("desk")
    python = tree(base, far)
    words = (
        "--database-url sqlite:///:memory: --disable-auto-launch --disable-api-nodes --disable-all-custom-nodes --cpu"
    )
    arguments = ["--base-directory", str(base), *words.split(), "--whitelist-custom-nodes", "onedesk", "onedesk_tests"]
    process = BoundComfy(
        python, comfyui_folder, arguments, log=base / "comfyui.log", environment=Tree(base).environment()
    )
    process.start()
    made = Desk(process, base)
    made.port = far
    yield made
    process.stop()


def test_the_loader_offers_places_and_starts_nothing(desk: Desk) -> None:
    inputs = desk.object_info("OnedeskLoadModel")["input"]
    assert list(inputs["optional"])[-1] == "where"
    assert inputs["optional"]["where"][1]["options"] == ["in this process", SERVICE, FAR]
    assert desk.run({"load": load(where=SERVICE), "show": show("load")}).ok
    assert not taken(desk.cache)


def test_the_first_text_starts_the_service_with_equal_output(desk: Desk) -> None:
    outcome = desk.writes(SERVICE, seed=2**64 - 1, max_tokens=200)
    text = shown(outcome, "text")
    assert len(text) == 200
    assert desk.note.pid != desk.process.child.pid  # type: ignore[union-attr]
    # It came while it was written: the text grew from one look to the next, and so did the progress.
    seen = [message.data["text"] for message in outcome.texts("write") if message.data["text"]]
    assert len({len(one) for one in seen if text.startswith(one)}) > 1
    assert WAITING in seen
    assert "tiny-writer (the local service)" in shown(outcome, "stats")
    assert f"seed {2**64 - 1}" in shown(outcome, "stats")
    assert shown(desk.writes("in this process", seed=2**64 - 1, max_tokens=200), "text") == text
    assert len([entry for entry in state(desk)["comfyui"] if entry["name"] == "OnedeskModel" and entry["loaded"]]) == 2


def test_stop_keeps_the_text_and_frees_the_place(desk: Desk) -> None:
    run = desk.start(writing("on and on", where=SERVICE, seed=3, max_tokens=900))
    run.wait_until(streams)
    run.interrupt()
    outcome = run.result()
    assert outcome.end == "execution_interrupted"
    assert "[stopped after" in outcome.texts("write")[-1].data["text"]
    assert shown(desk.writes(SERVICE, seed=4), "text") == shown(desk.writes("in this process", seed=4), "text")


def test_a_place_in_the_services_queue_is_shown(desk: Desk) -> None:
    assert desk.writes(SERVICE, seed=20).ok
    found = find_service(desk.cache)
    assert found is not None
    ask(found.address, "POST", "/memory/sleep", {"wake": "manual"})
    run = desk.start(writing("a cat", where=SERVICE, seed=21))
    run.wait_until(
        lambda message: message.kind == "text" and "its turn at the service, position 1" in message.data["text"]
    )
    ask(found.address, "POST", "/memory/wake", {})
    assert run.result().ok


def test_a_list_is_written_together_and_gives_way_after_the_last(desk: Desk) -> None:
    graph = writing(["list", 0], where=SERVICE, seed=5, policy=GIVE_WAY)
    graph["list"] = node("TestList", texts=json.dumps(["one", "two", "three"]))
    outcome = desk.run(graph)
    assert len(outcome.outputs["text"]["text"]) == 3
    assert "gave way: tiny-writer" in outcome.outputs["stats"]["text"][-1]
    assert "measured" in outcome.outputs["stats"]["text"][-1]
    assert not [row for row in desk.leases() if row["owner"] == MODEL]


def test_comfyui_evicts_it_measured_and_the_next_text_wakes_it(desk: Desk) -> None:
    text = shown(desk.writes(SERVICE, seed=6), "text")
    report = shown(desk.run({"memory": node("OnedeskMemory", **MEMORY), "report": show("memory", 1)}), "report")
    assert "tiny-writer (the local service): holds " in report
    held = sum(row["bytes"] for row in desk.leases() if row["owner"] == MODEL)
    assert desk.run({"room": node("TestRoom", value="x", bytes=1 << 40, busy=False, turn=6)}).ok
    assert held > 0
    assert not [row for row in desk.leases() if row["owner"] == MODEL]
    free(desk)
    again = desk.writes(SERVICE, seed=6)
    assert shown(again, "text") == text
    assert "ComfyUI took the room" in shown(again, "stats")


def test_release_and_the_memory_node_reach_it(desk: Desk) -> None:
    graph = writing("to be released", where=SERVICE, seed=11)
    graph["release"] = node("OnedeskRelease", value=["write", 0], model=["load", 0])
    graph["report"] = show("release", 1)
    assert "measured" in shown(desk.run(graph), "report")
    assert not [row for row in desk.leases() if row["owner"] == MODEL]
    assert desk.writes(SERVICE, seed=12).ok
    assert desk.run({"memory": node("OnedeskMemory", **MEMORY | {"policy": "pinned"})}).ok
    assert {row["policy"] for row in desk.leases() if row["owner"] == MODEL} == {"pinned"}
    assert desk.writes(SERVICE, seed=13).ok
    assert {row["policy"] for row in desk.leases() if row["owner"] == MODEL} == {"stay"}


def test_what_does_not_fit_there_is_refused_with_its_figures(desk: Desk) -> None:
    folder = desk.models / "llm" / "boundless"
    shutil.copytree(desk.models / "llm" / MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**31 - 1}))
    outcome = desk.writes(SERVICE, model=folder.name, context=2**31 - 1)
    assert outcome.last["exception_type"].endswith("MemoryFull")
    assert "boundless needs " in outcome.error
    assert "KV 1024 GiB" in outcome.error


def tenant(desk: Desk) -> int | None:
    """What the service thinks that ComfyUI's models hold; None where it does not know ComfyUI."""
    return next((row["held"] for row in desk.leases() if row["owner"] == "ComfyUI"), None)


def wait_until(true: Callable[[], bool], seconds: float = 15.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_the_service_asks_comfyuis_models_for_memory(desk: Desk) -> None:
    large = 32 << 20
    graph = {
        "model": node("TestLargeModel", bytes=large),
        "use": node("TestUseModel", model=["model", 0]),
        "show": show("use"),
    }
    assert desk.run(graph).ok
    wait_until(lambda: (tenant(desk) or 0) >= large)
    found = find_service(desk.cache)
    assert found is not None
    (row,) = ask(found.address, "POST", "/memory/release", {"owner": "ComfyUI"}, seconds=30)["released"]
    assert row["asked"] >= large
    wait_until(lambda: tenant(desk) == 0)


def test_hidden_states_stay_in_the_process(desk: Desk) -> None:
    graph: Graph = {
        "load": load(where=SERVICE),
        "encode": node("OnedeskTextEncoder", model=["load", 0], text="a cat", layers="-2"),
    }
    graph["encode"]["inputs"] |= {"template": "chat", "min_tokens": 0}
    graph["show"] = show("encode")
    outcome = desk.run(graph)
    assert outcome.end == "execution_error"
    assert "gives no hidden states; load it 'in this process'" in outcome.error


def test_a_killed_service_is_reported_and_restarted(desk: Desk) -> None:
    """While it loads, and while it streams."""
    first = desk.note.pid
    nbytes = write_hole(desk.models / "llm" / MODEL, desk.models / "llm" / "bulky")
    for pid, stage, model in ((first, "load", "bulky"), (None, "stream", MODEL)):
        run = desk.start(writing("on and on", where=SERVICE, model=model, seed=7, max_tokens=900))
        run.wait_until(lambda message, stage=stage: loads(message, nbytes) if stage == "load" else streams(message))
        os.kill(pid or desk.note.pid, signal.SIGKILL)
        outcome = run.result()
        assert outcome.end == "execution_error"
        assert outcome.last["exception_type"].endswith("PeerError")
        assert outcome.error.startswith("the local service ")
        assert not outcome.outputs
    assert len(shown(desk.writes(SERVICE, seed=8), "text")) == 12
    assert desk.note.pid != first
    assert not alive(first)


def test_a_peers_address_and_key_appear_nowhere(desk: Desk) -> None:
    graph = writing("far away", where=FAR)
    graph["picture"] = node("EmptyImage", width=8, height=8, batch_size=1, color=0)
    graph["save"] = node("SaveImage", images=["picture", 0], filename_prefix="far")
    outcome = desk.run(graph)
    assert shown(outcome, "text") == "a far cat"
    assert "far-away (the server far)" in shown(outcome, "stats")
    (picture,) = desk.pictures(outcome)
    (desk.base / "key").write_text("sk-another-one-0123456789")
    refused = desk.writes(FAR, "once more")
    (desk.base / "key").write_text(KEY)
    assert "the server far refuses the key" in refused.error
    seen = [picture.read_bytes(), desk.process.log.read_bytes(), json.dumps([outcome.outputs, refused.last]).encode()]
    seen.append(json.dumps([desk.client.history(outcome.id), desk.client.history(refused.id)]).encode())
    assert b"other server: far" in seen[0]
    for secret in (KEY.encode(), b"sk-another", f":{desk.port}".encode()):
        assert not [place for place, content in enumerate(seen) if secret in content]


def test_a_place_that_is_not_there_is_refused_when_it_is_queued(desk: Desk) -> None:
    with pytest.raises(Exception, match=r"`where` is 'other server: gone'; use one of in this process, local service"):
        desk.run(writing("x", where="other server: gone"))


def test_a_comfyui_that_is_killed_leaves_no_lease_and_no_service(desk: Desk) -> None:
    assert desk.writes(SERVICE, seed=9).ok
    pid, child = desk.note.pid, desk.process.child
    assert child is not None
    wait_until(lambda: tenant(desk) is not None)
    child.kill()
    child.wait()
    wait_until(lambda: tenant(desk) is None)
    wait_until(lambda: not alive(pid), 30)
    assert read_note(desk.cache) is None
    assert not taken(desk.cache)
