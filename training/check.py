"""Plain checks of the demo models' output: texts by words, pictures by colour, area and corners. No model, no torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np

from .lexicon import CATEGORIES, load
from .scenes import COLORS, PLACES, Scene

# ---- texts

_STOP = frozenset(
    """a an the of in on at to with and or for from by near under over into is are it its that this me my i i'd id like
    want please draw
    paint picture image show make create can you called named""".split()  # noqa: SIM905 - a list of forty short words reads worse
)
_SPLIT_ZH = re.compile(
    r"[，。！？、\s]|请|帮我|画一下|画|我想要|来一张|生成|的图片|的图|的画|一[只位座辆艘株份个处]|[的和与在里有]"
)


def content_words(idea: str) -> list[str]:
    """The words of an idea that its prompt must keep: lower case, without articles, prepositions and commands."""
    words = [w for w in re.findall(r"[^\W\u4e00-\u9fff]+(?:[-'][^\W\u4e00-\u9fff]+)*", idea.lower()) if w not in _STOP]
    han = "".join(c if "\u4e00" <= c <= "\u9fff" or c in "，。！？、" else " " for c in idea)
    return words + [piece for piece in _SPLIT_ZH.split(han) if piece]


def lost_words(idea: str, text: str) -> list[str]:
    """Content words of the idea that are missing in the text."""
    low = text.lower()
    have = set(re.findall(r"[^\W\u4e00-\u9fff]+(?:[-'][^\W\u4e00-\u9fff]+)*", low))
    return [w for w in content_words(idea) if (w not in low if "\u4e00" <= w[0] <= "\u9fff" else w not in have)]


def added_attributes(idea: str, text: str) -> list[str]:
    """Attributes of the word lists that are in the text but not in the idea, each once."""
    low, before = text.lower(), idea.lower()
    every = [e for head, entries in load().attributes.items() if head.split()[-1] in CATEGORIES for e in entries]
    return sorted({w for e in every for w in (e.en, e.zh) if w in low and w not in before})


def repeats_four(text: str) -> bool:
    """True if a sequence of four units (words, or Chinese characters) occurs twice."""
    units = re.findall(r"[\u4e00-\u9fff]|[^\W\u4e00-\u9fff]+", text.lower())
    grams = [tuple(units[i : i + 4]) for i in range(len(units) - 3)]
    return len(set(grams)) < len(grams)


def as_object(text: str) -> dict[str, str] | None:
    """The JSON object with exactly the keys prompt and negative, or None."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    good = (
        isinstance(value, dict)
        and set(value) == {"prompt", "negative"}
        and all(isinstance(v, str) and v for v in value.values())
    )
    return value if good else None


# ---- pictures

_NAMES = tuple(COLORS)
_PALETTE = np.array([COLORS[n] for n in _NAMES], dtype=np.float32)
_LEAST = 90  # pixels of a shape in a 128 x 128 picture; smaller specks are counted separately


@dataclass(frozen=True, slots=True)
class Found:
    """One shape seen in a picture: centre in pixels, filled area in pixels."""

    kind: str
    color: str
    x: float
    y: float
    area: int


def nearest_colors(picture: np.ndarray) -> np.ndarray:
    """picture [H, W, 3] uint8 -> index of the nearest palette colour [H, W]."""
    gap = picture[:, :, None, :].astype(np.float32) - _PALETTE
    return np.square(gap).sum(-1).argmin(-1)


def components(mask: np.ndarray) -> list[np.ndarray]:
    """The 4-connected parts of a mask as masks, by spreading the largest label until nothing changes."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        padded = np.pad(labels, 1)
        around = np.maximum.reduce([padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:], labels])
        spread = np.where(mask, around, 0)
        if np.array_equal(spread, labels):
            return [labels == v for v in np.unique(labels) if v]
        labels = spread


def _filled(mask: np.ndarray) -> tuple[np.ndarray, float]:
    """The mask with its holes filled, and the share of the filled area that was the largest hole."""
    outside = np.zeros_like(mask)
    best = 0
    for part in components(~mask):
        edge = part[0].any() or part[-1].any() or part[:, 0].any() or part[:, -1].any()
        if edge:
            outside |= part
        else:
            best = max(best, int(part.sum()))
    full = ~outside
    return full, best / max(1, int(full.sum()))


def shape_kind(mask: np.ndarray) -> str:
    """Classify a shape from a mask [h, w] cropped to its bounds: by its hole, its share of the bounds, and the corners
    it fills.
    """
    mask = np.pad(mask, 1)
    full, hole = _filled(mask)
    if hole > 0.12:
        return "ring"
    full = full[1:-1, 1:-1]
    fill = float(full.mean())
    h, w = full.shape
    ch, cw = max(1, round(h * 0.14)), max(1, round(w * 0.14))
    top = (full[:ch, :cw].mean() + full[:ch, -cw:].mean()) / 2
    bottom = (full[-ch:, :cw].mean() + full[-ch:, -cw:].mean()) / 2
    if fill > 0.86 and top > 0.5 and bottom > 0.5:
        return "square"
    if bottom > 0.4 and top < 0.25 and fill > 0.42:
        return "triangle"
    if fill < 0.56:
        return "star"
    low, high = full[int(h * 0.8) : int(h * 0.9)].mean(), full[int(h * 0.1) : int(h * 0.2)].mean()
    return "heart" if low < 0.42 and high > low else "circle"


def look(picture: np.ndarray) -> tuple[str, list[Found], int]:
    """picture [128, 128, 3] uint8 -> (background colour, shapes from left to right, number of specks)."""
    nearest = nearest_colors(picture)
    frame = np.concatenate([nearest[:3].ravel(), nearest[-3:].ravel(), nearest[:, :3].ravel(), nearest[:, -3:].ravel()])
    ground = int(np.bincount(frame, minlength=len(_NAMES)).argmax())
    shapes, specks = [], 0
    for part in components(nearest != ground):
        area = int(part.sum())
        if area < _LEAST:
            specks += area >= 20
            continue
        ys, xs = np.nonzero(part)
        cut = part[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
        color = int(np.bincount(nearest[part], minlength=len(_NAMES)).argmax())
        x, y = (xs.min() + xs.max()) / 2, (ys.min() + ys.max()) / 2
        shapes.append(Found(shape_kind(cut), _NAMES[color], float(x), float(y), area))
    return _NAMES[ground], sorted(shapes, key=lambda s: s.x), specks


@dataclass(frozen=True, slots=True)
class Verdict:
    """The parts of a scene that a picture got right; `shapes` is the main figure: every shape with its colour, and no
    other shape.
    """

    shapes: bool
    background: bool
    places: bool

    @property
    def all(self) -> bool:
        return self.shapes and self.background and self.places


def _placed(found: Found, place: str | None) -> bool:
    if place is None:
        return True
    column, row = PLACES[place]
    middle, slack = 64, 6

    def right(value: float, side: int) -> bool:
        return abs(value - middle) <= 18 if side == 0 else (value - middle) * side > slack

    return right(found.x, column) and right(found.y, row)


def _match(scene: Scene, found: list[Found]) -> list[Found] | None:
    """The detected shapes in the scene's order, or None."""
    if len(found) != len(scene.shapes):
        return None
    orders = [found, found[::-1]] if len(found) == 2 else [found]
    right = [
        o
        for o in orders
        if all(f.kind == s.kind and s.color in (None, f.color) for f, s in zip(o, scene.shapes, strict=True))
    ]
    if len(right) == 2 and not _related(scene, right[0]):
        return right[1]
    return right[0] if right else None


def _related(scene: Scene, found: list[Found]) -> bool:
    if scene.relation == "left" and not found[0].x + 6 < found[1].x:
        return False
    if scene.relation == "above" and not found[0].y + 6 < found[1].y:
        return False
    return all(_placed(f, s.place) for f, s in zip(found, scene.shapes, strict=True))


def judge(scene: Scene, picture: np.ndarray) -> Verdict:
    """Compare a picture [128, 128, 3] uint8 with the scene."""
    ground, found, specks = look(picture)
    order = _match(scene, found) if specks == 0 else None
    return Verdict(order is not None, scene.background in (None, ground), order is not None and _related(scene, order))
