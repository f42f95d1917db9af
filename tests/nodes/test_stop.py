"""Stop in the real ComfyUI: while a model loads, reads its prompt, writes, and in a list; and what is left
afterwards.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from comfyui import Comfy, Message
from node_graphs import GIVE_WAY, free, held, node, shown, state, writing
from tiny_models import write_hole, write_language_model

LONG_CONTEXT = 40_000
LONG_PROMPT = 38_000
STOPPED = re.compile(r"\[stopped after (\d+) tokens\]$")


def limit_of(message: Message) -> float:
    """Where the progress of node "write" ends, if the message tells that: bytes while loading, tokens while reading
    and writing; else 0.
    """
    return message.data["nodes"].get("write", {}).get("max", 0) if message.kind == "progress_state" else 0


def is_progress(of: int) -> Callable[[Message], bool]:
    """Whether a message says that node "write" is on its way to `of`."""
    return lambda message: limit_of(message) == of


@pytest.fixture(scope="module")
def big_model(comfyui: Comfy) -> Iterator[tuple[str, int]]:
    """A checkpoint that is good for loading only; its name and its bytes."""
    folder = comfyui.models / "llm" / "big-hole"
    yield folder.name, write_hole(comfyui.models / "llm" / "tiny-writer", folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def long_reader(comfyui: Comfy) -> str:
    """A tiny model whose context is so long that reading a prompt takes seconds."""
    folder: Path = comfyui.models / "llm" / "long-reader"
    write_language_model(folder, layers=6, context=LONG_CONTEXT)
    return folder.name


def test_stop_while_writing_keeps_and_marks_the_text(comfyui: Comfy):
    run = comfyui.start(writing("write on and on", seed=11, max_tokens=900))
    run.wait_for("text", node="write")
    run.interrupt()
    outcome = run.result()
    last = outcome.texts("write")[-1].data["text"]
    stopped = STOPPED.search(last)
    assert outcome.end == "execution_interrupted"
    assert stopped
    assert 0 < int(stopped[1]) < 900
    assert len(last[: stopped.start()].rstrip("\n")) == int(stopped[1])  # one character a token


def test_after_a_stop_the_next_run_is_as_if_nothing_happened(comfyui: Comfy):
    graph = writing("before the stop", seed=21, max_tokens=25)
    text = shown(comfyui.run(graph), "text")
    before = held(comfyui, "tiny-writer")
    run = comfyui.start(writing("stop me", seed=22, max_tokens=900))
    run.wait_for("text", node="write")
    run.interrupt()
    assert run.result().end == "execution_interrupted"
    assert held(comfyui, "tiny-writer") == before
    free(comfyui)
    assert shown(comfyui.run(graph), "text") == text


def test_stop_while_loading_leaves_nothing(comfyui: Comfy, big_model: tuple[str, int]):
    name, weight_bytes = big_model
    used = state(comfyui)["used"]
    run = comfyui.start(writing("load", model=name, context=64))
    run.wait_until(is_progress(weight_bytes))
    run.interrupt()
    outcome = run.result()
    seen = [m.data["nodes"]["write"]["value"] for m in outcome.messages if is_progress(weight_bytes)(m)]
    assert outcome.end == "execution_interrupted"
    assert seen[-1] < weight_bytes
    assert held(comfyui, name) == 0
    assert state(comfyui)["used"] == used


def test_stop_while_reading_the_prompt(comfyui: Comfy, long_reader: str):
    run = comfyui.start(writing("x" * LONG_PROMPT, model=long_reader, context=LONG_CONTEXT))
    reading = run.wait_until(lambda m: LONG_PROMPT < limit_of(m) < LONG_CONTEXT)
    run.interrupt()
    outcome = run.result()
    tokens = int(limit_of(reading))
    assert outcome.end == "execution_interrupted"
    assert all(m.data["nodes"]["write"]["value"] < tokens for m in outcome.messages if is_progress(tokens)(m))
    assert outcome.texts("write")[-1].data["text"] == "[stopped after 0 tokens]"


def test_stop_in_a_list_ends_the_whole_list_and_gives_way(comfyui: Comfy):
    graph = writing(["list", 0], policy=GIVE_WAY, seed=31, max_tokens=200)
    graph["list"] = node("TestList", texts=json.dumps([f"item {i}" for i in range(20)]))
    run = comfyui.start(graph)
    run.wait_until(lambda m: m.kind == "text" and "[2/20]" in m.data["text"])
    run.interrupt()
    outcome = run.result()
    last = outcome.texts("write")[-1].data["text"]
    assert outcome.end == "execution_interrupted"
    assert last.startswith("[1/20] ")
    assert STOPPED.search(last)
    assert "[20/20]" not in last
    assert held(comfyui, "tiny-writer") == 0
