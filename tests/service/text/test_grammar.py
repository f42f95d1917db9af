"""Answers bound to a JSON Schema: whatever is drawn from what is allowed is a document that follows it."""

from __future__ import annotations

import builtins
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.errors import ModelError, RequestError
from onedesk.service.text.grammar import SCHEMA_LIMIT, Grammars
from onedesk.service.text.tokenizer import Tokenizer
from tiny_qwen3 import tiny_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "tags": {"enum": ["a", "b", None]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    ends = [tokenizer.id_of(name) for name in ("<|im_end|>", "<|endoftext|>")]
    return Grammars(tokenizer, tokenizer.size, [token for token in ends if token is not None])


def write(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], draw: random.Random, most: int = 2000
) -> str | None:
    """A document drawn token by token, ends preferred; None where it does not come to an end."""
    guide = grammars.guide(json.dumps(schema), may_think=False)
    ids: list[int] = []
    for _ in range(most):
        allowed = guide.allowed().nonzero()[0].tolist()
        assert allowed
        ends = [token for token in allowed if token in tokenizer.control_ids]
        token = draw.choice(ends or allowed)
        guide.accept(token)
        if ends:
            return tokenizer.decode(ids)
        ids.append(token)
    return None


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_every_drawn_document_follows_its_schema(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    text = write(grammars, tokenizer, PERSON, random.Random(seed))
    if text is None:  # digits without end
        return
    document = json.loads(text)
    assert set(document) <= set(PERSON["properties"])
    assert isinstance(document["name"], str)
    assert len(document["name"]) <= 8
    assert isinstance(document["age"], int)
    assert document.get("tags") in ("a", "b", None)


def test_any_object_is_an_object(grammars: Grammars, tokenizer: Tokenizer) -> None:
    texts = [write(grammars, tokenizer, {"type": "object"}, random.Random(seed), 400) for seed in range(10)]
    finished = [text for text in texts if text is not None]
    assert finished
    assert all(isinstance(json.loads(text), dict) for text in finished)


def test_blanks_do_not_go_on_for_ever(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = grammars.guide('{"type": "object"}', may_think=False)
    blank, brace = tokenizer.encode(" ")[0], tokenizer.encode("{")[0]
    line = tokenizer.encode("\n")[0]
    guide.accept(brace)
    indented = guide.fork()
    guide.accept(blank)
    assert not guide.allowed()[blank]
    assert not guide.allowed()[line]
    indented.accept(line)
    for _ in range(24):
        assert indented.allowed()[blank]
        indented.accept(blank)
    assert not indented.allowed()[blank]
    assert indented.allowed().any()


def test_reasoning_may_come_first_and_only_first(grammars: Grammars, tokenizer: Tokenizer) -> None:
    opener = tokenizer.id_of("<think>")
    assert opener is not None
    assert not grammars.guide("{}", may_think=False).allowed()[opener]
    guide = grammars.guide("{}", may_think=True)
    assert guide.allowed()[opener]
    guide.accept(opener)
    assert not guide.allowed()[opener]
    guide = grammars.guide('{"type": "object"}', may_think=True)
    guide.accept(tokenizer.encode("{")[0])
    assert not guide.allowed()[opener]


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("", "not valid"),
        ("{", "not valid"),
        ('"a text"', "not valid"),
        ('{"type": "strang"}', "cannot be followed"),
        ('{"not": {}}', "cannot be followed"),
        ('{"$ref": "#/nowhere"}', "cannot be followed"),
        ('{"$ref": "http://127.0.0.1:1/schema.json"}', "cannot be followed"),
        ('{"$ref": "file:///etc/passwd"}', "cannot be followed"),
        ('{"type": "string", "pattern": "("}', "cannot be followed"),
        ('{"type": "integer", "multipleOf": 999999937}', "cannot be followed"),
        ("[" * 100_000, "not valid"),
        (" " * SCHEMA_LIMIT + "{}", "characters; use at most"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(grammars: Grammars, schema: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        grammars.guide(schema, may_think=False)


def test_without_the_package_the_message_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match="llguidance; install it into the environment of Onedesk"):
        Grammars(tokenizer, tokenizer.size, [0])


def test_a_model_without_an_end_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelError, match="ends a turn"):
        Grammars(tokenizer, tokenizer.size, [])


def test_a_token_that_the_grammar_does_not_allow_ends_the_answer_and_nothing_else(
    grammars: Grammars, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    guide = grammars.guide('{"type": "object"}', may_think=True)
    other = guide.fork()
    guide.accept(tokenizer.encode("x")[0])
    assert set(guide.allowed().nonzero()[0].tolist()) <= tokenizer.control_ids
    assert guide.allowed().any()
    assert "before its JSON schema is fulfilled" in caplog.text
    assert other.allowed()[tokenizer.encode("{")[0]]


def test_texts_for_the_tokenizer_of_the_demo_model(repository: Path) -> None:
    from onedesk.service.text.tokenizer import load_tokenizer

    demo = load_tokenizer(repository / "models" / "onedesk-demo-writer")
    text = write(Grammars(demo, demo.size, [0, 2]), demo, {"enum": ["a red circle", "十"]}, random.Random(3))
    assert json.loads(text or "") in ("a red circle", "十")


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"at": {"$ref": "#/$defs/At"}},
                "required": ["at"],
                "$defs": {"At": {"enum": [1]}},
            },
        },
    }
]
AS_JSON = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
AS_TAGS = "<tool_call>\n<function=look>\n<parameter=at>\n<b>1\n</parameter>\n</function>\n</tool_call>"


def follows(guide: Any, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text may be written, and then end."""
    for token in tokenizer.encode(text):
        if not guide.allowed()[token]:
            return False
        guide.accept(token)
    return any(guide.allowed()[token] for token in tokenizer.control_ids)


@pytest.mark.parametrize("most", [1, 2])
def test_a_document_or_calls(grammars: Grammars, tokenizer: Tokenizer, most: int) -> None:
    def holds(text: str) -> bool:
        return follows(grammars.guide_or_calls('{"enum": [7]}', TOOLS, most=most, may_think=False), tokenizer, text)

    assert holds("7")
    assert holds(AS_JSON)
    assert holds(AS_TAGS)
    assert holds(f"{AS_JSON}\n{AS_TAGS}") == (most == 2)
    assert not holds(AS_JSON.replace("1", "2"))
    assert not holds(AS_JSON.replace("look", "leap"))
    assert not holds(AS_TAGS.replace("look", "leap"))
    assert not holds(f"7{AS_JSON}")
    assert not holds("8")


def test_what_stands_there_already_counts(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = grammars.guide(json.dumps(PERSON), may_think=True)
    guide.accept_text('{"name": "An')
    assert follows(guide, tokenizer, 'na", "age": 3}')
    with pytest.raises(RequestError, match="does not follow the JSON schema"):
        grammars.guide(json.dumps(PERSON), may_think=True).accept_text("Here: {")
