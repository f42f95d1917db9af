"""`onedesk knowledge`: its documents and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run
from onedesk.service.cli import command as cli


def test_a_base_is_made_searched_updated_and_removed(run: Run, tree: Path, tmp_path: Path) -> None:
    note = tmp_path / "note.md"
    note.write_text("# Mats\nOne cat sleeps here.", encoding="utf-8")
    status, made = run("knowledge", "add", "desk", str(tmp_path))
    assert (status, made["added"], made["failed"], made["sources"], made["pieces"]) == (0, [str(note)], [], 1, 1)
    assert (tree / "data" / "knowledge" / "desk.sqlite").is_file()
    status, found = run("knowledge", "search", "desk", "a sleeping", "cat", "--count", "1")
    (piece,) = found["pieces"]
    assert (status, found["method"]) == (0, "bm25")
    assert set(piece) == {"source", "heading", "start", "end", "text", "score"}
    assert (piece["source"], piece["heading"], piece["score"] != 0) == (str(note), "Mats", True)
    (tmp_path / "broken.docx").write_bytes(b"PK")
    status, again = run("knowledge", "update", "desk")
    assert (status, again["unchanged"]) == (1, 1)
    assert "broken.docx is damaged" in again["failed"][0]["reason"]
    ((row,), listed) = run("knowledge", "list")[1], run("knowledge", "list")[0]
    assert (listed, row["name"], row["sources"], row["pieces"]) == (0, "desk", 1, 1)
    assert row["bytes"] > 0
    assert run("knowledge", "remove", "desk") == (0, {"removed": "desk"})
    assert run("knowledge", "list") == (0, [])
    status, failed = run("knowledge", "search", "desk", "cat")
    assert (status, failed["error"]["type"]) == (1, "RequestError")
    assert note.is_file()


@pytest.mark.parametrize(
    "words", [("search",), ("add", "desk"), ("burn", "desk"), ("search", "desk", "a", "--count", "0")]
)
def test_wrong_usage_is_status_2(run: Run, words: tuple[str, ...]) -> None:
    assert run("knowledge", *words)[0] == 2


def test_results_are_numbered_for_reading(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one cat")
    options = ("--config", str(tree / "onedesk.toml"))
    assert cli.main(["knowledge", "add", "read", str(tmp_path), *options]) == 0
    assert "1 added, 0 changed, 0 unchanged, 0 removed; 1 sources, 1 pieces, found by words" in capsys.readouterr().out
    assert cli.main(["knowledge", "search", "read", "cat", *options]) == 0
    assert "[1] " in (shown := capsys.readouterr().out)
    assert "a.txt, no heading, characters 0-7\none cat" in shown
    assert cli.main(["knowledge", "remove", "read", *options]) == 0
