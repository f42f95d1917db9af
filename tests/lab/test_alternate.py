"""Writing and drawing in turn: what counts as a promise kept, against a ComfyUI that is played and (on its CPU) a
real one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from comfyui import Comfy
from node_graphs import free, node, shown, writing
from onedesk.lab import alternate
from onedesk.lab.alternate import (
    DRAWN,
    WRITTEN,
    WorkflowChoice,
    broken_promises,
    drift,
    measure,
    port_of,
)
from onedesk.service.errors import RequestError

GIB = 1 << 30
CHOICE = WorkflowChoice(
    "tiny-writer", "tiny_painter_16.safetensors", "tiny_encoder.safetensors", "tiny_coder.safetensors", tokens=4
)
GIVEN = {"owner": "w", "asked": 2 * GIB, "measured": 2 * GIB, "seconds": 0.25}


def report(*, painter: int, ours: int, evictions: int, **changes: Any) -> dict[str, Any]:
    core = [{"name": "Flux", "size": 3 * GIB, "loaded": painter, "dynamic": False}]
    core += [{"name": "OnedeskModel", "size": 2 * GIB, "loaded": ours, "dynamic": False}] if ours else []
    return {
        "time": 1000.0,
        "core": core,
        "ours": ours,
        "evictions": evictions,
        "given": [GIVEN],
        "used": painter + ours,
    } | changes


def kept(cycle: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A cycle as it should be: writing shrinks the painter, drawing takes all that the writer has."""
    return report(painter=GIB, ours=2 * GIB, evictions=cycle), report(
        painter=3 * GIB, ours=0, evictions=cycle + 1, time=1000.5
    )


class Played:
    """A ComfyUI that answers as told: one pair of reports a workflow, or an error's text."""

    def __init__(self, cycles: Sequence[tuple[dict[str, Any], dict[str, Any]] | str], absent: str = "") -> None:
        self.prompts: list[dict[str, Any]] = []
        played = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(played.asked(self.path, cycles, absent))

            def do_POST(self) -> None:
                played.prompts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"])
                self.answer({"prompt_id": str(len(played.prompts) - 1)})

            def answer(self, document: Any) -> None:
                body = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def asked(self, path: str, cycles: Sequence[tuple[dict[str, Any], dict[str, Any]] | str], absent: str) -> Any:
        kind, _, name = path[1:].partition("/")
        if kind == "system_stats":
            card = {
                "name": "a card",
                "type": "cuda",
                "vram_total": 8 * GIB,
                "vram_free": 3 * GIB,
                "torch_vram_free": GIB,
            }
            system = {
                "comfyui_version": "0",
                "pytorch_version": "0",
                "argv": ["/secret/main.py", "--reserve-vram", "2", "/secret/base"],
            }
            return {"system": system, "devices": [card]}
        if kind == "object_info":
            return {} if name == absent else {name: {}}
        cycle = cycles[int(name)]
        if isinstance(cycle, str):
            messages = [["execution_start", {}], ["execution_error", {"exception_message": cycle}]]
            return {name: {"status": {"status_str": "error", "messages": messages}, "outputs": {}}}
        outputs = {step: {"text": [json.dumps(figures)]} for step, figures in zip((WRITTEN, DRAWN), cycle, strict=True)}
        return {name: {"status": {"status_str": "success", "messages": []}, "outputs": outputs}}


@pytest.fixture
def play() -> Iterator[Any]:
    running: list[Played] = []

    def start(*arguments: Any, **options: Any) -> Played:
        running.append(Played(*arguments, **options))
        return running[-1]

    yield start
    for played in running:
        played.server.shutdown()
        played.server.server_close()


def test_a_run_without_broken_promises_exits_0(play, capsys, tmp_path):
    played = play([kept(0), kept(1), kept(2), kept(3)])
    assert alternate.main([played.url, "--cycles", "3", "--json", "--rows", str(tmp_path / "rows")]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()] == document["rows"]
    assert (document["cycles"], document["failures"], len(document["rows"])) == (3, [], 6)
    assert document["steps"][WRITTEN]["comfyui"] == {"min": GIB, "median": GIB, "max": GIB}
    assert document["steps"][DRAWN]["release_seconds"]["median"] == 0.25
    assert document["steps"][DRAWN]["seconds"]["max"] == 0.5
    assert document["drift_bytes"] == 0
    assert "3 cycles on a card" in printed.err
    assert "every promise kept" in printed.err
    assert "/secret" not in printed.out  # where that ComfyUI lies is nobody's business
    assert "--reserve-vram" in document["arguments"]
    seeds = {prompt["write"]["inputs"]["seed"] for prompt in played.prompts}
    assert len(seeds) == 4
    assert all(prompt["draw"]["inputs"]["seed"] in seeds for prompt in played.prompts)


BEFORE = kept(0)[1]


@pytest.mark.parametrize(
    ("written", "drawn", "words"),
    [
        ({"ours": 0}, {}, "the writer holds nothing after writing"),
        ({"painter": 3 * GIB}, {}, "writing took no room from ComfyUI's models"),
        ({}, {"ours": 5}, "the writer still holds 5 bytes after drawing"),
        ({}, {"evictions": 1}, "ComfyUI did not ask the writer for its room while drawing"),
        ({}, {"given": [GIVEN | {"measured": int(1.9 * GIB)}]}, "the writer gave back 2040109465 of 2147483648 bytes"),
    ],
)
def test_each_promise_is_held_to_its_own_figure(written, drawn, words):
    first = {"painter": GIB, "ours": 2 * GIB, "evictions": 1} | written
    second = {"painter": 3 * GIB, "ours": 0, "evictions": 2} | drawn
    (found,) = broken_promises(BEFORE, report(**first), report(**second))
    assert found.startswith(words)


def test_a_broken_promise_is_exit_1_with_its_cycle(play, capsys):
    never_left = (report(painter=GIB, ours=2 * GIB, evictions=1), report(painter=3 * GIB, ours=2 * GIB, evictions=1))
    assert alternate.main([play([kept(0), never_left]).url, "--cycles", "1"]) == 1
    assert "cycle 1: the writer still holds 2147483648 bytes after drawing" in capsys.readouterr().out


def test_a_failed_workflow_keeps_earlier_measurements(play):
    played = play([kept(0), kept(1), "CUDA out of memory"])
    document = measure(port_of(played.url), CHOICE, 50)
    assert document["cycles"] == 1
    assert document["failures"] == ["after 1 cycles: a workflow failed: CUDA out of memory"]
    assert len(document["rows"]) == 2


def test_a_comfyui_without_the_test_nodes_is_refused(play, capsys):
    assert alternate.main([play([], absent="TestMemory").url, "--json"]) == 1
    (words,) = json.loads(capsys.readouterr().out)["failures"]
    assert "this ComfyUI has no node TestMemory; put the pack and its tests/comfyui_pack into custom_nodes" in words


def test_what_stays_in_use_is_counted_from_the_first_third_on():
    rows = [{"step": DRAWN, "used": GIB + used} for used in (0, 50, 60, 61, 62, 65)] + [
        {"step": WRITTEN, "used": 9 * GIB}
    ]
    assert drift(rows) == 5
    assert drift([{"step": DRAWN}]) is None


@pytest.mark.parametrize(
    "url", ["http://example.org:8188", "https://127.0.0.1:8188", "http://127.0.0.1", "http://127.0.0.1:99999", "x"]
)
def test_only_a_comfyui_of_this_machine_is_asked(url, capsys):
    with pytest.raises(RequestError, match=r"give a ComfyUI of this machine, such as http://127\.0\.0\.1:8188"):
        port_of(url)
    assert alternate.main([url, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "RequestError"


def test_nobody_at_the_port_is_exit_1(play, capsys):
    played = play([])
    played.server.shutdown()
    played.server.server_close()
    assert alternate.main([played.url]) == 1
    assert "gave no answer" in capsys.readouterr().err


@pytest.mark.parametrize("cycles", ["0", "-1", "many"])
def test_a_wrong_number_of_cycles_is_wrong_usage(cycles):
    with pytest.raises(SystemExit) as ended:
        alternate.main(["http://127.0.0.1:1", "--cycles", cycles])
    assert ended.value.code == 2


def test_no_eviction_is_reported_with_memory_for_both(comfyui: Comfy):
    document = measure(comfyui.client.port, CHOICE, 2)
    assert document["cycles"] == 2
    assert all(row["ours"] > 0 for row in document["rows"])
    assert [row["step"] for row in document["rows"]] == [WRITTEN, DRAWN] * 2
    assert sum("ComfyUI did not ask the writer for its room" in words for words in document["failures"]) == 2


def test_the_report_counts_what_comfyui_takes(comfyui: Comfy):
    free(comfyui)
    graph = writing("count me", seed=77) | {"report": node("TestMemory", value=["write", 0])}
    before = json.loads(shown(comfyui.run(graph), "report"))
    free(comfyui)
    graph["report"] = node("TestMemory", value="afterwards")
    after = json.loads(shown(comfyui.run({"report": graph["report"]}), "report"))
    assert before["ours"] > 0
    assert after["ours"] == 0
    assert after["evictions"] == before["evictions"] + 1
    given = [item for item in after["given"] if item["owner"] == "tiny-writer"]
    assert sum(item["asked"] for item in given) >= sum(item["measured"] for item in given) > 0
