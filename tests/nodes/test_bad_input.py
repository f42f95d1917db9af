"""Bad input in the real ComfyUI: what is refused, when, and with which words. Nothing of it may load a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfyui import Comfy
from node_graphs import Graph, free, load, node, prompt, sampling, show, shown, state, writing
from onedesk.service.errors import PeerError


def refusal(comfyui: Comfy, graph: Graph) -> str:
    """What ComfyUI answers when it does not even queue a workflow."""
    with pytest.raises(PeerError) as refused:
        comfyui.client.queue(graph)
    return str(refused.value)


def failure(comfyui: Comfy, graph: Graph) -> str:
    """The message of the error that ended a workflow."""
    outcome = comfyui.run(graph)
    assert outcome.end == "execution_error"
    return outcome.error


@pytest.fixture
def llm(comfyui: Comfy) -> Path:
    return comfyui.models / "llm"


@pytest.fixture
def broken(llm: Path) -> Iterator[Path]:
    """A copy of the tiny writer that a test may break."""
    folder = llm / "broken-writer"
    shutil.copytree(llm / "tiny-writer", folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "name", ["../llm/tiny-writer", "..", "/etc", "/etc/passwd", "a/../../b", "", ".", "x\0y", "tiny-writer/"]
)
def test_a_name_that_is_a_path_is_refused_before_queueing(comfyui: Comfy, name: str):
    answer = refusal(comfyui, writing(model=name))
    assert "is not allowed; use a name as `onedesk models` lists it, not a path" in answer
    assert str(comfyui.base) not in answer


def test_an_absolute_path_into_the_model_folders_is_refused_too(comfyui: Comfy, llm: Path):
    assert "is not allowed" in refusal(comfyui, writing(model=str(llm / "tiny-writer")))


def test_a_symlink_out_of_the_model_folders_is_refused(comfyui: Comfy, llm: Path, tiny_writer: Path):
    link = llm / "elsewhere"
    link.symlink_to(tiny_writer, target_is_directory=True)
    try:
        assert "elsewhere" not in comfyui.object_info("OnedeskLoadModel")["input"]["required"]["model"][1]["options"]
        answer = refusal(comfyui, writing(model="elsewhere"))
        assert "is a symlink that leaves the model folders" in answer
        assert str(tiny_writer.parent) not in answer
    finally:
        link.unlink()


def test_an_unknown_model_is_refused_with_the_nearest_names(comfyui: Comfy):
    answer = refusal(comfyui, writing(model="tiny-wrter"))
    assert "there is no model" in answer
    assert "such as" in answer
    assert "tiny-writer" in answer


def test_a_missing_shard_is_told_when_the_loader_runs(comfyui: Comfy, broken: Path):
    (broken / "model.safetensors").rename(broken / "model-00001-of-00003.safetensors")
    message = failure(comfyui, writing(model=broken.name))
    assert "model-00002-of-00003.safetensors" in message
    assert "model-00003-of-00003.safetensors" in message


def test_a_truncated_file_is_told_and_the_process_lives(comfyui: Comfy, broken: Path):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in failure(comfyui, writing(model=broken.name))
    assert comfyui.run(writing("still alive", seed=1)).ok


@pytest.mark.parametrize(("file", "kind"), [("model.gguf", "GGUF"), ("pytorch_model.bin", "pickle")])
def test_another_format_is_named(comfyui: Comfy, broken: Path, file: str, kind: str):
    (broken / "model.safetensors").rename(broken / file)
    assert f"holds {kind} files" in failure(comfyui, writing(model=broken.name))


def test_a_gguf_file_is_not_offered_and_is_explained(comfyui: Comfy, llm: Path):
    folder = llm / "gguf-writer"
    folder.mkdir()
    files = [llm / "writer-Q4_K_M.gguf", folder / "writer-Q4_K_M.gguf"]
    try:
        for file in files:
            file.write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
        offered = comfyui.object_info("OnedeskLoadModel")["input"]["required"]["model"][1]["options"]
        assert files[0].name not in offered
        assert "is there but is not a model: a folder needs config.json and safetensors files" in refusal(
            comfyui, writing(model=files[0].name)
        )
        assert "holds GGUF files, no safetensors: 'writer-Q4_K_M.gguf'; get the safetensors form" in failure(
            comfyui, writing(model=folder.name)
        )
    finally:
        files[0].unlink()
        shutil.rmtree(folder)


def test_another_architecture_is_named(comfyui: Comfy, broken: Path):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert "llama" in failure(comfyui, writing(model=broken.name))


def test_a_model_replaced_on_disk_is_not_answered_from_the_cache(comfyui: Comfy, broken: Path):
    first = comfyui.run(writing(model=broken.name))
    assert first.ok
    stamp = (broken / "config.json").stat()
    (broken / "config.json").write_bytes((broken / "config.json").read_bytes() + b"\n")
    assert stamp.st_size != (broken / "config.json").stat().st_size
    assert "write" in comfyui.run(writing(model=broken.name)).executed()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_p": 0.0}, "top_p is 0.0; use a number above 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; use a number above 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"logit_bias": "nonsense"}, "logit_bias, line 1"),
        ({"logit_bias": '"two tokens": 1'}, "'two tokens' is 10 tokens of tiny-writer"),
        ({"logit_bias": "99999: 1"}, "tiny-writer has no token 99999; use 0 to"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(comfyui: Comfy, options: dict[str, Any], words: str):
    graph = writing("wrong option")
    graph["options"] = sampling(**options)
    assert words in failure(comfyui, graph)


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 0), ("max_tokens", -5), ("seed", -1), ("seed", 2**64), ("max_tokens", "many")]
)
def test_numbers_out_of_range_are_refused_before_queueing(comfyui: Comfy, name: str, value: object):
    graph = writing("out of range")
    graph["write"]["inputs"][name] = value
    assert name in refusal(comfyui, graph)


def test_negative_temperature_is_the_models_own(comfyui: Comfy):
    graphs = [writing("own temperature", seed=6, max_tokens=20) for _ in range(2)]
    graphs[0]["options"] = sampling(temperature=-1)
    graphs[1]["options"] = sampling(temperature=0.7)  # what the tiny writer's generation_config.json says
    assert shown(comfyui.run(graphs[0]), "text") == shown(comfyui.run(graphs[1]), "text")


@pytest.mark.parametrize("text", ["", "   \n\t "])
def test_an_empty_prompt_is_an_error(comfyui: Comfy, text: str):
    assert "the prompt is empty" in failure(comfyui, writing(text))


def test_an_overlong_prompt_is_refused_with_both_lengths(comfyui: Comfy):
    free(comfyui)
    message = failure(comfyui, writing("y" * 200, context=100))
    assert "and the context is 100" in message
    assert "the prompt has 2" in message
    assert not any(
        entry["loaded"] for entry in state(comfyui)["models"] if entry["name"] == "tiny-writer" and entry["held"] == 0
    )


def test_a_default_context_shrinks_a_requested_one_is_refused(comfyui: Comfy, broken: Path):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 300}))
    assert comfyui.run(writing("short", model=broken.name, context=4096, max_tokens=4)).ok
    assert "context is 4095, but the model's config allows 300" in failure(
        comfyui, writing("short", model=broken.name, context=4095)
    )


def test_a_megabyte_of_prompt_is_refused_in_the_same_way(comfyui: Comfy):
    assert "and the context is 1024" in failure(comfyui, writing("z" * 1_000_000))


def test_half_a_character_is_refused(comfyui: Comfy):
    assert "lone surrogate U+D83D" in failure(comfyui, writing("half \ud83d of an emoji"))


def test_control_characters_and_chinese_pass(comfyui: Comfy):
    text = 'null \0 escape \x1b[31m 红色的圆 🧑‍🎨 {"a": 1}'
    graph = {"prompt": prompt(text), "messages": show("prompt")}
    assert shown(comfyui.run(graph), "messages") == f"[user]\n{text}"
    assert comfyui.run(writing(text)).ok


def test_a_preset_that_is_gone_is_named(comfyui: Comfy):
    graph = writing("preset")
    graph["prompt"]["inputs"]["preset"] = "../../secret"
    assert "there is no preset" in refusal(comfyui, graph)


def test_user_presets_are_offered_and_edits_count(comfyui: Comfy):
    folder = comfyui.base / "user" / "onedesk" / "presets"
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("Answer in rhymes.", encoding="utf-8")
    try:
        assert "mine" in comfyui.object_info("OnedeskPrompt")["input"]["required"]["preset"][1]["options"]
        graph = {"prompt": prompt("verse", preset="mine", system="In Latin."), "messages": show("prompt")}
        assert "[system]\nAnswer in rhymes.\n\nIn Latin.\n\n[user]\nverse" in shown(comfyui.run(graph), "messages")
        (folder / "mine.txt").write_text("Answer in prose.", encoding="utf-8")
        assert "Answer in prose." in shown(comfyui.run(graph), "messages")
    finally:
        shutil.rmtree(folder)


def test_layers_are_checked(comfyui: Comfy):
    def encoded(layers: str) -> Graph:
        encoder = node(
            "OnedeskTextEncoder", model=["load", 0], text="a", layers=layers, template="raw text", min_tokens=0
        )
        return {"load": load(), "encode": encoder, "show": show("encode")}

    assert "layers is 'x'" in failure(comfyui, encoded("x"))
    assert "layers is empty" in failure(comfyui, encoded(" "))
    assert "layer 3 does not exist" in failure(comfyui, encoded("3"))
