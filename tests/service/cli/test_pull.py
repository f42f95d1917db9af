"""`onedesk pull` as it is typed: plans, events, exit statuses, an interrupt, the line of progress on a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bound import bound
from command_line import COMMAND, ENDS_WITHIN
from hub_server import TOKEN, Fault, Hub, Repository, running_hub
from onedesk.service.cli import command as cli
from onedesk.service.cli.pull import make_verdict
from onedesk.service.config import load_config
from tiny_models import write_language_model

WRITER = "Qwen/Tiny-Writer"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def writer_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_language_model(tmp_path_factory.mktemp("writer") / "tiny", hidden=64)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(writer_files: dict[str, bytes]) -> Iterator[Hub]:
    with running_hub() as running:
        running.repositories[WRITER] = Repository(writer_files)
        yield running


@pytest.fixture
def tree(tmp_path: Path, hub: Hub) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "onedesk.toml").write_text(f'[hub]\nendpoints = ["{hub.address}"]\norder = ["hf"]\nstall = 2\n')
    return tmp_path


def pull(tree: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["pull", *arguments, "--config", str(tree / "onedesk.toml")])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_dry_run_prints_one_document_and_fetches_nothing(tree: Path, capsys: pytest.CaptureFixture[str]):
    status, out, _ = pull(tree, capsys, WRITER, "--dry-run", "--json")
    document = json.loads(out)
    assert status == 0
    assert {"repo", "commit", "files", "bytes", "missing", "license", "gated", "disk_free", "fits"} <= set(document)
    assert document["missing"] == document["bytes"] == sum(file["size"] for file in document["files"])
    assert document["fits"] is True
    assert list((tree / "models").iterdir()) == []


def test_a_pull_prints_a_line_per_event_and_the_model_writes(tree: Path, capsys: pytest.CaptureFixture[str]):
    status, out, err = pull(tree, capsys, WRITER, "--json")
    told = events(out)
    assert status == 0
    assert err == ""
    assert told[0]["event"] == "plan"
    done = told[-1]
    assert done["event"] == "done"
    assert {"folder", "commit", "files", "bytes", "fetched"} <= set(done)
    assert done["models"][0]["opens"] is True
    assert cli.main(["models", "--json", "--config", str(tree / "onedesk.toml")]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["name"] == "Tiny-Writer")
    assert row["pulled"]["state"] == "complete"
    assert row["pulled"]["repo"] == WRITER
    (tree / "models" / "Tiny-Writer" / "tokenizer.json").unlink()
    assert cli.main(["models", "--config", str(tree / "onedesk.toml")]) == 0
    assert f"4 of 5; get the rest: onedesk pull {WRITER}" in " ".join(capsys.readouterr().out.split())


def test_the_plan_is_shown_before_and_the_next_command_after(tree: Path, capsys: pytest.CaptureFixture[str]):
    status, out, err = pull(tree, capsys, WRITER)
    assert status == 0
    assert "licence apache-2.0" in out
    assert "fits as it is" in out
    assert "onedesk generate --model Tiny-Writer" in out
    assert "fetched   model.safetensors" in err
    status, out, _ = pull(tree, capsys, WRITER, "--verify")
    assert status == 0
    assert "is what was pulled: 5 files" in out


def test_an_unknown_model_type_stops_after_its_config(tree: Path, hub: Hub, capsys: pytest.CaptureFixture[str]):
    hub.repositories["x/other"] = Repository({"config.json": b'{"model_type": "llama9"}', WEIGHTS: bytes(50_000)})
    status, _, err = pull(tree, capsys, "x/other")
    assert status == 1
    assert "llama9" in err
    assert hub.count(WEIGHTS) == 0
    assert list((tree / "models").iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("not a name",),
        (WRITER, "--verify", "--dry-run"),
        (WRITER, "--model", "x"),
        (WRITER, "--quant", "int4"),
        (),
    ],
)
def test_wrong_usage_is_2(tree: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]):
    status, out, err = pull(tree, capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("onedesk: ")


def test_a_failure_is_one_document_and_has_no_token(
    tree: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repositories[WRITER].token = "another"
    hub.repositories[WRITER].gated = "manual"
    status, out, err = pull(tree, capsys, WRITER, "--json")
    assert status == 1
    assert "gated" in events(out)[-1]["error"]["message"]
    assert TOKEN not in out + err


def started(tree: Path, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    command = bound([*COMMAND, "pull", WRITER, *arguments, "--config", str(tree / "onedesk.toml")])
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)


def test_an_interrupted_pull_can_be_continued(
    tree: Path, hub: Hub, writer_files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
):
    hub.always["storage", WEIGHTS] = Fault("stall", 100_000)
    child = started(tree, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    part = tree / "models" / "Tiny-Writer" / f"{WEIGHTS}.part"
    ends = time.monotonic() + ENDS_WITHIN
    while hub.count(WEIGHTS) == 0 and time.monotonic() < ends:
        time.sleep(0.05)
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=ENDS_WITHIN)
    assert child.returncode == 130
    assert f"continue with: onedesk pull {WRITER} --config {tree}/onedesk.toml".encode() in err
    assert b"Traceback" not in err
    assert part.exists()
    del hub.always["storage", WEIGHTS]
    status, out, _ = pull(tree, capsys, WRITER, "--json")
    assert status == 0
    assert events(out)[-1]["fetched"] < len(writer_files[WEIGHTS])
    assert (tree / "models" / "Tiny-Writer" / WEIGHTS).read_bytes() == writer_files[WEIGHTS]


def test_a_terminal_has_one_line_of_progress_that_is_cleared(tree: Path, hub: Hub):
    hub.fault(WEIGHTS, Fault("slow", 200))
    outer, inner = pty.openpty()
    child = started(tree, stdout=subprocess.DEVNULL, stderr=inner)
    os.close(inner)
    shown = b""
    try:
        while block := os.read(outer, 4096):
            shown += block
    except OSError:  # the end of a terminal whose other side is closed
        pass
    finally:
        os.close(outer)
    assert child.wait(ENDS_WITHIN) == 0, shown
    assert b"MB/s" in shown
    assert shown.count(b"\x1b[K") >= 2


def test_the_doctor_asks_each_hub_once(
    tree: Path, hub: Hub, writer_files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
):
    toml = tree / "onedesk.toml"
    toml.write_text(f'[hub]\nendpoints = ["{hub.address}"]\nmodelscope = "http://127.0.0.1:9"\n')
    hub.repositories["Qwen/Qwen3-0.6B"] = Repository(writer_files)
    assert cli.main(["doctor", "--hub", "--json", "--config", str(toml)]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["status"] for check in checks] == ["ok", "failure"]
    assert "1024 bytes of model.safetensors from 127.0.0.1" in checks[0]["detail"]
    assert "status 206" in checks[0]["detail"]
    assert "no connection to 127.0.0.1" in checks[1]["detail"]
    assert hub.count(WEIGHTS) == 1
    assert list((tree / "models").iterdir()) == []


def test_the_verdict_includes_the_language_model(tree: Path):
    config = load_config(tree / "onedesk.toml")
    verdict = make_verdict(config, None, "cpu")
    assert verdict("Qwen3-0.6B", None, 1).fits in (True, False)
    assert "tokens" in verdict("Qwen3-0.6B", None, 1).text
    assert verdict("Qwen3-0.6B", None, 1 << 50).fits is False
    assert verdict("", None, 1).fits is True
    assert verdict("", None, 1 << 50).fits is False
