"""The documents are accurate: every link points to a file, every named option and command exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from onedesk.service.cli.command import main

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document):
    links = LINK.findall(document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_both_readmes_speak_of_the_same_things():
    english, chinese = ((REPOSITORY / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    for pattern in (
        r"`Onedesk\w+`",
        r"(?<=`)onedesk \w+",
        r"(?<=\]\()[\w./-]+\.(?:md|png)",
        r"(?<=[` ])--[a-z][a-z-]*",
        r"`qwen\w+`",
    ):
        assert set(re.findall(pattern, english)) - {"README.zh.md"} == set(re.findall(pattern, chinese)) - {"README.md"}
    for pattern in ("^## ", r"^\|", "^```"):
        assert len(re.findall(pattern, english, re.M)) == len(re.findall(pattern, chinese, re.M)), pattern


def test_every_documented_command_can_be_asked_for_help(capsys):
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    commands = sorted(set(re.findall(r"^\| `onedesk (\w+)", text, re.M)))
    assert {"generate", "models", "memory", "doctor", "bench"} <= set(commands)
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0


def test_every_option_in_the_reference_exists_and_every_one_that_exists_is_there(capsys):
    text = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    common = {*re.findall(r"--[\w-]+", text[: text.index("- **Model.**")]), "--help", "--verbose"}
    for row in re.findall(
        r"^\| `(?:generate|score|models|pull|quantize|memory|doctor|bench|serve|demo)[^\n]*", text, re.M
    ):
        command = re.search(r"`(\w+)", row)
        assert command
        with pytest.raises(SystemExit):
            main([command[1], "--help"])
        shown = capsys.readouterr().out
        assert [option for option in re.findall(r"`(--[\w-]+)", row) if option not in shown] == []
        assert [option for option in {*re.findall(r"--[a-z-]+", shown)} - common if option not in row] == []
