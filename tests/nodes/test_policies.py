"""When a model gives its memory back in the real ComfyUI: after the last text node, on request, by POST /free, on
errors.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator

import pytest
from comfyui import Comfy, Outcome
from node_graphs import GIVE_WAY, Graph, free, generate, held, load, node, prompt, sampling, show, shown, state, writing

MODEL = "tiny-writer"


def two_writers(first_seed: int, second_seed: int, *, chained: bool = False) -> Graph:
    """Two answers of one model that gives way; with `chained` the second continues the first."""
    graph = writing("the first of two", policy=GIVE_WAY, seed=first_seed)
    graph["prompt2"] = prompt("the second of two", **({"history": ["write", 2]} if chained else {}))
    graph["write2"] = generate("load", "prompt2", seed=second_seed, sampling=["options", 0])
    graph["stats2"] = show("write2", 3)
    return graph


def wait_for_nothing_held(comfyui: Comfy, model: str) -> bool:
    """POST /free is done when ComfyUI's worker comes to it."""
    end = time.monotonic() + 30
    while held(comfyui, model) and time.monotonic() < end:
        time.sleep(0.05)
    return held(comfyui, model) == 0


def test_stay_keeps_the_model(comfyui: Comfy):
    assert comfyui.run(writing("stay", seed=1)).ok
    assert held(comfyui, MODEL) > 0


def test_give_way_returns_bytes_and_shows_the_amount(comfyui: Comfy):
    comfyui.run(writing("loaded before", seed=1))
    before = held(comfyui, MODEL)
    statistics = shown(comfyui.run(writing("give way", policy=GIVE_WAY, seed=2)), "stats")
    assert before > 0
    assert held(comfyui, MODEL) == 0
    assert "gave way: tiny-writer, asked " in statistics
    assert "measured" in statistics


def test_chained_writers_give_way_once_after_the_last(comfyui: Comfy):
    outcome = comfyui.run(two_writers(40, 41, chained=True))
    assert "gave way" not in shown(outcome, "stats")
    assert "gave way" in shown(outcome, "stats2")
    assert "load " not in shown(outcome, "stats2")
    assert held(comfyui, MODEL) == 0


def test_side_by_side_writers_give_way_once(comfyui: Comfy):
    outcome = comfyui.run(two_writers(50, 51))
    assert ["gave way" in shown(outcome, name) for name in ("stats", "stats2")].count(True) == 1
    assert held(comfyui, MODEL) == 0


@pytest.mark.parametrize(("cached", "anew"), [("write2", "write"), ("write", "write2")])
def test_a_writer_answered_from_the_cache_is_not_waited_for(comfyui: Comfy, cached: str, anew: str):
    comfyui.run(two_writers(60, 61))
    outcome = comfyui.run(two_writers(62, 61) if anew == "write" else two_writers(60, 63))
    assert anew in outcome.executed()
    assert cached not in outcome.executed()
    assert "gave way" in shown(outcome, "stats" if anew == "write" else "stats2")
    assert held(comfyui, MODEL) == 0


def test_an_unreached_writer_is_not_awaited_after_the_end(comfyui: Comfy):
    graph = two_writers(70, 71)
    del graph["stats2"]
    graph["switch"] = node("ComfySwitchNode", switch=False, on_false=["prompt", 0], on_true=["write2", 2])
    graph["seen"] = show("switch")
    outcome = comfyui.run(graph)
    assert "write2" not in outcome.executed()
    assert "gave way" not in shown(outcome, "stats")
    assert held(comfyui, MODEL) == 0


def test_a_failure_later_in_the_workflow_gives_way_too(comfyui: Comfy):
    graph = two_writers(80, 81)
    graph["fail"] = node("TestFailure", value=["write", 0])
    graph["prompt2"]["inputs"]["history"] = ["write", 2]
    outcome = comfyui.run(graph)
    assert outcome.end == "execution_error"
    assert held(comfyui, MODEL) == 0


def test_free_unloads_and_the_next_use_loads_again(comfyui: Comfy):
    graph = writing("free me", seed=90, max_tokens=20)
    text = shown(comfyui.run(graph), "text")
    listed = [entry for entry in state(comfyui)["comfyui"] if entry["name"] == "OnedeskModel"]
    assert any(entry["loaded"] == held(comfyui, MODEL) > 0 for entry in listed)
    comfyui.client.ask("/free", {"unload_models": True})
    assert wait_for_nothing_held(comfyui, MODEL)
    # The loader is answered from the cache; its output still works.
    again = comfyui.run(writing("free me", seed=91, max_tokens=20))
    assert "load" in again.cached()
    assert "load " in shown(again, "stats")
    free(comfyui)
    assert shown(comfyui.run(graph), "text") == text


def test_ten_times_away_and_back_is_the_same_text_and_no_growth(comfyui: Comfy):
    graph = writing("away and back", policy=GIVE_WAY, seed=92, max_tokens=15)
    texts, used = [], []
    for _ in range(10):
        free(comfyui)
        texts.append(shown(comfyui.run(graph), "text"))
        used.append(state(comfyui)["used"])
    assert len(set(texts)) == 1
    assert len(set(used)) == 1


def test_release_evicts_and_passes_the_value_on(comfyui: Comfy):
    graph = writing("release", seed=95)
    graph["release"] = node("OnedeskRelease", value=["write", 0], model=["load", 0])
    graph["passed"] = show("release", 0)
    graph["report"] = show("release", 1)
    outcome = comfyui.run(graph)
    assert shown(outcome, "passed") == shown(outcome, "text")
    assert "gave way: tiny-writer, asked " in shown(outcome, "report")
    assert held(comfyui, MODEL) == 0
    graph["release"]["inputs"] = {"value": ["write", 0]}
    assert shown(comfyui.run(graph), "report").startswith("nothing to release")


@pytest.fixture
def thinker(comfyui: Comfy) -> Iterator[str]:
    """A copy of the tiny writer, dropped in while ComfyUI runs, whose template begins every answer inside of a
    thought.
    """
    folder = comfyui.models / "llm" / "tiny-thinker"
    shutil.copytree(comfyui.models / "llm" / MODEL, folder)
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>\n"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    yield folder.name
    shutil.rmtree(folder)


def test_an_answer_of_thoughts_alone_is_an_error_that_gives_way(comfyui: Comfy, thinker: str):
    assert thinker in comfyui.object_info("OnedeskLoadModel")["input"]["required"]["model"][1]["options"]
    graph = writing("think", model=thinker, context=64, policy=GIVE_WAY)
    graph["options"] = sampling(thinking_budget=1000)
    outcome = comfyui.run(graph)
    assert outcome.end == "execution_error"
    assert re.search(r"the model only thought \(\d\d tokens\) and gave no answer", outcome.error)
    assert "text" not in outcome.outputs
    assert held(comfyui, thinker) == 0


def test_thoughts_have_their_own_output_and_their_own_budget(comfyui: Comfy, thinker: str):
    graph = writing("think", model=thinker, max_tokens=10)
    graph["options"] = sampling(thinking_budget=20, stop_repetition=False)
    graph["thoughts"] = show("write", 1)
    outcome = comfyui.run(graph)
    assert 0 < len(shown(outcome, "text")) <= 10
    assert len(shown(outcome, "thoughts")) >= 20
    assert "thinking" in shown(outcome, "stats")
    assert "<think>" not in shown(outcome, "text")


def test_reasoning_stays_out_and_reasoning_alone_is_refused(comfyui: Comfy, thinker: str):
    def thinking(budget: int) -> Outcome:
        graph = writing(["list", 0], model=thinker, context=256, max_tokens=10)
        graph["list"] = node("TestList", texts=json.dumps(["one", "two", "three"]))
        graph["options"] = sampling(thinking_budget=budget)
        return comfyui.run(graph)

    texts = thinking(20).outputs["write"]["text"]
    assert [0 < len(text) <= 10 for text in texts] == [True] * 3
    unclosed = thinking(1000)
    assert unclosed.end == "execution_error"
    assert re.search(r"item 1 of 3: the model only thought \(\d+ tokens\) and gave no answer", unclosed.error)
    assert "text" not in unclosed.outputs


def test_an_empty_answer_is_an_error(comfyui: Comfy):
    graph = writing("say nothing")
    graph["options"] = sampling(logit_bias='"<|im_end|>": 1000')
    outcome = comfyui.run(graph)
    assert outcome.end == "execution_error"
    assert "the model gave an empty answer (1 tokens, ended by stop)" in outcome.error


def test_opening_a_page_or_a_lone_loader_loads_nothing(comfyui: Comfy):
    free(comfyui)
    assert wait_for_nothing_held(comfyui, MODEL)
    comfyui.object_info()
    comfyui.client.ask("/workflow_templates")
    graph = {"load": load(context=333), "show": show("load")}
    assert "ModelChoice" in shown(comfyui.run(graph), "show")
    assert state(comfyui)["used"] == 0
