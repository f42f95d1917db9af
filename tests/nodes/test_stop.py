"""Stop in the real ComfyUI: while a model loads, reads its prompt, writes, and in a list; and what is left afterwards."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from comfyui import Comfy, Message
from node_graphs import GIVE_WAY, free, held, node, shown, state, writing
from tiny_models import qwen3_shapes, write_language_model

LONG_CONTEXT = 40_000
LONG_PROMPT = 38_000
STOPPED = re.compile(r"\[stopped after (\d+) tokens\]$")


def limit_of(message: Message) -> float:
    """Where the progress of node "write" ends, if the message tells that: bytes while loading, tokens while reading and writing; else 0."""
    return message.data["nodes"].get("write", {}).get("max", 0) if message.kind == "progress_state" else 0


def is_progress(of: int) -> Callable[[Message], bool]:
    """Whether a message says that node "write" is on its way to `of`."""
    return lambda message: limit_of(message) == of


@pytest.fixture(scope="module")
def big_model(comfyui: Comfy) -> tuple[str, int]:
    """A checkpoint of 1.2 GB that takes no room on the disk (one hole); its name and its bytes. Good for loading only."""
    folder = comfyui.models / "llm" / "big-hole"
    shutil.copytree(comfyui.models / "llm" / "tiny-writer", folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    config |= sizes | {"head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, shape in qwen3_shapes(1024, 3072, 28, 16, 8, 128, 151_936).items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    yield folder.name, at
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
