"""The one door: events, refusals, Stop, giving way, scoring, hidden states."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.service.api import OpenModel
from onedesk.service.config import Config
from onedesk.service.core import Event, Message, Progress, Request, Result, Sampling
from onedesk.service.engine.runner import CHUNK
from onedesk.service.engine.scoring import perplexity
from onedesk.service.errors import Cancelled, FileError, MemoryFull, ModelError, RequestError
from onedesk.service.loader.names import ModelRoots
from onedesk.service.memory.policy import Policy
from onedesk.service.model.arrival import WeightArrival
from onedesk.service.registry import Registry
from oracle import load_model
from tiny_qwen3 import write_tiny_qwen3

CONTEXT = 1024


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def registry(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    made = Registry()
    made.configure(Config(tree=checkpoint.parent, model_roots=(checkpoint.parent,), memory={"floor": 64 << 20}))
    yield made
    made.close()


@pytest.fixture
def model(registry: Registry) -> OpenModel:
    return registry.open("tiny", context=CONTEXT)


def ask(text: str = "a red cat", **changes: Any) -> Request:
    return replace(Request(messages=(Message("user", text),), sampling=Sampling(seed=7), max_tokens=24), **changes)


def run(model: OpenModel, request: Request, cancel: Callable[[], bool] | None = None) -> tuple[list[Event], Result]:
    events = list(model.generate(request, cancel=cancel))
    assert events[-1].result is not None
    assert all(event.result is None for event in events[:-1])
    return events, events[-1].result


def test_events_add_up_to_the_result(model: OpenModel) -> None:
    events, result = run(model, ask())
    assert "".join(event.text for event in events) == result.text
    assert tuple(event.token for event in events if event.token is not None) == result.ids
    assert result.usage.completion == len(result.ids) + (result.finish == "stop")
    assert result.usage.prompt == len(model.encode(model.render((Message("user", "a red cat"),))))
    assert events[0].progress == Progress("prefill", 0, result.usage.prompt)
    assert set(result.seconds) == {"load", "first_token", "total"}
    assert {"prefill", "decode", "sample"} <= set(result.stages)
    assert result.stages["decode"].allocations == 0


def test_the_same_seed_gives_the_same_text_also_after_giving_way(model: OpenModel, registry: Registry) -> None:
    first = run(model, ask())[1]
    held = model.held_bytes()
    assert held >= model.need.total
    released = registry.release("tiny")
    assert sum(r.asked for r in released) > 0
    assert all(r.measured >= 0.98 * r.asked for r in released)
    assert (model.held_bytes(), model.loaded) == (0, False)
    second = run(model, ask())[1]
    assert (second.text, second.ids) == (first.text, first.ids)
    assert second.seconds["load"] > 0
    assert second.stages["load"].bytes > 0
    assert run(model, ask(sampling=Sampling(seed=8)))[1].ids != first.ids


def test_a_load_that_ends_before_the_prompt_begins_is_counted(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    start = WeightArrival.start

    def started_and_done(self: WeightArrival) -> WeightArrival:
        start(self)._thread.join()
        return self

    monkeypatch.setattr(WeightArrival, "start", started_and_done)
    model = registry.open("tiny", context=CONTEXT, load=False)
    first, second = run(model, ask())[1], run(model, ask())[1]
    assert first.seconds["load"] > 0
    assert first.stages["load"].bytes == first.stages["prefetch"].bytes > 0
    assert (second.seconds["load"], "load" in second.stages) == (0, False)


def test_a_seed_is_drawn_and_reported_when_none_is_given(model: OpenModel) -> None:
    state = random.getstate(), torch.random.get_rng_state()
    first = run(model, ask(sampling=Sampling()))[1]
    again = run(model, ask(sampling=Sampling(seed=first.seed)))[1]
    assert again.ids == first.ids
    assert random.getstate() == state[0]
    assert torch.equal(torch.random.get_rng_state(), state[1])


def test_raw_ids_need_no_tokenizer(tmp_path: Path, registry: Registry) -> None:
    folder = write_tiny_qwen3(tmp_path / "bare", tokenizer=False, template=False)
    model = registry.open(folder, context=64)
    result = run(model, Request(ids=(5, 6, 7), sampling=Sampling(temperature=0), max_tokens=10))[1]
    assert result.text == ""
    with torch.no_grad():
        wanted = load_model(folder).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=10, do_sample=False)[0, 3:].tolist()
    assert [*result.ids, *([2] if result.finish == "stop" else [])] == wanted
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        model.generate(ask())


def test_the_context_ends_the_answer(registry: Registry) -> None:
    model = registry.open("tiny", context=32)
    result = run(model, Request(ids=tuple(range(3, 23)), sampling=Sampling(temperature=0, logit_bias={2: -1000.0}), max_tokens=500))[1]
    assert (result.finish, result.usage.completion) == ("length", 12)


@pytest.mark.parametrize("length", [32, 33, 5000])
def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(registry: Registry, length: int) -> None:
    model = registry.open("tiny", context=32, load=False)
    with pytest.raises(RequestError, match=rf"has {length} tokens and the context is 32: .* by {length - 31} tokens"):
        model.generate(Request(ids=(5,) * length))
    assert not model.loaded, "the refusal came after work"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(), "exactly one of messages, prompt and ids; 0"),
        (Request(ids=(1,), prompt="x"), "exactly one of messages, prompt and ids; 2"),
        (ask(max_tokens=0), "max_tokens is 0; use a whole number from 1"),
        (ask(max_tokens=True), "max_tokens is True"),
        (ask(sampling=Sampling(temperature=-0.1)), r"temperature is -0.1; use a number from 0"),
        (ask(sampling=Sampling(temperature=float("nan"))), "temperature is nan"),
        (ask(sampling=Sampling(top_p=0)), r"top_p is 0; use a number above 0 to 1"),
        (ask(sampling=Sampling(top_p=1.5)), "top_p is 1.5"),
        (ask(sampling=Sampling(min_p=-1)), "min_p is -1"),
        (ask(sampling=Sampling(top_k=-1)), "top_k is -1"),
        (ask(sampling=Sampling(seed=2**64)), r"use a whole number from 0 to 2\^64-1"),
        (ask(sampling=Sampling(repetition_penalty=0)), "repetition_penalty is 0; use a number above 0"),
        (ask(sampling=Sampling(logit_bias={1: float("nan")})), "logit_bias has 1: nan"),
        (ask(sampling=Sampling(logit_bias={512: 1.0})), "token id 512, which is not one of the model's 512"),
        (ask(""), "the prompt is empty"),
        (ask(" \n\t"), "the prompt is empty"),
        (ask("half \ud83d of an emoji"), r"lone surrogate U\+D83D\) at position 5"),
        (ask(stop=("",)), "a stop string is empty"),
        (ask(thinking_budget=-1), "thinking_budget is -1"),
        (ask(thinking="maybe"), "thinking is 'maybe'"),
        (ask(n=0), "n is 0; use a whole number from 1 to 128"),
        (ask(n=129), "n is 129"),
        (ask(n=True), "n is True"),
        (ask(best_of=0), "best_of is 0"),
        (ask(best_of=2, n=3), "best_of is 2 and n is 3; best_of must be at least n"),
        (ask(beams=9), "beams is 9; use a whole number from 1 to 8"),
        (ask(beams=2, n=3), "beams is 2 and n is 3"),
        (ask(beams=2, best_of=2), "best_of and beams exclude each other"),
        (ask(beams=2, sampling=Sampling(temperature=0.5)), r"temperature is 0\.5; leave it out"),
        (ask(beams=2, sampling=Sampling(top_p=0.5)), "top_p would change them; leave it out"),
        (ask(beams=2, stop=("x",)), "does not know stop; leave it out"),
        (ask(beams=2, thinking_budget=3), "does not know thinking_budget; leave it out"),
        (ask(beams=2, logprobs=1), "does not know logprobs; leave it out"),
        (
            ask(beams=8, max_tokens=900),
            r"8 beams of up to 900 tokens behind a prompt of \d+ need KV for [\d,]+ tokens, and the context gives 1,024",
        ),
        (Request(ids=()), "list of token ids is empty"),
        (Request(ids=(1, 512)), "token id 512 at position 1 is not one of the model's 512"),
        (Request(ids=(-1,)), "token id -1 at position 0"),
        (Request(prompt=""), "the prompt is empty"),
    ],
)
def test_a_request_that_cannot_be_served_says_why(registry: Registry, request_: Request, message: str) -> None:
    model = registry.open("tiny", context=CONTEXT, load=False)
    with pytest.raises(RequestError, match=message):
        model.generate(request_)
    assert not model.loaded


def test_one_bad_item_refuses_the_list_before_any_work_and_is_named(registry: Registry) -> None:
    model = registry.open("tiny", context=CONTEXT, load=False)
    with pytest.raises(RequestError, match="item 2 of 3: max_tokens is 0"):
        model.generate_batch([ask(), ask(max_tokens=0), ask()])
    with pytest.raises(RequestError, match="item 3 of 3: the prompt has 1024 tokens and the context is 1024"):
        model.generate_batch([ask(), ask(), Request(ids=(5,) * CONTEXT)])
    with pytest.raises(RequestError, match="the list of requests is empty"):
        model.generate_batch([])
    assert not model.loaded


def test_a_stop_before_the_load_gives_every_choice_its_empty_result(registry: Registry) -> None:
    model = registry.open("tiny", context=CONTEXT, load=False)
    found = [event for event in model.generate_batch([ask(n=2), ask()], cancel=lambda: True) if event.result]
    assert [(event.request, event.choice) for event in found] == [(0, 0), (0, 1), (1, 0)]
    assert {event.result.finish for event in found if event.result} == {"cancelled"}
    assert not model.loaded


def test_a_megabyte_prompt_is_refused_with_both_numbers(registry: Registry) -> None:
    model = registry.open("tiny", context=CONTEXT, load=False)
    with pytest.raises(RequestError, match=r"the prompt has more than \d{4,} tokens and the context is 1024"):
        model.generate(ask("word " * 200_000))


def test_stop_in_load_prefill_and_decode_keeps_what_is_there(registry: Registry) -> None:
    model = registry.open("tiny", context=CONTEXT, load=False)
    result = run(model, ask(), lambda: True)[1]
    assert (result.finish, result.text, result.usage.completion, model.loaded) == ("cancelled", "", 0, False)
    model.load()
    asked = iter([False] * 2 + [True] * 100)
    result = run(model, Request(ids=(5,) * (CHUNK + 10)), lambda: next(asked))[1]
    assert (result.finish, result.ids) == ("cancelled", ())
    seen: list[Event] = []
    wanted = run(model, ask())[1]
    for event in model.generate(ask(), cancel=lambda: sum(e.token is not None for e in seen) >= 5):
        seen.append(event)
    assert seen[-1].result is not None
    assert (seen[-1].result.finish, seen[-1].result.ids) == ("cancelled", wanted.ids[:5])
    assert "".join(event.text for event in seen) == seen[-1].result.text
    assert run(model, ask())[1].ids == wanted.ids


def test_a_generator_that_is_dropped_frees_the_model(model: OpenModel) -> None:
    events = model.generate(ask())
    next(events)
    assert model.busy
    assert model.give_way() == (), "a running generation was cut"
    events.close()
    assert not model.busy
    assert model.give_way()


def test_a_second_generation_waits_its_turn_and_can_be_stopped_meanwhile(model: OpenModel) -> None:
    alone = run(model, ask())[1].ids
    events = model.generate(ask())
    next(events)
    assert run(model, ask(), lambda: True)[1].finish == "cancelled"
    second: list[Result] = []
    thread = threading.Thread(target=lambda: second.append(run(model, ask())[1]))
    thread.start()
    rest = list(events)
    thread.join(60)
    assert rest[-1].result is not None
    assert rest[-1].result.ids == second[0].ids == alone


def test_stop_strings_end_and_are_cut(model: OpenModel) -> None:
    whole = run(model, ask(max_tokens=40))[1]
    stop = whole.text[6:9]
    result = run(model, ask(max_tokens=40, stop=(stop,)))[1]
    assert result.finish == "stop_string"
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.ids == whole.ids[: len(result.ids)]


def test_a_runaway_repetition_ends_by_itself(model: OpenModel) -> None:
    biased = Sampling(seed=1, logit_bias={70: 1000.0})
    result = run(model, ask(max_tokens=900, sampling=biased))[1]
    assert (result.finish, len(result.ids)) == ("repetition", 256)
    assert run(model, ask(max_tokens=300, sampling=biased, repetition_stop=False))[1].finish == "length"
    assert run(model, Request(ids=(5,), max_tokens=300, sampling=biased))[1].finish == "length"


def test_a_thinking_budget_closes_the_reasoning(tmp_path: Path, registry: Registry) -> None:
    folder = write_tiny_qwen3(tmp_path / "thinker")
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + "{{- '<think>\\n' }}")
    model = registry.open(folder, context=CONTEXT)
    (closing,) = model.encode("</think>")
    only_letters = {token: -1000.0 for token in range(512) if not 33 <= token < 90}
    request = ask(max_tokens=6, thinking_budget=8, sampling=Sampling(seed=3, logit_bias=only_letters))
    events, result = run(model, request)
    at = result.ids.index(closing)
    assert result.ids.count(closing) == 1
    assert "That is enough thinking" in result.reasoning
    assert "think" not in result.text
    forced_after = len(model.encode("\n\n"))
    assert result.usage.reasoning == at + 1 + forced_after
    assert (result.finish, len(result.ids) - at - 1 - forced_after) == ("length", 6)
    assert len(result.text) >= 4
    assert "".join(event.reasoning for event in events) == result.reasoning


def test_reasoning_that_the_model_opens_is_not_the_answers(model: OpenModel) -> None:
    (opening,) = model.encode("<think>")
    request = ask(max_tokens=1, thinking_budget=3, sampling=Sampling(seed=3, logit_bias={opening: 1000.0}))
    result = run(model, request)[1]
    assert result.ids[0] == opening
    assert "That is enough thinking" in result.reasoning
    assert result.text == ""


def test_hidden_states_equal_transformers(model: OpenModel, checkpoint: Path) -> None:
    text = "the red cat " * 40
    ids = model.encode(text)
    assert len(ids) * 8 > CHUNK
    with torch.no_grad():
        states = load_model(checkpoint).model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    got = model.embed_prompt(text, [0, 2, -2])
    wanted = torch.cat([states[0][0], states[2][0], states[3][0]], 1)
    assert got.shape == (len(ids), 3 * 64)
    assert got.dtype == torch.float32
    assert (got - wanted).abs().max() <= 1e-4
    with pytest.raises(RequestError, match=r"layer 5 does not exist; tiny has 4 blocks: use 0 to 4 or -1 to -5"):
        model.embed_prompt(text, [5])
    with pytest.raises(RequestError, match="no layer was named"):
        model.embed_prompt(text, [])
    with pytest.raises(RequestError, match="no tokens"):
        model.embed_prompt("", [-1])


def test_scores_equal_transformers(model: OpenModel, checkpoint: Path) -> None:
    ids = torch.randint(3, 490, (600,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        logits = load_model(checkpoint)(torch.tensor([ids])).logits[0].log_softmax(-1)
    wanted = logits[torch.arange(599), ids[1:]]
    got = model.score(ids)
    assert len(got) == 599
    assert (torch.tensor(got) - wanted).abs().max() <= 1e-4
    assert perplexity(got) == pytest.approx(float((-wanted.mean()).exp()), rel=1e-4)
    assert (model.score([5]), perplexity([])) == ([], None)
    with pytest.raises(RequestError, match="1025 token ids are longer than the context of 1024"):
        model.score([5] * 1025)


def test_a_long_text_is_scored_in_windows_one_value_a_token(registry: Registry) -> None:
    model = registry.open("tiny", context=64)
    text = "a cat under the blue sky, " * 20
    values, windows = model.score_text(text)
    ids = model.encode(text)
    assert len(values) == len(ids) - 1
    assert windows == 1 + -(-(len(ids) - 64) // 32)
    assert values[:63] == pytest.approx(model.score(ids[:64]))
    last = ids[-(64 - (32 - (len(ids) - 64) % 32) % 32) :]
    assert values[-1] == pytest.approx(model.score(last)[-1], abs=1e-4)


def test_one_choice_is_one_model(registry: Registry, checkpoint: Path) -> None:
    first = registry.open("tiny", context=128)
    assert registry.open("tiny", context=128, load=False) is first
    assert registry.open(checkpoint, context=128, load=False) is first
    assert registry.open("tiny", context=64, load=False) is not first
    assert [model.name for model in registry.models()] == ["tiny", "tiny"]
    with pytest.raises(RequestError, match="no open model is called 'other'; open are: tiny"):
        registry.release("other")


def test_a_model_with_a_time_to_live_gives_way_by_itself_and_wakes_again(model: OpenModel, registry: Registry) -> None:
    model.policy = Policy("ttl", 0.2)
    first = run(model, ask())[1]
    assert registry.watch("cpu").running
    deadline = time.monotonic() + 30
    while registry.pool("cpu").used() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (model.loaded, model.held_bytes(), registry.pool("cpu").used()) == (False, 0, 0)
    assert run(model, ask())[1].ids == first.ids


def test_another_model_makes_an_idle_one_give_way_but_never_a_pinned_or_running_one(checkpoint: Path, tmp_path: Path) -> None:
    other = write_tiny_qwen3(tmp_path / "other", seed=1)
    registry = Registry()
    need = Registry.open(registry, checkpoint, context=CONTEXT, load=False).need.with_headroom(0.2)
    registry.close()
    registry.configure(Config(tree=tmp_path, memory={"limit_bytes": int(need * 1.5), "floor": 16 << 20}))
    first, second = registry.open(checkpoint, context=CONTEXT), registry.open(other, context=CONTEXT, load=False)
    assert run(second, ask())[1].finish
    assert (first.loaded, second.loaded) == (False, True)
    second.policy = Policy("pinned")
    with pytest.raises(MemoryFull, match="tiny"):
        run(first, ask())
    second.policy = Policy("stay")
    events = second.generate(ask())
    next(events)
    with pytest.raises(MemoryFull):
        run(first, ask())
    assert list(events)[-1].result
    assert run(first, ask())[1].finish
    registry.close()


def test_replaced_weights_are_opened_anew(tmp_path: Path, registry: Registry) -> None:
    folder = write_tiny_qwen3(tmp_path / "mine", seed=1)
    old = registry.open(folder, context=CONTEXT)
    before = run(old, ask())[1].ids
    write_tiny_qwen3(folder, seed=2)
    new = registry.open(folder, context=CONTEXT)
    assert new is not old
    assert not old.loaded
    assert run(new, ask())[1].ids != before
    assert registry.models().count(new) == 1
    assert old not in registry.models()


def test_a_closed_handle_is_not_given_to_the_next_who_opens(registry: Registry) -> None:
    registry.open("tiny", context=CONTEXT).close()
    assert run(registry.open("tiny", context=CONTEXT), ask())[1].finish


def test_a_model_that_does_not_fit_is_refused_before_anything_is_loaded(checkpoint: Path) -> None:
    registry = Registry()
    registry.configure(Config(tree=checkpoint.parent, model_roots=(checkpoint.parent,), memory={"limit_bytes": 4 << 20, "floor": 1 << 20}))
    with pytest.raises(MemoryFull, match=r"tiny needs .*weights.*KV"):
        registry.open("tiny", context=4096)
    (left,) = registry.models()
    assert (left.held_bytes(), registry.pool("cpu").used()) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"context": 5000}, RequestError, "context is 5000, but the model's config allows 4096"),
        ({"context": 1}, RequestError, "context is 1; use a whole number from 2"),
        ({"quant": "int3"}, RequestError, "quant is 'int3'; use none, int8, int4"),
        ({"device": "tpu"}, RequestError, "device is 'tpu'; use auto, cpu or cuda"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(registry: Registry, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        registry.open("tiny", **changes)


@pytest.mark.parametrize("name", ["../tiny", "/etc/passwd", "tiny/../../x", "", "a\0b", "nothing"])
def test_names_stay_inside_the_roots(checkpoint: Path, registry: Registry, name: str) -> None:
    with pytest.raises((FileError, ModelError)) as caught:
        registry.open(name, roots=ModelRoots([checkpoint.parent]))
    assert str(checkpoint.parent) not in str(caught.value)


def test_a_closed_model_says_so(model: OpenModel) -> None:
    model.close()
    with pytest.raises(RequestError, match="was closed; open it again"):
        list(model.generate(ask()))


def test_cancelling_a_load_leaves_nothing_behind(registry: Registry) -> None:
    model = registry.open("tiny", context=CONTEXT, load=False)
    with pytest.raises(Cancelled):
        model.load(cancel=lambda: True)
    assert (model.loaded, registry.pool("cpu").used()) == (False, 0)
    heard: list[Progress] = []
    model.load(progress=heard.append)
    assert heard[-1].done == heard[-1].total > 0


def test_generation_defaults_come_from_the_checkpoint(tmp_path: Path, registry: Registry) -> None:
    greedy = registry.open(write_tiny_qwen3(tmp_path / "greedy", generation={"do_sample": False}), context=64)
    runs = {run(greedy, ask(max_tokens=6, sampling=Sampling(seed=seed)))[1].ids for seed in range(4)}
    assert len(runs) == 1
    broken = registry.open(write_tiny_qwen3(tmp_path / "broken", generation={"top_p": 7}), context=64, load=False)
    with pytest.raises(ModelError, match=r"generation_config.json: top_p is 7"):
        broken.generate(ask())
