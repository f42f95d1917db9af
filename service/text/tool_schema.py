"""What a tool's JSON Schema says of its arguments: the types that a parameter takes, and schemas that can stand inside
another document."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, NoReturn

# A parameter takes any JSON value where its schema says nothing about types.
Kinds = frozenset[str] | None

_DEPTH = 16  # references and combinations followed; deeper or circular ones count as "any type"
# Schemas looked at for all parameters of a tool: references that branch would multiply with each level of depth.
_STEPS = 10_000
_INDEX_DIGITS = 9  # of a list index in a reference
_LITERAL_LIMIT = 1 << 16  # characters of a list or object in Python's notation
_DATA = frozenset({"const", "enum", "default", "example", "examples"})  # hold values, not schemas


def parameter_kinds(parameters: Any) -> dict[str, Kinds]:
    """JSON types by parameter of a tool's `parameters`, with $ref, allOf, anyOf, oneOf, enum, const and nullable
    resolved."""
    walk = _Walk(parameters)
    return {name: walk.kinds(schema) for name, schema in walk.properties(parameters).items()}


def argument(text: str, kinds: Kinds) -> Any:
    """The value of a parameter that was written as text between tags.

    A text stays text wherever the schema takes one: "94103" does not become a number. Anything else is read as JSON, or
    as Python's True, False and None, where the schema takes the type that results; otherwise it stays text too.
    """
    text = text.removeprefix("\n").removesuffix("\n")
    word = text.strip()
    if kinds is None:
        return _read(word, text)
    if word == "null" and "null" in kinds:
        return None
    if "string" in kinds:
        nested = _read(word, text) if word[:1] in ("{", "[") else text
        return nested if _fits(nested, kinds) else text
    value = _read(word, text)
    if value is text and kinds & {"array", "object"}:
        value = _python_literal(word, text)
    if isinstance(value, float) and value.is_integer() and "number" not in kinds:
        value = int(value)
    if "boolean" in kinds and word.lower() in ("true", "false"):
        return word.lower() == "true"
    return value if _fits(value, kinds) else text


def embedded_schema(schema: Any, name: str) -> Any:
    """`schema` for use at #/$defs/NAME of another document: its own references are moved there."""
    if not isinstance(schema, Mapping):
        return schema
    return _moved({key: value for key, value in schema.items() if key not in ("$schema", "$id")}, f"#/$defs/{name}")


class _Walk:
    """Follows the references and combinations of one document, in at most _STEPS steps altogether."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _STEPS

    def _stops(self, schema: Any, depth: int) -> bool:
        self._left -= 1
        return not isinstance(schema, Mapping) or depth == 0 or self._left < 0

    def properties(self, schema: Any, depth: int = _DEPTH) -> dict[str, Any]:
        """The schemas of the properties by name; those that are out of reach are left out."""
        if self._stops(schema, depth):
            return {}
        found: dict[str, Any] = {}
        if "$ref" in schema:
            found |= self.properties(_resolved(schema["$ref"], self._root), depth - 1)
        for keyword in ("allOf", "anyOf", "oneOf"):
            branches = schema.get(keyword)
            for branch in branches if isinstance(branches, list) else ():
                found |= self.properties(branch, depth - 1)
        own = schema.get("properties")
        return found | (dict(own) if isinstance(own, Mapping) else {})

    def kinds(self, schema: Any, depth: int = _DEPTH) -> Kinds:
        """The types that a value may have; None for any, also where the steps are used up."""
        if self._stops(schema, depth):
            return None
        kinds = _own_kinds(schema)
        if isinstance(schema.get("allOf"), list):
            for branch in schema["allOf"]:
                kinds = _both(kinds, self.kinds(branch, depth - 1))
        for keyword in ("anyOf", "oneOf"):
            branches = schema.get(keyword)
            if isinstance(branches, list) and branches:
                kinds = _both(kinds, _any_of([self.kinds(branch, depth - 1) for branch in branches]))
        if "$ref" in schema:
            kinds = _both(kinds, self.kinds(_resolved(schema["$ref"], self._root), depth - 1))
        if kinds is not None and schema.get("nullable") is True:
            kinds |= {"null"}
        return kinds


def _own_kinds(schema: Mapping[str, Any]) -> Kinds:
    """What type, enum and const say."""
    kinds: Kinds = None
    kind = schema.get("type")
    if isinstance(kind, str):
        kinds = frozenset({kind})
    elif isinstance(kind, list):
        kinds = frozenset(one for one in kind if isinstance(one, str))
    values = schema.get("enum")
    if isinstance(values, list):
        kinds = _both(kinds, frozenset().union(*map(_kinds_of, values)))
    if "const" in schema:
        kinds = _both(kinds, _kinds_of(schema["const"]))
    return kinds


def _both(one: Kinds, other: Kinds) -> Kinds:
    if one is None or other is None:
        return other if one is None else one
    more = (
        {"integer"} if ("number" in one and "integer" in other) or ("integer" in one and "number" in other) else set()
    )
    return (one & other) | more


def _any_of(branches: list[Kinds]) -> Kinds:
    found: frozenset[str] = frozenset()
    for branch in branches:
        if branch is None:
            return None
        found |= branch
    return found


def _kinds_of(value: Any) -> frozenset[str]:
    """The type names that a JSON value has; a whole number is a number too."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return frozenset({names.get(type(value), "string")})


def _fits(value: Any, kinds: frozenset[str]) -> bool:
    return bool(_kinds_of(value) & kinds)


def _read(word: str, text: str) -> Any:
    """The JSON value or Python constant that `word` is, else `text`."""
    try:
        return json.loads(word, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(word, text)


def _python_literal(word: str, text: str) -> Any:
    """The list or object that `word` writes with Python's quotes, else `text`."""
    if word[:1] not in ("{", "[") or len(word) > _LITERAL_LIMIT:
        return text
    try:
        value = ast.literal_eval(word)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _resolved(reference: Any, root: Any) -> Any:
    """The schema that a reference within the document names; None where there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and _is_index(key) and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= _INDEX_DIGITS


def _moved(value: Any, base: str) -> Any:
    if isinstance(value, Mapping):
        moved = {key: item if key in _DATA else _moved(item, base) for key, item in value.items()}
        reference = moved.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            moved["$ref"] = base + reference[1:]
        return moved
    return [_moved(item, base) for item in value] if isinstance(value, list) else value
