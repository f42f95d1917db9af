"""Scenes of one or two coloured shapes: their content, their wording, and the positions of the shapes in a picture."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

KINDS = ("circle", "square", "triangle", "star", "heart", "ring")
KINDS_ZH = (("圆形", "圆"), ("正方形", "方形"), ("三角形",), ("五角星", "星星"), ("心形", "爱心"), ("圆环",))
COLORS = {
    "red": (214, 38, 42),
    "orange": (245, 134, 28),
    "yellow": (250, 216, 50),
    "green": (38, 152, 66),
    "blue": (38, 84, 214),
    "purple": (126, 52, 172),
    "pink": (246, 150, 190),
    "brown": (116, 70, 36),
    "black": (22, 22, 24),
    "white": (244, 244, 242),
}
COLORS_ZH = dict(
    zip(COLORS, ("红色", "橙色", "黄色", "绿色", "蓝色", "紫色", "粉色", "棕色", "黑色", "白色"), strict=True)
)
# Name -> (column, row), each -1, 0 or 1.
PLACES = {
    "top left": (-1, -1), "top": (0, -1), "top right": (1, -1), "left": (-1, 0), "center": (0, 0), "right": (1, 0),
    "bottom left": (-1, 1), "bottom": (0, 1), "bottom right": (1, 1),
}  # fmt: skip
PLACES_ZH = dict(
    zip(PLACES, ("左上角", "上方", "右上角", "左边", "中间", "右边", "左下角", "下方", "右下角"), strict=True)
)
SIZE = 128  # pixels per side
FIELDS = 7  # numbers per shape in a layout: kind (-1: none), r, g, b, centre x, centre y, radius


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape; None where the words leave it open."""

    kind: str
    color: str | None = None
    place: str | None = None
    size: str | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """`relation`: the first shape is "left" of or "above" the second one."""

    shapes: tuple[Shape, ...]
    background: str | None = None
    relation: str | None = None

    def key(self) -> str:
        """The combination by which scenes are held out: the shapes with their colours, and the background."""
        return "+".join(sorted(f"{s.color} {s.kind}" for s in self.shapes)) + f" on {self.background}"

    def facts(self) -> str:
        """One line that describes the scene; the writer learns to write it after a raw prompt, so that its states
        contain the scene.
        """
        parts = [" ".join(x for x in (s.size, s.color, s.kind, s.place) if x) for s in self.shapes]
        return f"{' and '.join(parts)}; {self.relation or 'free'}; {self.background or 'any'}"


def random_scene(rng: random.Random) -> Scene:
    """A scene like those that users request: mostly fully coloured, with a background two times out of three, half with
    two shapes.
    """
    colors = list(COLORS)
    background = rng.choice(colors) if rng.random() < 0.72 else None
    free = [c for c in colors if c != background]

    def shape() -> Shape:
        size = rng.choice(("big", "small")) if rng.random() < 0.12 else None
        return Shape(rng.choice(KINDS), rng.choice(free) if rng.random() < 0.96 else None, None, size)

    first = shape()
    if rng.random() < 0.5:
        place = rng.choice(list(PLACES)) if rng.random() < 0.5 else None
        return Scene((replace(first, place=place),), background)
    if rng.random() < 0.06:
        return Scene((first, first), background)
    second = shape()
    while second.kind == first.kind and second.color == first.color:
        second = shape()
    how = rng.random()
    if how < 0.3:
        return Scene((first, second), background)
    if how < 0.8:
        return Scene((first, second), background, rng.choice(("left", "above")))
    a, b = rng.sample(list(PLACES), 2)
    while max(abs(PLACES[a][i] - PLACES[b][i]) for i in (0, 1)) < 2:
        a, b = rng.sample(list(PLACES), 2)
    return Scene((replace(first, place=a), replace(second, place=b)), background)


# ---- words


def _noun(s: Shape, article: bool = True) -> str:
    words = " ".join(x for x in (s.size, s.color, s.kind) if x)
    if not article:
        return words
    return ("an " if words[0] in "aeiou" else "a ") + words


def _place(place: str | None, rng: random.Random) -> str:
    if place is None:
        return ""
    if place == "center":
        return rng.choice((" in the center", " in the middle", " in the centre"))
    if " " in place:
        return rng.choice((f" in the {place} corner", f" in the {place}", f" at the {place}"))
    return f" on the {place}" if place in ("left", "right") else f" at the {place}"


def _ground(color: str | None, rng: random.Random) -> str:
    if color is None:
        return ""
    if rng.random() < 0.45:
        return f" on {color}"
    article = "an" if color[0] == "o" else "a"
    return f" {rng.choice(('on', 'against', 'with'))} {article} {color} background"


def english(scene: Scene, rng: random.Random) -> str:
    """The scene as an English phrase, lower case, no command before it."""
    ground = _ground(scene.background, rng)
    article = rng.random() < 0.75
    first = scene.shapes[0]
    if len(scene.shapes) == 1:
        if scene.background and rng.random() < 0.12:
            start = "an" if scene.background[0] == "o" else "a"
            return f"{start} {scene.background} background with {_noun(first)}{_place(first.place, rng)}"
        if scene.background and rng.random() < 0.12:
            place = f", {first.place}" if first.place else ""
            return f"{_noun(first, False)}{place}, {scene.background} background"
        return _noun(first, article) + _place(first.place, rng) + ground
    a, b = scene.shapes
    if a == b:
        return f"two {_noun(a, False)}s{ground}"
    x, y = _noun(a, article), _noun(b, article)
    if a.place:
        return f"{x}{_place(a.place, rng)} and {y}{_place(b.place, rng)}{ground}"
    if scene.relation is None:
        return x + rng.choice((" and ", " and ", " next to ", " with ", " beside ")) + y + ground
    beside = (f"{x} to the left of {y}", f"{x} left of {y}", f"{x} on the left and {y} on the right")
    beside += (f"{y} to the right of {x}", f"{y} right of {x}", f"{y} on the right and {x} on the left")
    stacked = (
        f"{x} above {y}",
        f"{x} over {y}",
        f"{y} below {x}",
        f"{y} under {x}",
        f"{x} at the top and {y} at the bottom",
    )
    return rng.choice(beside if scene.relation == "left" else stacked) + ground


def _noun_zh(s: Shape, rng: random.Random) -> str:
    name = rng.choice(KINDS_ZH[KINDS.index(s.kind)])
    color = "" if s.color is None else COLORS_ZH[s.color] + rng.choice(("", "的"))
    size = {"big": "大", "small": "小", None: ""}[s.size]
    return size + color + name


def chinese(scene: Scene, rng: random.Random) -> str:
    """The scene as a Chinese phrase, no command before it."""
    one = "一个" if rng.random() < 0.5 else ""
    names = [one + _noun_zh(s, rng) for s in scene.shapes]
    if len(names) == 1:
        place = scene.shapes[0].place
        body = (
            names[0]
            if place is None
            else rng.choice((f"{PLACES_ZH[place]}有{names[0]}", f"{names[0]}在{PLACES_ZH[place]}"))
        )
    elif scene.shapes[0] == scene.shapes[1]:
        body = "两个" + _noun_zh(scene.shapes[0], rng)
    elif scene.shapes[0].place:
        body = "，".join(f"{PLACES_ZH[s.place or 'center']}{n}" for s, n in zip(scene.shapes, names, strict=True))
    elif scene.relation is None:
        body = rng.choice(("和", "与")).join(names)
    elif scene.relation == "left":
        body = rng.choice(
            (f"左边{names[0]}，右边{names[1]}", f"{names[0]}在{names[1]}的左边", f"{names[1]}在{names[0]}的右边")
        )
    else:
        body = rng.choice(
            (f"上面{names[0]}，下面{names[1]}", f"{names[0]}在{names[1]}的上面", f"{names[1]}在{names[0]}的下面")
        )
    if scene.background is None:
        return body
    ground = COLORS_ZH[scene.background] + "背景"
    return rng.choice((f"{body}，{ground}", f"{ground}上{body}" if len(names) == 1 else f"{ground}，{body}"))


# ---- layout


def _tone(color: str, rng: random.Random) -> list[float]:
    shade = rng.uniform(0.93, 1.07)
    return [min(255.0, max(0.0, c * shade + rng.uniform(-6, 6))) / 255 for c in COLORS[color]]


def _radius(shape: Shape, alone: bool, rng: random.Random) -> float:
    big = (33, 40) if shape.place is None else (29, 34)
    ranges = (
        {None: (21, 28), "big": big, "small": (12, 16)}
        if alone
        else {None: (17, 21), "big": (22, 25), "small": (12, 14)}
    )
    return rng.uniform(*ranges[shape.size])


def _centers(scene: Scene, radii: list[float], rng: random.Random) -> list[tuple[float, float]]:
    half = SIZE / 2
    cells: list[tuple[float, float]]
    if scene.shapes[0].place is not None:
        cells = [PLACES[s.place or "center"] for s in scene.shapes]
    elif len(scene.shapes) == 1:
        return [(half + rng.uniform(-15, 15), half + rng.uniform(-15, 15))]
    else:
        way = scene.relation or rng.choice(("left", "left", "above"))
        lean = rng.uniform(-0.3, 0.3)
        cells = [(-1, lean), (1, -lean)] if way == "left" else [(lean, -1), (-lean, 1)]
    reach = [min(32.0, half - 1.2 * r - 6) for r in radii]
    return [
        (half + c * d + rng.uniform(-3, 3), half + w * d + rng.uniform(-3, 3))
        for (c, w), d in zip(cells, reach, strict=True)
    ]


def layout(scene: Scene, rng: random.Random) -> list[float]:
    """One way to draw the scene: 3 background numbers in 0..1, then FIELDS numbers for each of two shapes (kind -1:
    none).
    """
    radii = [_radius(s, len(scene.shapes) == 1, rng) for s in scene.shapes]
    centers = _centers(scene, radii, rng)
    taken = {s.color for s in scene.shapes if s.color}
    ground = scene.background or rng.choice([c for c in COLORS if c not in taken])
    out = _tone(ground, rng)
    for shape, (x, y), r in zip(scene.shapes, centers, radii, strict=True):
        color = shape.color or rng.choice([c for c in COLORS if c != ground])
        out += [float(KINDS.index(shape.kind)), *_tone(color, rng), x, y, r]
    return out + [-1.0, 0, 0, 0, 0, 0, 1] * (2 - len(scene.shapes))
