"""Log-probabilities of tokens that are parts of characters, as OpenAI's API writes them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.core import Event, Logprobs, Result, Usage
from onedesk.service.server.responses import ChatWriter, CompletionWriter
from onedesk.service.text.tokenizer import _BYTE_OF, Tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE

FACE = "😊".encode()


def byte_tokenizer() -> Tokenizer:
    backend = Backend(BPE(vocab=dict(_BYTE_OF), merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()


def completion(text: bytes) -> dict[str, Any]:
    writer = CompletionWriter("m", TOKENIZER, with_logprobs=True, echoes={})
    for byte in text:
        writer.collect(0, Event(token=byte, logprobs=Logprobs(-1.0, ((byte, -1.0), (FACE[0], -2.0), (FACE[1], -3.0)))))
    writer.collect(0, Event(result=Result(text.decode(), "", tuple(text), "stop", 0, Usage(1, len(text), 0), {}, {})))
    return json.loads(json.dumps(writer.whole({})))["choices"][0]["logprobs"]


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    found = completion(b"a" + FACE + b"b")
    assert found["tokens"] == ["a", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x8a", "b"]
    assert found["text_offset"] == [0, 1, 1, 1, 1, 2]
    assert found["top_logprobs"][0] == {"a": -1.0, r"bytes:\xf0": -2.0, r"bytes:\x9f": -3.0}


def test_a_conversation_names_it_without_a_prefix() -> None:
    writer = ChatWriter("m", TOKENIZER, stream=False, with_logprobs=True, tools=())
    for byte in FACE:
        writer.collect(0, Event(token=byte, logprobs=Logprobs(-1.0, ((byte, -1.0),))))
    writer.collect(0, Event(result=Result("😊", "", tuple(FACE), "stop", 0, Usage(1, 4, 0), {}, {})))
    content = json.loads(json.dumps(writer.whole({})))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [r"\xf0", r"\x9f", r"\x98", r"\x8a"]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == FACE
    assert [entry["top_logprobs"][0]["bytes"] for entry in content] == [[byte] for byte in FACE]


@given(st.text(alphabet="aé😊你\n", max_size=12))
def test_offsets_are_those_of_the_text(text: str) -> None:
    offsets = completion(text.encode())["text_offset"]
    assert offsets == [place for place, character in enumerate(text) for _ in character.encode()]
