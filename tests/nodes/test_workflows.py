"""The workflows that come with the pack: found by ComfyUI's template browser, true to its nodes, and running."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from comfyui import Comfy, Outcome
from node_graphs import shown
from PIL import Image
from ui_format import MismatchError, to_api

NAMES = ("demo", "text_to_image", "write_prompt")
API = Path(__file__).parent / "workflows"
# What stands for the models that a user has: names by input, and the loader that takes the tiny text encoder.
TINY = {
    "model": "tiny-writer",
    "clip_name": "tiny_encoder.safetensors",
    "unet_name": "tiny_painter_16.safetensors",
    "vae_name": "tiny_coder.safetensors",
}


def saved(repository: Path, name: str) -> dict[str, Any]:
    return json.loads((repository / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


def queued(name: str) -> dict[str, Any]:
    return json.loads((API / f"{name}.json").read_text(encoding="utf-8"))


def with_tiny_models(graph: dict[str, Any]) -> dict[str, Any]:
    graph = copy.deepcopy(graph)
    for node in graph.values():
        inputs = node["inputs"]
        inputs |= {name: value for name, value in TINY.items() if isinstance(inputs.get(name), str)}
        if node["class_type"] == "CLIPLoader":
            node |= {"class_type": "TestTextEncoder", "inputs": {"clip_name": inputs["clip_name"]}}
        if node["class_type"] == "EmptySD3LatentImage":
            inputs |= {"width": 64, "height": 64}
        if node["class_type"] == "KSampler":
            inputs["steps"] = 2
        if "max_tokens" in inputs:
            inputs["max_tokens"] = 16
    return graph


def test_every_workflow_has_its_picture_and_its_api_form(repository: Path):
    files = {path.name for path in (repository / "workflows").iterdir()}
    assert files == {f"{name}.{ending}" for name in NAMES for ending in ("json", "jpg")}
    assert {path.stem for path in API.glob("*.json")} == set(NAMES)
    for name in NAMES:
        with Image.open(repository / "workflows" / f"{name}.jpg") as picture:
            assert picture.format == "JPEG"
            assert min(picture.size) >= 300


def test_the_template_browser_finds_them(comfyui: Comfy):
    assert sorted(comfyui.client.ask("/workflow_templates")["onedesk"]) == list(NAMES)
    for name in NAMES:
        assert comfyui.client.ask(f"/api/workflow_templates/onedesk/{name}.json")["nodes"]


@pytest.mark.parametrize("name", NAMES)
def test_the_saved_form_fits_the_nodes_and_is_the_queued_form(comfyui: Comfy, repository: Path, name: str):
    assert to_api(saved(repository, name), comfyui.object_info()) == queued(name)


def test_the_check_of_saved_workflows_can_fail(comfyui: Comfy, repository: Path):
    info = comfyui.object_info()
    for break_it in (
        lambda workflow: workflow["nodes"][0].update(type="OnedeskNothing"),
        lambda workflow: workflow["nodes"][0]["widgets_values"].extend([1, 2]),
        lambda workflow: workflow["nodes"][1]["widgets_values"].pop(0),
        lambda workflow: workflow["links"][0].__setitem__(5, "IMAGE"),
        lambda workflow: workflow["links"].pop(),
    ):
        workflow = saved(repository, "write_prompt")
        break_it(workflow)
        with pytest.raises((MismatchError, KeyError)):
            to_api(workflow, info)


def the_node(graph: dict[str, Any], kind: str) -> str:
    (key,) = (key for key, node in graph.items() if node["class_type"] == kind)
    return key


def check_picture(comfyui: Comfy, outcome: Outcome, side: int) -> None:
    assert outcome.ok, outcome.error
    (picture,) = comfyui.pictures(outcome)
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert image.size == (side, side)
        assert len(image.convert("L").getcolors()) > 8


def test_write_prompt_runs_as_it_comes(comfyui: Comfy):
    graph = queued("write_prompt")
    outcome = comfyui.run(graph)
    assert shown(outcome, the_node(graph, "PreviewAny")).startswith("onedesk-demo-writer: ")
    text = outcome.outputs[the_node(graph, "OnedeskGenerate")]["text"][0]
    assert len(text) > len("a red fox in the snow")


def test_the_demo_runs_as_it_comes(comfyui: Comfy):
    graph = queued("demo")
    outcome = comfyui.run(graph)
    check_picture(comfyui, outcome, 128)
    written = outcome.outputs[the_node(graph, "OnedeskGenerate")]["text"][0].lower()
    assert "red" in written
    assert "circle" in written


def test_text_to_image_uses_stock_encoder_and_sampler(comfyui: Comfy):
    check_picture(comfyui, comfyui.run(with_tiny_models(queued("text_to_image"))), 64)


@pytest.mark.parametrize(("template", "min_tokens"), [("raw text", 0), ("chat", 0), ("chat without thinking", 300)])
def test_states_of_any_model_are_conditioning(comfyui: Comfy, template: str, min_tokens: int):
    graph = with_tiny_models(queued("demo"))
    graph[the_node(graph, "UNETLoader")]["inputs"]["unet_name"] = (
        "tiny_painter_64.safetensors"  # as wide as the tiny writer's states
    )
    graph[the_node(graph, "OnedeskTextEncoder")]["inputs"] |= {
        "layers": "-2",
        "template": template,
        "min_tokens": min_tokens,
    }
    check_picture(comfyui, comfyui.run(graph), 64)


def test_no_workflow_holds_a_path_or_a_secret(repository: Path):
    for file in [*(repository / "workflows").glob("*.json"), *API.glob("*.json")]:
        text = file.read_text(encoding="utf-8").lower()
        assert not any(
            word in text
            for word in ("/home", "/root", "/work", "c:\\\\", "token_file", "api_key", "secret", "password")
        )
