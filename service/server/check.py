"""Checks a document against the JSON Schemas of schemas.py. The OpenAPI document shows the same schemas."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..loader.files import short
from .error_documents import ApiError

Schema = Mapping[str, Any]

_FLOAT_LIMIT = 10**308
_WHOLE = frozenset({"type", "minimum", "maximum"})


def check(value: Any, schema: Schema, path: str = "") -> None:
    """Raise ApiError 400 that names the first wrong field of `value` and what is allowed.

    Understands type, enum, minimum, maximum, minLength, maxLength, pattern, minItems, maxItems, items, properties,
    required, propertyNames, maxProperties, additionalProperties (a schema, or false) and anyOf. Fields that the schema
    does not name are otherwise ignored.
    """
    if "anyOf" in schema:
        _check_any(value, schema["anyOf"], path)
        return
    kinds = _kinds(schema)
    if kinds and not any(_TYPES[kind](value) for kind in kinds):
        raise _wrong(value, schema, path)
    if value is None:
        return
    if "enum" in schema and value not in schema["enum"]:
        raise _wrong(value, schema, path)
    if isinstance(value, str):
        _check_text(value, schema, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if not schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf):
            raise _wrong(value, schema, path)
    elif isinstance(value, list):
        _check_list(value, schema, path)
    elif isinstance(value, dict):
        _check_object(value, schema, path)


def _check_any(value: Any, choices: Sequence[Schema], path: str) -> None:
    """One of `choices` must match. If none does, report the error of the choice that has the value's type: it is the
    most helpful.
    """
    failures: list[ApiError] = []
    for choice in choices:
        try:
            check(value, choice, path)
        except ApiError as error:
            if any(_TYPES[kind](value) for kind in _kinds(choice)):
                failures.append(error)
        else:
            return
    raise failures[0] if len(failures) == 1 else _wrong(value, {"anyOf": choices}, path)


def _check_text(value: str, schema: Schema, path: str) -> None:
    low, high = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    if not low <= len(value) <= high or ("pattern" in schema and not re.search(schema["pattern"], value)):
        raise _wrong(value, schema, path)


def _check_list(value: list[Any], schema: Schema, path: str) -> None:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
        raise _wrong(value, schema, path)
    items = schema.get("items")
    if items is None or (items.keys() <= _WHOLE and items.get("type") == "integer" and _all_whole(value, items)):
        return
    for at, item in enumerate(value):
        check(item, items, f"{path}[{at}]")


def _all_whole(values: list[Any], schema: Schema) -> bool:
    """Whether all are plain integers within the bounds. Token ids come by the thousand, and the general check takes 10
    us per id.
    """
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    return all(type(value) is int and low <= value <= high for value in values)


def _check_object(value: dict[str, Any], schema: Schema, path: str) -> None:
    most = schema.get("maxProperties", math.inf)
    if len(value) > most:
        message = f"{path or 'the body'} has {len(value):,} fields; use at most {most:,}"
        raise ApiError(400, message, code="wrong_value", param=path or None)
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            inner = _inner(path, name)
            raise ApiError(
                400, f"{inner} is missing; give {describe(properties[name])}", code="missing_field", param=inner
            )
    for name, item in value.items():
        if "propertyNames" in schema:
            check(name, schema["propertyNames"], _inner(path, name))
        inside = properties.get(name, schema.get("additionalProperties"))
        if inside is False:
            inner = _inner(path, name)
            raise ApiError(
                400, f"{inner} is not known; known fields: {', '.join(properties)}", code="unknown_field", param=inner
            )
        if isinstance(inside, Mapping):
            check(item, inside, _inner(path, name))


def describe(schema: Schema) -> str:
    """What a schema accepts, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(describe, schema["anyOf"])))
    if "enum" in schema:
        return "one of " + ", ".join("null" if item is None else str(item) for item in schema["enum"])
    return " or ".join(_WORDS[kind](schema) for kind in _kinds(schema)) or "any value"


def _numbers(schema: Schema, word: str) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    return word + ("" if low is None else f" from {low}") + ("" if high is None else f" up to {high}")


def _counted(schema: Schema, word: str, low: str, high: str, unit: str) -> str:
    fewest, most = schema.get(low), schema.get(high)
    bounds = [f"at least {fewest}"] if fewest else []
    bounds += [f"at most {most}"] if most is not None else []
    one = bounds and (fewest if most is None else most) == 1
    return word + (f" of {' and '.join(bounds)} {unit}{'' if one else 's'}" if bounds else "")


def _text(schema: Schema) -> str:
    return (
        f"a text like {schema['examples'][0]}"
        if "pattern" in schema
        else _counted(schema, "a text", "minLength", "maxLength", "character")
    )


_WORDS: Mapping[str, Callable[[Schema], str]] = {
    "string": _text,
    "integer": lambda schema: _numbers(schema, "a whole number"),
    "number": lambda schema: _numbers(schema, "a number"),
    "boolean": lambda _: "true or false",
    "array": lambda schema: _counted(schema, "a list", "minItems", "maxItems", "item"),
    "object": lambda _: "an object",
    "null": lambda _: "null",
}


def is_whole(value: Any) -> bool:
    """Whether a JSON number is whole; 5.0 is, as JSON Schema has it."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_FLOAT_LIMIT <= value <= _FLOAT_LIMIT


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": is_whole,
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def _kinds(schema: Schema) -> Sequence[str]:
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else kinds


def _wrong(value: Any, schema: Schema, path: str) -> ApiError:
    return ApiError(
        400, f"{path or 'the body'} is {_shown(value)}; use {describe(schema)}", code="wrong_value", param=path or None
    )


def _inner(path: str, name: str) -> str:
    shown = name if len(name) <= 40 else name[:40] + "..."
    return f"{path}.{shown}" if path else shown


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return short(value)
    return repr(value) if -_FLOAT_LIMIT <= value <= _FLOAT_LIMIT else "a number without measure"
