"""OnedeskDescribeImage and pictures in messages, in the real ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest
from comfyui import Comfy
from node_graphs import Graph, generate, load, node, prompt, sampling, show
from pictures import drawn, encoded, pillow
from tiny_vision import write_seer

SEER = "tiny-seer"


@pytest.fixture(scope="module")
def seer(comfyui: Comfy) -> str:
    """A model that sees in ComfyUI's folder, and the pictures one.png and two.png among its inputs."""
    write_seer(comfyui.base / "models" / "llm" / SEER)
    for number, name in enumerate(("one", "two"), 1):
        (comfyui.base / "input" / f"{name}.png").write_bytes(encoded(pillow(drawn(96, 64, number))))
    return SEER


def describing(seer: str, **inputs: Any) -> Graph:
    """Two pictures as one batch ("batch"), described ("write"), with texts and statistics shown."""
    asked = {"task": "caption", "question": "", "together": False, "pixels": 0, "seed": 1, "max_tokens": 6} | inputs
    return {
        "load": load(seer),
        "one": node("LoadImage", image="one.png"),
        "two": node("LoadImage", image="two.png"),
        "batch": node("ImageBatch", image1=["one", 0], image2=["two", 0]),
        "options": sampling(temperature=0),
        "write": node("OnedeskDescribeImage", model=["load", 0], image=["batch", 0], sampling=["options", 0], **asked),
        "text": show("write"),
        "stats": show("write", 3),
    }


def texts(outcome: Any, name: str = "write") -> list[str]:
    return outcome.outputs[name]["text"]


def test_a_batch_is_a_list_of_pictures_or_one_question(comfyui: Comfy, seer: str):
    single = comfyui.run(describing(seer))
    assert len(texts(single)) == 2
    assert len(single.outputs["write"]["stats"]) == 2
    together = comfyui.run(describing(seer, together=True, task="compare"))
    assert len(texts(together)) == 1


def test_a_conversation_holds_pictures(comfyui: Comfy, seer: str):
    graph = describing(seer)
    graph |= {
        "ask": prompt("what is it?", image=["one", 0]),
        "first": generate("load", "ask", max_tokens=4, sampling=["options", 0]),
        "again": prompt("and its colour?", history=["first", 2]),
        "second": generate("load", "again", max_tokens=4, sampling=["options", 0]),
        "end": show("second"),
    }
    outcome = comfyui.run(
        {name: graph[name] for name in ("load", "one", "options", "ask", "first", "again", "second", "end")}
    )
    assert len(texts(outcome, "second")) == 1


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"task": "my question"}, "the question is empty"),
        ({"pixels": 10}, "this model reads pictures of at least 1,024 pixels"),
        ({"question": "what is <|image_pad|>?"}, "a message has <|image_pad|> in it"),
    ],
)
def test_what_cannot_be_answered_is_said_in_the_node(comfyui: Comfy, seer: str, inputs: dict[str, Any], words: str):
    outcome = comfyui.run(describing(seer, **inputs))
    assert words in outcome.error


def test_a_model_that_only_writes_says_which_see(comfyui: Comfy, seer: str):
    outcome = comfyui.run(describing("tiny-writer"))
    assert "tiny-writer reads no pictures: model_type 'qwen3' has none; models that see are qwen2_5_vl" in outcome.error
