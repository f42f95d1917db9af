"""What is promised of every node: ids, input order, tooltips, help in two languages."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from comfyui import Comfy

# Fixed for ever: names are only appended.
INPUTS = {
    "OnedeskLoadModel": ["model", "weights", "context", "policy", "ttl", "where"],
    "OnedeskPrompt": ["preset", "system", "text", "dynamic", "seed", "history", "image"],
    "OnedeskSampling": [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stop",
        "thinking",
        "thinking_budget",
        "stop_repetition",
        "logit_bias",
    ],
    "OnedeskGenerate": ["model", "messages", "seed", "max_tokens", "sampling"],
    "OnedeskDescribeImage": [
        "model",
        "image",
        "task",
        "question",
        "together",
        "pixels",
        "seed",
        "max_tokens",
        "sampling",
    ],
    "OnedeskTextEncoder": ["model", "text", "layers", "template", "min_tokens"],
    "OnedeskRelease": ["value", "model"],
    "OnedeskMemory": ["budget", "floor", "policy", "ttl", "model", "value"],
}
OUTPUTS = {
    "OnedeskLoadModel": ["ONEDESK_MODEL"],
    "OnedeskPrompt": ["ONEDESK_MESSAGES"],
    "OnedeskSampling": ["ONEDESK_SAMPLING"],
    "OnedeskGenerate": ["STRING", "STRING", "ONEDESK_MESSAGES", "STRING"],
    "OnedeskDescribeImage": ["STRING", "STRING", "ONEDESK_MESSAGES", "STRING"],
    "OnedeskTextEncoder": ["CONDITIONING"],
    "OnedeskRelease": ["*", "STRING"],
    "OnedeskMemory": ["*", "STRING", "IMAGE"],
}
CHOICES = {
    ("OnedeskLoadModel", "weights"): ["as stored", "int8", "int4"],
    ("OnedeskLoadModel", "policy"): ["stay", "give way after the prompt", "give way when idle", "pinned"],
    ("OnedeskLoadModel", "where"): ["in this process", "local service"],
    ("OnedeskMemory", "policy"): [
        "as their loaders say",
        "stay",
        "give way after the prompt",
        "give way when idle",
        "pinned",
    ],
    ("OnedeskSampling", "thinking"): ["auto", "on", "off"],
    ("OnedeskDescribeImage", "task"): [
        "my question",
        "caption",
        "tags",
        "JSON",
        "prompt for Flux or Qwen-Image",
        "prompt for SDXL",
        "prompt for tag models",
        "read the text",
        "compare",
    ],
    ("OnedeskTextEncoder", "template"): ["chat", "chat without thinking", "raw text"],
}


def inputs_of(info: dict[str, Any]) -> dict[str, list[Any]]:
    return info["input"].get("required", {}) | info["input"].get("optional", {})


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_outputs_and_choices_begin_as_they_always_did(comfyui: Comfy, name: str):
    info = comfyui.object_info(name)
    order = info["input_order"]["required"] + info["input_order"].get("optional", [])
    assert order[: len(INPUTS[name])] == INPUTS[name]
    assert info["output"][: len(OUTPUTS[name])] == OUTPUTS[name]
    for (node, choice), options in CHOICES.items():
        if node == name:
            assert inputs_of(info)[choice][1]["options"][: len(options)] == options


@pytest.mark.parametrize("name", INPUTS)
def test_every_input_and_output_has_a_tooltip(comfyui: Comfy, name: str):
    info = comfyui.object_info(name)
    assert all(len(spec[1]["tooltip"]) > 10 for spec in inputs_of(info).values())
    assert all(len(tip) > 5 for tip in info["output_tooltips"])
    assert info["category"] == "Onedesk"
    assert info["description"]


def test_no_other_node_comes_along(comfyui: Comfy):
    ours = [name for name, info in comfyui.object_info().items() if info["python_module"] == "custom_nodes.onedesk"]
    assert sorted(ours) == sorted(INPUTS)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", INPUTS)
def test_help_is_served_and_names_every_input(comfyui: Comfy, name: str, language: str):
    url = f"http://127.0.0.1:{comfyui.client.port}/extensions/onedesk/docs/{name}/{language}.md"
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode("utf-8")
    assert text.startswith("# ")
    assert [i for i in INPUTS[name] if f"| `{i}` |" not in text] == []


def test_the_reference_names_every_node_with_its_inputs_in_order(repository: Path):
    text = (repository / "docs" / "nodes.md").read_text(encoding="utf-8")
    for name, inputs in INPUTS.items():
        assert re.search(rf"\| `{name}` \| {', '.join(inputs)} \|", text), name
