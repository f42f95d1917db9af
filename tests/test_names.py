"""One word for one thing: no class or file name stands for two things, and no retired word comes back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = sorted(path for room in ("service", "nodes") for path in (ROOT / room).rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "nodes" / "web").rglob("*.md")])
# A file in these rooms is named after the subcommand, node or route that it holds, so one word may stand in each.
FACES = ("service/cli", "nodes", "service/server")
# Files that may share a name, because each room has exactly one thing of that kind.
SHARED = {
    "choose": "which implementation runs",
    "names": "how names are read, of models and of repositories",
    "plan": "what a plan holds, of a model and of a download",
    "remote": "the far side, of a peer and of a hub",
    "stream": "streamed reading of files, and of text",
    "encode": "pictures to bytes, and the node of that name",
    "describe": "a subcommand and a node",
}
# Private words of earlier versions, each with the field's word that replaced it.
RETIRED = {
    r"\bwhoever\b": "name the person or the part",
    r"\banew\b": "again",
    r"\bbeginnings?\b": "prefix, or start",
    r"\bguess(es|ed|ing)?\b": "draft token",
    r"\btrails?\b": "verify pass",
    r"\bjoints?\b": "hyper-connection",
    r"\bstretch(es)?\b": "captured sequence, key block, or range",
}


def spoken(path: Path) -> list[str]:
    """The comments and texts of a Python file, each with its line number; other files whole."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return [f"{path.name}: {text}"]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = (tokenize.COMMENT, tokenize.STRING)
    return [f"{path.name}:{token.start[0]}: {token.string}" for token in tokens if token.type in kinds]


def retired_in(lines: list[str]) -> list[str]:
    found = []
    for line in lines:
        for pattern, advice in RETIRED.items():
            if match := re.search(pattern, line, re.I):
                found.append(f"{line[:80]!r} says {match[0]!r}: {advice}")
    return found


def test_a_class_name_stands_for_one_thing():
    places = defaultdict(list)
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_file_name_stands_for_one_thing():
    places = defaultdict(list)
    for path in CODE:
        if not path.name.startswith("__") and not any(path.parent == ROOT / face for face in FACES):
            places[path.stem].append(path.relative_to(ROOT).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED} == {}


@pytest.mark.parametrize("path", [*CODE, *DOCUMENTS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_retired_word_comes_back(path: Path):
    if path.name != "CHANGELOG.md":  # older entries keep the words of their time
        assert retired_in(spoken(path)) == []


def test_the_check_itself_finds_a_retired_word(tmp_path: Path):
    (tmp_path / "wrong.py").write_text('def begin():\n    """Compute it anew."""  # whoever asks\n')
    assert len(retired_in(spoken(tmp_path / "wrong.py"))) == 2
