"""Tool schemas that refer to themselves, or to places that are not there, cost a bounded number of steps."""

from __future__ import annotations

from typing import Any

import pytest
from onedesk.service.text import tool_schema
from onedesk.service.text.tool_schema import parameter_kinds


@pytest.mark.parametrize("branches", [3, 6, 40])
def test_cycles_that_branch_are_followed_in_bounded_steps(branches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    own_kinds = tool_schema._own_kinds
    monkeypatch.setattr(tool_schema, "_own_kinds", lambda schema: seen.append(1) or own_kinds(schema))
    inner = {"$ref": "#/properties/what", "anyOf": [{"$ref": "#/properties/what"}] * branches}
    schema: Any = {"type": "object", "anyOf": [{"$ref": "#"}] * branches, "properties": {"what": inner}}
    assert set(parameter_kinds(schema)) == {"what"}
    assert len(seen) <= tool_schema._STEPS


@pytest.mark.parametrize("index", ["\u00b2", "9" * 4301, "-1", "1", "99"])
def test_a_reference_to_an_index_that_is_not_there_says_nothing(index: str) -> None:
    schema = {"anyOf": [{"type": "string"}], "properties": {"a": {"$ref": f"#/anyOf/{index}"}}}
    assert parameter_kinds(schema) == {"a": None}


def test_a_reference_to_an_index_is_followed() -> None:
    schema = {"anyOf": [{"type": "string"}], "properties": {"a": {"$ref": "#/anyOf/0"}}}
    assert parameter_kinds(schema) == {"a": frozenset({"string"})}
