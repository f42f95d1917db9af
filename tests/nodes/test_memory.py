"""OnedeskMemory in the real ComfyUI: budget, floor, policies; what it shows; and that it loads nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from comfyui import Comfy, Outcome
from node_graphs import GIVE_WAY, STAY, Graph, free, held, load, node, show, shown, state, writing
from PIL import Image

MODEL = "tiny-writer"
AS_CHOSEN = "as their loaders say"
TTL = "give way when idle"


def memory(**inputs: Any) -> dict[str, Any]:
    return node("OnedeskMemory", **({"budget": 0, "floor": 0.0, "policy": AS_CHOSEN, "ttl": 300.0} | inputs))


def looking(**inputs: Any) -> Graph:
    graph = {
        "memory": memory(**inputs),
        "report": show("memory", 1),
        "picture": node("PreviewImage", images=["memory", 2]),
    }
    return graph | ({"load": load(policy=STAY)} if "model" in inputs else {})


def report(comfyui: Comfy, **inputs: Any) -> str:
    return shown(comfyui.run(looking(**inputs)), "report")


def line(text: str, begin: str) -> str:
    return next(line.strip() for line in text.splitlines() if line.strip().startswith(begin))


@pytest.fixture(autouse=True)
def as_configured(comfyui: Comfy) -> Iterator[None]:
    yield
    assert comfyui.run({"memory": memory()}).ok


def wait_for_nothing_held(comfyui: Comfy) -> bool:
    end = time.monotonic() + 30
    while held(comfyui, MODEL) and time.monotonic() < end:
        time.sleep(0.05)
    return held(comfyui, MODEL) == 0


def test_it_loads_nothing_and_shows_that_nothing_is_leased(comfyui: Comfy):
    assert comfyui.run(writing("opened once", max_tokens=1)).ok
    free(comfyui)
    text = report(comfyui, model=["load", 0])
    assert state(comfyui)["used"] == 0
    assert "nothing is leased" in text
    assert "tiny-writer: not in memory, policy stay" in text


def test_it_shows_truth_budget_leases_and_passes_the_value_on(comfyui: Comfy):
    graph = writing("memory", seed=1)
    graph |= {"memory": memory(value=["write", 0]), "report": show("memory", 1), "passed": show("memory", 0)}
    outcome = comfyui.run(graph)
    text = shown(outcome, "report")
    assert shown(outcome, "passed") == shown(outcome, "text")
    assert [
        word for word in ("TRUTH", "available", "BUDGET", "limit", "floor", "kept back", "used") if word not in text
    ] == []
    rows = [row.split() for row in text.splitlines() if row.startswith(f"{MODEL} ")]
    assert [row[1] for row in rows] == ["weights", "kv", "scratch"]
    assert all("host" in row and "stay" in row for row in rows)
    assert outcome.outputs["memory"]["text"] == [text]


def test_it_runs_every_time(comfyui: Comfy):
    graph = looking()
    assert comfyui.run(graph).ok
    assert "memory" in comfyui.run(graph).executed()


def test_the_picture_is_drawn_for_the_page_and_as_an_image(comfyui: Comfy):
    assert comfyui.run(writing("picture", seed=2)).ok
    outcome = comfyui.run(looking())
    for name in ("memory", "picture"):
        (entry,) = outcome.outputs[name]["images"]
        with Image.open(comfyui.base / entry["type"] / entry["subfolder"] / entry["filename"]) as image:
            assert image.width == 640
            # Weights, KV and scratch of the writer are too small for a pixel of the limit, but each has its own bar and
            # words.
            assert image.height == 2 * 16 + 5 * (2 * 20 + 22 + 16)


def test_budget_and_floor_are_applied_and_taken_back(comfyui: Comfy):
    before = report(comfyui)
    changed = report(comfyui, budget=30, floor=1.5)
    assert "30% of what was available, 1.5 GiB always left" in changed
    assert "1.5 GiB" in line(changed, "floor ")
    assert line(before, "floor and shares") == line(report(comfyui), "floor and shares")


def test_the_same_budget_again_changes_nothing(comfyui: Comfy):
    first = report(comfyui, budget=25)
    assert line(first, "limit ") == line(report(comfyui, budget=25), "limit ")


def refused(comfyui: Comfy, **inputs: Any) -> str:
    outcome: Outcome = comfyui.run(looking(**inputs))
    assert outcome.end == "execution_error"
    return outcome.error


def test_bad_values_raise_the_pools_messages(comfyui: Comfy):
    before = line(report(comfyui), "limit ")
    assert "memory budget is 5%; use 10% to 95%" in refused(comfyui, budget=5)
    assert "memory budget is 100%; use 10% to 95%" in refused(comfyui, budget=100)
    assert "memory floor is 1048576 GiB, but the machine has " in refused(comfyui, floor=2.0**20)
    assert line(report(comfyui), "limit ") == before


def test_a_budget_below_what_is_leased_is_refused_with_figures(comfyui: Comfy):
    assert comfyui.run(writing("leased", seed=3)).ok
    comfyui.client.ask("/onedesk_tests/available", {"bytes": 1 << 12})
    try:
        assert "are leased now; release a model first" in refused(comfyui, budget=10)
    finally:
        comfyui.client.ask("/onedesk_tests/available", {"bytes": None})
    assert held(comfyui, MODEL) > 0


def test_a_time_makes_an_idle_model_give_way_by_itself(comfyui: Comfy):
    assert comfyui.run(writing("for a while", seed=4)).ok
    text = report(comfyui, policy=TTL, ttl=3600.0, model=["load", 0])
    assert held(comfyui, MODEL) > 0
    assert "ttl 3600" in text
    assert comfyui.run(looking(policy=TTL, ttl=0.0)).ok
    assert wait_for_nothing_held(comfyui)


def test_the_loaders_time_does_the_same(comfyui: Comfy):
    graph = writing("loader's time", seed=5, policy=TTL)
    graph["load"]["inputs"]["ttl"] = 0.5
    assert comfyui.run(graph).ok
    assert wait_for_nothing_held(comfyui)


def test_give_way_means_the_end_of_this_workflow(comfyui: Comfy):
    assert comfyui.run(writing("phase", seed=6)).ok
    assert "policy phase" in report(comfyui, policy=GIVE_WAY)
    assert held(comfyui, MODEL) == 0


def test_a_policy_lasts_until_the_next_use(comfyui: Comfy):
    assert comfyui.run(writing("one", seed=7, context=512)).ok
    assert comfyui.run(writing("one", seed=7, context=1024)).ok
    # The loader of looking() chooses the context of 1024.
    text = report(comfyui, policy="pinned", model=["load", 0])
    rows = [row for row in text.splitlines() if row.startswith(f"{MODEL}: holds")]
    assert sorted("pinned" in row for row in rows) == [False, True]
    assert report(comfyui, policy="pinned").count("policy pinned") >= 2
    assert report(comfyui, policy=STAY).count("policy pinned") == 0
    assert "policy stay" in report(comfyui)


def test_evictions_are_shown_in_text_and_statistics(comfyui: Comfy):
    assert comfyui.run(writing("evicted", seed=8)).ok
    assert comfyui.run({"room": node("TestRoom", value="x", bytes=1, busy=False, turn=8)}).ok
    assert held(comfyui, MODEL) == 0
    assert "ComfyUI took the room" in report(comfyui)
    statistics = shown(comfyui.run(writing("evicted", seed=9)), "stats")
    assert "ComfyUI took the room" in statistics
    assert "measured" in statistics
