"""Dynamic prompts: `{red|green|blue}` becomes one of its choices, drawn by a seed."""

from __future__ import annotations

import random

_SPECIAL = "{}|\\"


def expand(text: str, seed: int) -> str:
    r"""Replace every group of choices by one of them; groups may be nested, and the same text and seed give the same
    result.

    `\{`, `\}`, `\|` and `\\` stand for the characters themselves. A group without `|` and a brace without its partner
    stay as written, so that JSON passes. The draw has its own random state.
    """
    draw = random.Random(seed)  # noqa: S311 - chooses words, guards nothing
    groups: list[list[list[str]]] = [[[]]]
    characters = iter(text)
    for character in characters:
        if character == "\\":
            escaped = next(characters, "")
            groups[-1][-1].append(escaped if escaped and escaped in _SPECIAL else character + escaped)
        elif character == "{":
            groups.append([[]])
        elif character == "|" and len(groups) > 1:
            groups[-1].append([])
        elif character == "}" and len(groups) > 1:
            choices = ["".join(choice) for choice in groups.pop()]
            chosen = choices[int(draw.random() * len(choices))] if len(choices) > 1 else "{" + choices[0] + "}"
            groups[-1][-1].append(chosen)
        else:
            groups[-1][-1].append(character)
    while len(groups) > 1:
        unclosed = "{" + "|".join("".join(choice) for choice in groups.pop())
        groups[-1][-1].append(unclosed)
    return "".join(groups[0][0])
