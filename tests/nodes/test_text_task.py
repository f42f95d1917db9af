"""Writing in the real ComfyUI: streaming, caching, seeds, lists, history, sampling options."""

from __future__ import annotations

import json

from comfyui import Comfy, Outcome
from node_graphs import GIVE_WAY, free, generate, held, load, node, prompt, sampling, show, shown, state, writing


def test_text_is_streamed_into_the_node_and_grows(comfyui: Comfy):
    outcome = comfyui.run(writing("stream me", max_tokens=60))
    final = shown(outcome, "text")
    streamed = [message.data["text"] for message in outcome.texts("write")]
    assert len(final) == 60  # the tiny writer's tokens are one character each
    assert len(streamed) >= 2
    lengths = [len(text) for text in streamed]
    assert lengths == sorted(lengths)
    assert all(final.startswith(text) for text in streamed[:-2])
    assert streamed[-1].startswith(final)


def test_streaming_is_at_most_ten_times_a_second(comfyui: Comfy):
    outcome = comfyui.run(writing("stream slowly", max_tokens=60))
    # By the time of the whole run: messages that wait on their way arrive together. The last two come as soon as they
    # are there: the whole text, then the text with its statistics.
    assert 2 <= len(outcome.texts("write")) <= 10 * outcome.messages[-1].at + 3


def test_progress_counts_tokens_up_to_the_limit(comfyui: Comfy):
    outcome = comfyui.run(writing("count tokens", max_tokens=40))
    seen = [
        m.data["nodes"]["write"] for m in outcome.messages if m.kind == "progress_state" and "write" in m.data["nodes"]
    ]
    decoding = [entry["value"] for entry in seen if entry["max"] == 40]
    assert decoding
    assert decoding == sorted(decoding)


def test_statistics_say_tokens_seed_and_why_it_ended(comfyui: Comfy):
    statistics = shown(comfyui.run(writing("statistics", seed=77, max_tokens=5)), "stats")
    assert statistics.startswith("tiny-writer: ")
    assert "5 written" in statistics
    assert "seed 77;" in statistics
    assert "cut at the token limit" in statistics


def test_same_inputs_and_seed_are_answered_from_the_cache(comfyui: Comfy):
    first = comfyui.run(writing("cache me", seed=3))
    again = comfyui.run(writing("cache me", seed=3))
    assert "write" in first.executed()
    assert "write" in again.cached()
    assert "write" not in again.executed()
    assert shown(again, "text") == shown(first, "text")


def test_a_changed_seed_writes_anew(comfyui: Comfy):
    first = comfyui.run(writing("another seed", seed=3, max_tokens=30))
    other = comfyui.run(writing("another seed", seed=4, max_tokens=30))
    assert "write" in other.executed()
    assert shown(other, "text") != shown(first, "text")


def test_the_same_seed_repeats_the_text_without_cache(comfyui: Comfy):
    first = shown(comfyui.run(writing("repeat me", seed=2**64 - 1, max_tokens=30)), "text")
    free(comfyui)
    again = comfyui.run(writing("repeat me", seed=2**64 - 1, max_tokens=30))
    assert "write" in again.executed()
    assert shown(again, "text") == first


def test_the_global_random_state_is_untouched(comfyui: Comfy):
    graph = writing("random states", seed=5)
    graph["before"] = node("TestRandomStates", value=["prompt", 0], turn=0)
    graph["write"]["inputs"]["messages"] = ["before", 0]
    graph["after"] = node("TestRandomStates", value=["write", 0], turn=0)
    outcome = comfyui.run(graph)
    assert shown(outcome, "before") == shown(outcome, "after")


def test_two_equal_loaders_share_one_model(comfyui: Comfy):
    comfyui.run(writing("one loader"))
    before = state(comfyui)["models"]
    graph = writing("first loader")
    graph |= {
        "load2": load(),
        "prompt2": prompt("second loader"),
        "write2": generate("load2", "prompt2"),
        "text2": show("write2"),
    }
    assert comfyui.run(graph).ok
    assert state(comfyui)["models"] == before


def test_one_workflow_many_times_does_not_grow(comfyui: Comfy):
    comfyui.run(writing("grow", seed=100))
    before = held(comfyui, "tiny-writer")
    for seed in range(101, 106):
        assert comfyui.run(writing("grow", seed=seed)).ok
    after = state(comfyui)
    assert held(comfyui, "tiny-writer") == before
    assert sum(entry["name"] == "OnedeskModel" and entry["loaded"] > 0 for entry in after["comfyui"]) <= len(
        after["models"]
    )


def test_a_list_of_prompts_loads_and_gives_way_once(comfyui: Comfy):
    def allocations_of(texts: list[str]) -> tuple[int, Outcome]:
        graph = writing(["list", 0], context=640, policy=GIVE_WAY, max_tokens=4)
        graph["list"] = node("TestList", texts=json.dumps(texts))
        before = state(comfyui)["allocations"]
        outcome = comfyui.run(graph)
        return state(comfyui)["allocations"] - before, outcome

    comfyui.run(writing("open the pool"))
    for_one, _ = allocations_of(["prompt 0"])
    for_five, outcome = allocations_of([f"prompt {i}" for i in range(5)])
    texts, statistics = outcome.outputs["write"]["text"], outcome.outputs["write"]["stats"]
    assert for_five == for_one > 0
    assert outcome.executed().count("write") == 1
    assert len(texts) == len(statistics) == 5
    assert ["load " in line for line in statistics] == [True] + [False] * 4
    assert ["gave way" in line for line in statistics] == [False] * 4 + [True]
    assert shown(comfyui.run(writing("prompt 3", context=640, max_tokens=4)), "text") == texts[3]


def test_list_items_are_batched_and_equal_single_runs(comfyui: Comfy):
    answer = {"seed": 61, "max_tokens": 400, "context": 4096}  # long enough to be seen on the way, ten times a second
    graph = writing(["list", 0], **answer)
    graph["list"] = node("TestList", texts=json.dumps([f"item {place}" for place in range(10)]))
    outcome = comfyui.run(graph)
    texts = outcome.outputs["write"]["text"]
    streamed = [message.data["text"] for message in outcome.texts("write")]
    firsts = [text.partition("\n\n[2/10] ")[0].removeprefix("[1/10] ") for text in streamed if "\n\n[2/10] " in text]
    assert min(map(len, firsts)) < len(texts[0]), "the second began when the first had ended"
    assert all(text.startswith("[1/10] ") for text in streamed if text)
    assert [statistics.partition("; seed ")[2][:3] for statistics in outcome.outputs["write"]["stats"]] == ["61;"] * 10
    for place in (0, 1, 8, 9):
        assert shown(comfyui.run(writing(f"item {place}", **answer)), "text") == texts[place]


def test_one_bad_item_refuses_the_list_and_is_named(comfyui: Comfy):
    graph = writing(["list", 0], context=64, max_tokens=4)
    graph["list"] = node("TestList", texts=json.dumps(["short", "x" * 500, "short"]))
    outcome = comfyui.run(graph)
    assert not outcome.ok
    assert "item 2 of 3: the prompt has" in str(outcome.error)


def test_answers_become_the_history_of_the_next_turn(comfyui: Comfy):
    graph = writing("first turn")
    graph["prompt2"] = prompt("second turn", history=["write", 2], system="be brief")
    graph["write2"] = generate("load", "prompt2", sampling=["options", 0])
    graph["messages"] = show("prompt2")
    outcome = comfyui.run(graph)
    messages = shown(outcome, "messages")
    answer = shown(outcome, "text")
    assert messages == f"[system]\nbe brief\n\n[user]\nfirst turn\n\n[assistant]\n{answer}\n\n[user]\nsecond turn"


def test_stop_strings_end_the_answer(comfyui: Comfy):
    text = shown(comfyui.run(writing("stop strings", seed=9, max_tokens=40)), "text")
    stop = text[20:22]
    graph = writing("stop strings", seed=9, max_tokens=40)
    graph["options"] = sampling(stop=stop)
    outcome = comfyui.run(graph)
    assert shown(outcome, "text") == text[: text.index(stop)]
    assert "ended at a stop string" in shown(outcome, "stats")


def test_greedy_does_not_depend_on_the_seed(comfyui: Comfy):
    graphs = [writing("greedy", seed=seed, max_tokens=20) for seed in (1, 2)]
    for graph in graphs:
        graph["options"] = sampling(temperature=0)
    first, second = (shown(comfyui.run(graph), "text") for graph in graphs)
    assert first == second


def test_a_bias_of_a_quoted_token_decides(comfyui: Comfy):
    graph = writing("bias", max_tokens=6)
    graph["options"] = sampling(logit_bias='"Q": 1000')
    assert shown(comfyui.run(graph), "text") == "QQQQQQ"


def test_dynamic_prompts_are_drawn_by_their_own_seed(comfyui: Comfy):
    def messages(seed: int) -> str:
        graph = {
            "prompt": prompt("a {red|green|blue|white|black} {cat|dog}", dynamic=True, seed=seed),
            "show": show("prompt"),
        }
        return shown(comfyui.run(graph), "show")

    drawn = {seed: messages(seed) for seed in (1, 2, 3, 4)}
    assert len(set(drawn.values())) > 1
    assert messages(1) == drawn[1]
    assert not any("{" in text for text in drawn.values())
