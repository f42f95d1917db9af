"""`onedesk quantize`: the document, wrong usage, and that the next command finds what it made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kept_kernels import keep_kernels
from onedesk.service.cli.command import main
from onedesk.service.engine import session
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.loader.header import read_header
from onedesk.service.registry import REGISTRY
from published import CASES, change_tensors, quantize_embedding, write_published
from tiny_qwen3 import write_tiny_qwen3

Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write_tiny_qwen3(tmp_path / "models" / "tiny", dtype="bfloat16", hidden=128)
    (tmp_path / "onedesk.toml").write_text("", encoding="utf-8")
    keep_kernels(tmp_path / "cache")
    return tmp_path


@pytest.fixture
def run(tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs the command with --json, with kernels that need no compiler; returns its status and the document."""
    monkeypatch.setattr(session, "choose_kernels", lambda *_: ReferenceKernels())

    def command(*arguments: str) -> tuple[int, Any]:
        status = main([*arguments, "--json", "--config", str(tree / "onedesk.toml")])
        return status, json.loads(capsys.readouterr().out)

    yield command
    REGISTRY.close()


def test_the_document_says_what_was_made_and_where(run: Run, tree: Path) -> None:
    status, document = run("quantize", "--quant", "int4", "--group", "32", "--asymmetric")
    assert status == 0
    assert document.keys() == {
        "model",
        "quant",
        "format",
        "path",
        "source_bytes",
        "bytes",
        "content",
        "written",
        "seconds",
    }
    assert (document["model"], document["quant"], document["written"]) == ("tiny", "int4", True)
    assert set(document["format"].split("+")) == {"int4-g32-asym", "int8"}
    place = Path(document["path"])
    assert place.parent == tree / "cache" / "quantized"
    assert sorted(path.name for path in place.iterdir()) == ["source.json", "weights.safetensors"]
    assert read_header(place / "weights.safetensors").metadata["content"] == document["content"]
    again = run("quantize", "--quant", "int4", "--group", "32", "--asymmetric")[1]
    assert not again["written"]
    assert {**again, "written": True, "seconds": 0} == {**document, "seconds": 0}


def test_later_commands_find_it(run: Run, tree: Path) -> None:
    before = run("score", "--ids", "1,2,3,4", "--quant", "int8")[1]
    run("quantize", "--quant", "int8")
    assert run("score", "--ids", "1,2,3,4", "--quant", "int8")[1] == before
    run("quantize", "--quant", "int4", "--group", "32")
    row = run("models", "--quant", "int4")[1][0]
    assert set(row["format"].split("+")) == {"int4-g32", "int8"}
    assert row["quant"] == "int4"
    assert (
        row["bytes"]["weights"]
        < run("models", "--quant", "int8")[1][0]["bytes"]["weights"]
        < run("models")[1][0]["bytes"]["weights"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quant", "none"], "quantize needs --quant int8 or --quant int4"),
        ([], "quantize needs --quant int8 or --quant int4"),
        (["--quant", "int8", "--group", "32"], "--group and --asymmetric are for --quant int4, not int8"),
        (["--quant", "int8", "--asymmetric"], "--group and --asymmetric are for --quant int4, not int8"),
        (["--quant", "int4", "--group", "64"], "invalid choice: 64"),
        (["--quant", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_wrong_usage_is_told(run: Run, arguments: list[str], message: str) -> None:
    status, document = run("quantize", *arguments)
    assert (status, document["error"]["type"]) == (2, "UsageError")
    assert message in document["error"]["message"]


def test_only_unquantized_weights_are_converted(run: Run, tree: Path) -> None:
    by_name = {case.name: case for case in CASES}
    write_published(tree / "models" / "gptq", by_name["gptq-sym-128"], dtype="float16", tied=False)
    status, document = run("quantize", "--model", "gptq", "--quant", "int8")
    assert status == 0
    assert set(document["format"].split("+")) == {"int4-g128", "int8"}
    folder, _ = write_published(tree / "models" / "whole", by_name["int8-channel"])
    change_tensors(folder, quantize_embedding)
    status, document = run("quantize", "--model", "whole", "--quant", "int4")
    assert (status, document["error"]["type"]) == (1, "RequestError")
    assert (
        "whole is stored quantized already (int8); open it as it is, with --quant none" in document["error"]["message"]
    )


def test_without_room_in_memory_nothing_is_begun(run: Run, tree: Path) -> None:
    (tree / "onedesk.toml").write_text('[memory]\nlimit_bytes = "200KiB"\n', encoding="utf-8")
    status, document = run("quantize", "--quant", "int8")
    assert (status, document["error"]["type"]) == (1, "MemoryFull")
    assert not (tree / "cache" / "quantized").exists()


def test_for_people_it_says_format_size_and_place(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "--quant", "int8", "--config", str(tree / "onedesk.toml")]) == 0
    told = capsys.readouterr().out
    assert str(tree / "cache" / "quantized") in told
    assert "int8, " in told
    assert " of the checkpoint; made in " in told
