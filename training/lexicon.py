"""Reads the word lists in training/lexicon: sections of english=chinese entries."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).with_name("lexicon")
CLASSES = ("animal", "person", "building", "vehicle", "craft", "plant", "food", "object", "nature", "fantasy")
CATEGORIES = ("medium", "light", "lens", "palette", "mood", "detail")


@dataclass(frozen=True, slots=True)
class Entry:
    """One concept in both languages; `kind` is its section, `measure` the Chinese measure word of a subject."""

    en: str
    zh: str
    kind: str = ""
    measure: str = ""

    def text(self, lang: str) -> str:
        return self.en if lang == "en" else self.zh


def read_sections(name: str) -> dict[str, tuple[Entry, ...]]:
    """Sections of one word list: the text in the brackets -> its entries."""
    body = "\n".join(
        line for line in (FOLDER / f"{name}.txt").read_text("utf-8").splitlines() if not line.startswith("#")
    )
    sections: dict[str, tuple[Entry, ...]] = {}
    for head, text in re.findall(r"\[([^\]]+)\]\n([^\[]*)", body):
        pairs = [item.strip().split("=") for item in text.replace("\n", ";").split(";") if item.strip()]
        sections[head] = tuple(Entry(en, zh, head) for en, zh in pairs)
    return sections


@dataclass(frozen=True, slots=True)
class Lexicon:
    """All lists, sorted by what they may be combined with."""

    subjects: tuple[Entry, ...]
    kinds: dict[str, tuple[Entry, ...]]
    adjectives: tuple[Entry, ...]
    actions: dict[str, tuple[Entry, ...]]
    places: tuple[Entry, ...]
    extras: tuple[Entry, ...]
    attributes: dict[str, tuple[Entry, ...]]

    def concepts(self) -> int:
        """The number of concepts: each subject alone, and with each modifier of the kind that it allows."""
        return sum(1 + len(self.kinds[s.kind]) for s in self.subjects)


def _by_class(sections: dict[str, tuple[Entry, ...]], word: str) -> dict[str, tuple[Entry, ...]]:
    found: dict[str, tuple[Entry, ...]] = dict.fromkeys(CLASSES, ())
    for head, entries in sections.items():
        first, *classes = head.split()
        if first == word:
            for name in classes:
                found[name] += entries
    return found


@lru_cache(maxsize=1)
def load() -> Lexicon:
    """Read all lists once."""
    subjects = tuple(
        Entry(e.en, e.zh, head.split()[0], head.split()[1])
        for head, entries in read_sections("subjects").items()
        for e in entries
    )
    modifiers, actions = read_sections("modifiers"), read_sections("actions")
    return Lexicon(
        subjects=subjects,
        kinds=_by_class(modifiers, "kind"),
        adjectives=modifiers["adjective"],
        actions=_by_class(actions, "action"),
        places=actions["place"],
        extras=actions["with"],
        attributes=read_sections("attributes"),
    )
