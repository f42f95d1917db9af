"""Ideas in the words of users, and the prompt that the writer should answer with, in three styles and two languages."""

from __future__ import annotations

import hashlib
import json
import random
import re
import string
from dataclasses import dataclass
from pathlib import Path

from . import scenes
from .lexicon import Entry, load

STYLES = ("natural", "tags", "json")
PRESETS = Path(__file__).resolve().parents[1] / "nodes" / "presets"
MAX_WORDS = 46  # of an English answer
MAX_CHARS = 80  # of a Chinese answer: about one token per character

_COMMANDS_EN = (
    "draw {}",
    "paint {}",
    "draw me {}",
    "please draw {}",
    "paint me {}",
    "a picture of {}",
    "an image of {}",
    "i want {}",
    "show me {}",
    "can you draw {}?",
    "{} please",
    "make a picture of {}",
    "create an image of {}",
    "I'd like {}",
)
_COMMANDS_ZH = ("画{}", "请画{}", "画一下{}", "帮我画{}", "我想要{}", "来一张{}的图", "请生成{}的图片", "{}的画")
_ENDINGS = ("", "", "", "", "", "", ".", "!", "...", " ")


@dataclass(frozen=True, slots=True)
class Idea:
    """`text` is the user's input, `core` the part that the answer must contain, `key` the combination by which ideas
    are held out.
    """

    text: str
    core: str
    lang: str
    key: str
    scene: scenes.Scene | None = None


def held_out(key: str) -> bool:
    """True for one combination in twenty; those are never trained on."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % 20 == 0


def preset(style: str) -> str:
    """The system prompt of a style, as the nodes ship it."""
    return (PRESETS / f"{style}.txt").read_text("utf-8").strip()


# ---- ideas


def made_up(rng: random.Random) -> str:
    """A word in no list: the writer must learn to copy unknown words."""
    how = rng.random()
    if how < 0.7:
        parts = (
            "br",
            "k",
            "l",
            "m",
            "v",
            "dr",
            "s",
            "t",
            "gr",
            "n",
            "p",
            "z",
            "fl",
            "th",
            "b",
            "w",
            "j",
            "h",
            "qu",
            "sh",
            "r",
            "y",
            "x",
        )
        ends = ("", "", "n", "l", "r", "k", "x", "sh", "m", "d", "t", "ng", "ff")
        return "".join(rng.choice(parts) + rng.choice("aeiouy") + rng.choice(ends) for _ in range(rng.randint(1, 3)))
    if how < 0.85:
        return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(3, 8)))
    letters = "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(1, 4)))
    return rng.choice(("{}{}", "{}-{}")).format(letters, rng.randint(1, 2099))


def _article(words: str) -> str:
    return ("an " if words[0].lower() in "aeiou" else "a ") + words


def _pick(rng: random.Random, entries: tuple[Entry, ...], chance: float) -> Entry | None:
    return rng.choice(entries) if entries and rng.random() < chance else None


def _english(rng: random.Random) -> tuple[str, str]:
    """(core, key) of a subject with its possible actions, parts and properties."""
    lex = load()
    subject = rng.choice(lex.subjects)
    kind, adjective = _pick(rng, lex.kinds[subject.kind], 0.4), _pick(rng, lex.adjectives, 0.4)
    action, place = _pick(rng, lex.actions[subject.kind], 0.45), _pick(rng, lex.places, 0.5)
    extra = _pick(rng, lex.extras, 0.15)
    noun = subject.en
    if rng.random() < 0.1:
        noun = made_up(rng)
    words = [adjective.en if adjective else "", kind.en if kind and kind != adjective else "", noun]
    if rng.random() < 0.06:
        words.insert(rng.randrange(2), made_up(rng))
    phrase = " ".join(dict.fromkeys(w for w in words if w))
    if rng.random() < 0.68:
        phrase = "the " + phrase if rng.random() < 0.12 else _article(phrase)
    tail = [action.en if action else "", f"with {extra.en}" if extra else "", place.en if place else ""]
    if rng.random() < 0.12:
        other = rng.choice(lex.subjects)
        tail.insert(0, f"and {_article(other.en)}" if rng.random() < 0.6 else f"that dreams of {_article(other.en)}")
    if rng.random() < 0.06:
        tail.append(rng.choice(("called {}", "named {}", "from {}", "near {}")).format(made_up(rng).title()))
    phrase = " ".join([phrase, *(t for t in tail if t)])
    parts = [e.en for e in (adjective, kind, subject, action, extra, place) if e]
    return phrase, "|".join(parts) if len(parts) > 1 else ""


def _salad(rng: random.Random) -> tuple[str, str]:
    """Words from all lists in any order: nothing to know, only to copy."""
    lex = load()
    words = []
    for _ in range(rng.randint(2, 7)):
        how = rng.random()
        pool = lex.subjects if how < 0.4 else lex.adjectives if how < 0.6 else lex.places if how < 0.7 else lex.extras
        words.append(made_up(rng) if how > 0.8 else rng.choice(pool).en)
    words = list(dict.fromkeys(words))
    if rng.random() < 0.3:
        words[0] = _article(words[0])
    return " ".join(words), ""


def _chinese(rng: random.Random) -> tuple[str, str]:
    lex = load()
    subject = rng.choice(lex.subjects)
    kind, adjective = _pick(rng, lex.kinds[subject.kind], 0.35), _pick(rng, lex.adjectives, 0.35)
    action, place = _pick(rng, lex.actions[subject.kind], 0.4), _pick(rng, lex.places, 0.45)
    extra = _pick(rng, lex.extras, 0.1)
    noun = subject.zh
    if rng.random() < 0.08:
        pool = "".join(e.zh for e in rng.sample(lex.subjects, 4))
        noun = "".join(rng.choice(pool) for _ in range(rng.randint(2, 4)))
    head = "".join(dict.fromkeys(e.zh for e in (adjective, kind) if e)) + noun
    if rng.random() < 0.55:
        head = f"一{subject.measure}{head}"
    if extra:
        head = rng.choice(("{}和{}", "带着{1}的{0}" if not head.startswith("一") else "{}与{}")).format(head, extra.zh)
    if place and rng.random() < 0.4 and not head.startswith("一"):
        head = f"{place.zh}的{head}"
    elif place:
        head = head + place.zh
    if action:
        head += rng.choice(("，", "")) + action.zh
    parts = [e.zh for e in (adjective, kind, subject, action, extra, place) if e]
    return head, "|".join(parts) if len(parts) > 1 else ""


def _dress(core: str, lang: str, rng: random.Random, lower_again: bool = False) -> str:
    """Additions of users around an idea: a command, an ending, careless case and spaces.

    The first letter of a bare idea is raised only where the answer lowers it again; elsewhere answers copy it
    unchanged.
    """
    text = core
    if rng.random() < 0.3:
        text = rng.choice(_COMMANDS_EN if lang == "en" else _COMMANDS_ZH).format(text)
    if not text.endswith("?"):
        text += rng.choice(_ENDINGS) if lang == "en" else rng.choice(("", "", "", "", "。", "！"))
    if lang == "en" and rng.random() < 0.2 and (lower_again or text[: len(core)] != core):
        text = text[0].upper() + text[1:]
    if rng.random() < 0.03:
        text = " " + text
    if lang == "en" and rng.random() < 0.03:
        text = text.replace(" ", "  ", 1)
    return text


def random_idea(rng: random.Random, kind: str | None = None) -> Idea:
    """One random idea; `kind` may be "shape" or "general"."""
    shape = rng.random() < 0.3 if kind is None else kind == "shape"
    lang = "zh" if rng.random() < (0.25 if shape else 0.3) else "en"
    if shape:
        scene = scenes.random_scene(rng)
        core = scenes.english(scene, rng) if lang == "en" else scenes.chinese(scene, rng)
        typed = core
        if lang == "en" and rng.random() < 0.1:
            typed = rng.choice((core.upper(), core.title()))
        return Idea(_dress(typed, lang, rng, True), core, lang, scene.key(), scene)
    if lang == "zh":
        core, key = _chinese(rng)
    else:
        core, key = _english(rng) if rng.random() < 0.88 else _salad(rng)
        if rng.random() < 0.05:
            core = rng.choice((core.upper(), core.title()))
        elif rng.random() < 0.2:
            core = core[0].upper() + core[1:]
    return Idea(_dress(core, lang, rng), core, lang, key)


# ---- answers


def _attributes(idea: Idea, rng: random.Random) -> dict[str, str]:
    lists = load().attributes
    prefix = "shape " if idea.scene else ""
    return {
        name: rng.choice(lists[prefix + name]).text(idea.lang)
        for name in ("medium", "light", "lens", "palette", "mood", "detail")
    }


_ARTICLE = re.compile(r"(an?|the)\s", re.IGNORECASE)


def _english_answer(core: str, style: str, at: dict[str, str], rng: random.Random) -> str:
    found = _ARTICLE.match(core)
    bare = core[found.end() :] if found else core
    medium = at["medium"]
    if style == "tags":
        head = [medium, bare] if found else [bare, medium]
        rest = [at["light"], at["lens"], at["palette"], at["mood"], at["detail"]]
        return ", ".join(head + rest[: rng.choice((4, 5, 5))])
    if not found:
        form = rng.choice(
            (
                "{core}, made as {medium} in {light}, {lens}, with {palette}, {detail} and {a_mood}",
                "{core}, seen as {medium} under {light}, {lens}, {palette} and {detail}, {mood}",
            )
        )
    else:
        core = found.group(1).lower() + core[len(found.group(1)) :]
        form = rng.choice(
            (
                "{Medium} of {core}, lit by {light}, {lens}, with {palette} and {detail}, {mood}",
                "{Medium} showing {core} in {light}, {lens}, {palette}, {detail} and {a_mood}",
                "{Medium} of {core} under {light}, framed with {lens}, {palette} and {a_mood}",
            )
        )
    named = _article(medium)
    words = {**at, "medium": named, "a_mood": _article(at["mood"])}
    return form.format(**words, core=core, Medium=named[0].upper() + named[1:]) + "."


def _chinese_answer(core: str, style: str, at: dict[str, str], rng: random.Random) -> str:
    if style == "tags":
        rest = [at["medium"], at["light"], at["lens"], at["palette"], at["mood"], at["detail"]]
        return "，".join([core, *rest[: rng.choice((5, 6))]])
    form = rng.choice(
        (
            "{core}，一幅{medium}，画面里有{light}，{lens}，{palette}，{detail}，带着{mood}",
            "{core}，以{medium}呈现，笼罩着{light}，采用{lens}与{palette}，充满{mood}",
        )
    )
    return form.format(core=core, **at) + "。"


def answer(idea: Idea, style: str, rng: random.Random) -> str:
    """A richer prompt for an idea: the core word for word, then at least four attributes."""
    core = re.sub(r"\s+", " ", idea.core).strip()
    compose = _english_answer if idea.lang == "en" else _chinese_answer
    at = _attributes(idea, rng)
    if style != "json":
        return compose(core, style, at, rng)
    inner = compose(core, rng.choice(("natural", "tags")), at, rng)
    bad = [e.text(idea.lang) for e in rng.sample(load().attributes["negative"], rng.randint(2, 3))]
    return json.dumps(
        {"prompt": inner, "negative": (", " if idea.lang == "en" else "，").join(bad)}, ensure_ascii=False
    )


def fits(idea: Idea, text: str) -> bool:
    """True if an answer is short enough to end within the 96 tokens that are promised."""
    return (
        len(text.split()) <= MAX_WORDS
        if idea.lang == "en"
        else len(text) <= MAX_CHARS + (22 if text.startswith("{") else 0)
    )
