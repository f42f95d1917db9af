"""What people reported of other packs, by number; each must be right here, in the real ComfyUI.

Others of the same list stand where they belong: 3 (nothing loads by itself), 5 (a cached loader after "free memory")
and 9 (ten times away and back) in test_policies.py, 4 (a list of prompts), 20, 21, 24 and 25 in test_write.py and
test_stop.py, 10, 12, 13, 19 and 32 in test_bad_input.py, 14 and 17 in test_policies.py, 31 in test_nodes.py; of text
(15, 18) and installing
(27 to 30)
without ComfyUI.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from comfyui import Comfy
from node_graphs import GIVE_WAY, free, generate, held, load, node, prompt, sampling, show, shown, state, writing
from onedesk.service.errors import MemoryFull
from onedesk.service.memory.budget import GIB, MemorySettings, Need
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import DeviceFigures, read_truth

MODEL = "tiny-writer"
MACHINES = Path(__file__).resolve().parents[1] / "service" / "memory" / "machines"


def models(comfyui: Comfy) -> int:
    """How many handles there are."""
    return len(state(comfyui)["models"])


def memory(comfyui: Comfy, graph: dict[str, Any], value: str) -> dict[str, Any]:
    """What memory held when node `value` had run."""
    graph = graph | {"seen": node("TestMemory", value=[value, 0])}
    return json.loads(shown(comfyui.run(graph), "seen"))


def test_1_give_way_returns_every_byte(comfyui: Comfy):
    free(comfyui)
    graph = writing("one", seed=1, policy=GIVE_WAY, context=1024)
    seen = memory(comfyui, graph, "write")
    assert seen["ours"] == 0
    assert state(comfyui)["used"] == held(comfyui, MODEL) == 0
    comfyui.run(writing("one", seed=2, context=1024))
    free(comfyui)
    given = memory(
        comfyui, {"text": node("PreviewAny", source="x"), "write": node("TestList", texts='["x"]')}, "write"
    )["given"]
    assert sum(item["asked"] for item in given) > 0
    assert sum(item["measured"] for item in given) >= 0.98 * sum(item["asked"] for item in given)


def test_2_two_equal_loaders_hold_one_model(comfyui: Comfy):
    free(comfyui)
    graph = writing("first of two", seed=2)
    graph |= {"load2": load(), "prompt2": prompt("second of two"), "write2": generate("load2", "prompt2", seed=3)}
    graph["stats2"] = show("write2", 3)
    before = models(comfyui)
    outcome = comfyui.run(graph)
    loads = ["load " in shown(outcome, name) for name in ("stats", "stats2")]
    assert loads.count(True) == 1
    assert models(comfyui) in (before, before + 1)
    assert [entry["held"] > 0 for entry in state(comfyui)["models"] if entry["name"] == MODEL].count(True) == 1


def test_2_six_runs_of_one_workflow_do_not_grow(comfyui: Comfy):
    free(comfyui)
    seen = []
    for seed in range(6):
        assert comfyui.run(writing("six times", seed=seed)).ok
        now = state(comfyui)
        seen.append((now["used"], len(now["models"]), len(now["comfyui"])))
    assert len(set(seen)) == 1


def test_6_an_interruption_keeps_memory_and_model(comfyui: Comfy):
    assert comfyui.run(writing("before", seed=1)).ok
    before = state(comfyui)
    run = comfyui.start(writing("stop me", seed=2, max_tokens=900))
    run.wait_for("text", node="write")
    run.interrupt()
    assert run.result().end == "execution_interrupted"
    assert state(comfyui)["used"] == before["used"]
    outcome = comfyui.run(writing("after", seed=3))
    assert "load " not in shown(outcome, "stats")
    assert state(comfyui)["used"] == before["used"]
    assert state(comfyui)["allocations"] == before["allocations"]


def test_7_a_refused_prompt_gives_way_too(comfyui: Comfy):
    free(comfyui)
    assert comfyui.run(writing("loaded", seed=1, context=256)).ok
    assert held(comfyui, MODEL) > 0
    outcome = comfyui.run(writing("x" * 400, seed=2, context=256, policy=GIVE_WAY))
    assert outcome.end == "execution_error"
    assert held(comfyui, MODEL) == 0


def test_11_added_and_removed_folders_are_noticed_at_once(comfyui: Comfy):
    def offered() -> list[str]:
        return comfyui.object_info("OnedeskLoadModel")["input"]["required"]["model"][1]["options"]

    place = comfyui.models / "llm" / "dropped-in"
    assert place.name not in offered()
    shutil.copytree(comfyui.models / "llm" / MODEL, place)
    try:
        assert place.name in offered()
        assert comfyui.run({"load": load(place.name), "show": show("load")}).ok
    finally:
        shutil.rmtree(place)
    assert place.name not in offered()


def test_16_the_system_prompt_follows_the_template(comfyui: Comfy):
    def read(**messages: str) -> int:
        graph = writing("a cat", seed=16, max_tokens=1) | {"prompt": prompt("a cat", **messages)}
        found = re.search(r"(\d+) tokens read", shown(comfyui.run(graph), "stats"))
        assert found
        return int(found[1])

    # <|im_start|> and <|im_end|> are a token each, all else of this template and tokenizer one a byte.
    assert read(system="Answer in rhymes.") - read() == 2 + len("system\nAnswer in rhymes.\n")


def test_23_options_reach_every_writer_of_a_chain(comfyui: Comfy):
    graph = writing("first turn", seed=23)
    graph["options"] = sampling(logit_bias='"Q": 1000')
    graph["prompt2"] = prompt("second turn", history=["write", 2])
    graph |= {"write2": generate("load", "prompt2", seed=24, sampling=["options", 0]), "text2": show("write2")}
    outcome = comfyui.run(graph)
    assert set(shown(outcome, "text")) == set(shown(outcome, "text2")) == {"Q"}


def test_22_only_answers_after_a_change_are_rewritten(comfyui: Comfy):
    def written(first: int, second: int) -> set[str]:
        graph = writing("first turn", seed=first)
        graph["prompt2"] = prompt("second turn", history=["write", 2])
        graph |= {"write2": generate("load", "prompt2", seed=second), "text2": show("write2")}
        outcome = comfyui.run(graph)
        assert shown(outcome, "text2")
        return {"write", "write2"} & set(outcome.executed())

    assert written(221, 222) == {"write", "write2"}
    assert written(221, 222) == set()
    assert written(221, 223) == {"write2"}
    assert written(224, 223) == {"write", "write2"}


def test_26_a_runaway_repetition_ends_by_itself_and_says_so(comfyui: Comfy):
    graph = writing("round and round", max_tokens=900)
    graph["options"] = sampling(logit_bias='"Q": 1000', stop_repetition=True)
    outcome = comfyui.run(graph)
    assert set(shown(outcome, "text")) == {"Q"}
    assert len(shown(outcome, "text")) < 300
    assert "ended because it repeated itself" in shown(outcome, "stats")


@pytest.mark.parametrize(("size", "free_now"), [(24, 2), (21, 1)], ids=["24 GB", "21 GB"])
def test_8_page_cache_is_not_used_memory(size: int, free_now: int):
    def probe(device: str) -> DeviceFigures:
        return DeviceFigures(True, free_now * GIB, 121 * GIB, 0, 0)

    truth = read_truth("cuda", proc=MACHINES / "spark" / "proc", cgroup=MACHINES / "spark" / "cgroup", probe=probe)
    assert truth.device_free == free_now * GIB  # what other packs go by
    pool = Pool("cpu", MemorySettings(), lambda: truth)
    pool.check("large", Need(size * 10**9))
    with pytest.raises(MemoryFull):
        pool.check("too large", Need(50 * GIB))
