"""The one door: which handle is which model, and when it loads, gives way, wakes and ends."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from asking import CONTEXT, ask, run
from onedesk.service.api import OpenModel
from onedesk.service.config import Config
from onedesk.service.core import Message, Progress, Sampling
from onedesk.service.errors import Cancelled, MemoryFull, ModelError, RequestError
from onedesk.service.memory.policy import Policy
from onedesk.service.model.arrival import WeightArrival
from onedesk.service.registry import Registry
from tiny_qwen3 import write_tiny_qwen3


def test_one_choice_is_one_model(registry: Registry, checkpoint: Path) -> None:
    first = registry.open("tiny", context=128)
    assert registry.open("tiny", context=128, load=False) is first
    assert registry.open(checkpoint, context=128, load=False) is first
    assert registry.open("tiny", context=64, load=False) is not first
    assert [model.name for model in registry.models()] == ["tiny", "tiny"]
    with pytest.raises(RequestError, match="no open model is called 'other'; open are: tiny"):
        registry.release("other")


def test_handles_of_one_checkpoint_share_tokenizer_and_template(registry: Registry) -> None:
    first, second, third = (registry.open("tiny", context=context, load=False) for context in (64, 96, 128))
    assert first.template is second.template is third.template
    assert first.tokenizer is second.tokenizer is third.tokenizer
    asked = [Message("user", "a cat")]
    shown = first.render(asked)
    registry.forget(first)  # ends the process; who needs it next starts another
    assert second.render(asked) == third.render(asked) == shown


def test_a_changed_template_is_used_by_the_next_who_opens(registry: Registry, checkpoint: Path) -> None:
    asked = [Message("user", "a cat")]
    first = registry.open("tiny", context=64, load=False)
    shown = first.render(asked)
    file = next(
        path for name in ("chat_template.jinja", "tokenizer_config.json") if (path := checkpoint / name).exists()
    )
    before = file.read_bytes()
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content }} and a dog", encoding="utf-8")
    try:
        assert registry.open("tiny", context=64, load=False).render(asked) == "a cat and a dog"
        assert registry.open("tiny", context=96, load=False).render(asked) == "a cat and a dog"
    finally:
        (checkpoint / "chat_template.jinja").unlink()
        file.write_bytes(before)
    assert registry.open("tiny", context=64, load=False).render(asked) == shown


def test_code_in_a_models_folder_is_never_run(registry: Registry, tmp_path: Path) -> None:
    folder = write_tiny_qwen3(tmp_path / "with-code")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}), encoding="utf-8")
    ran = tmp_path / "ran"
    for name in ("modeling_own.py", "configuration_own.py", "__init__.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w')\n", encoding="utf-8")
    model = registry.open(folder, context=64)
    assert run(model, ask(max_tokens=3))[1].usage.completion == 3
    assert not ran.exists()


def test_the_same_seed_gives_the_same_text_after_an_eviction(model: OpenModel, registry: Registry) -> None:
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


def test_a_load_that_ends_before_the_prompt_begins_is_counted(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_model_with_a_ttl_is_evicted_and_reloads(model: OpenModel, registry: Registry) -> None:
    model.policy = Policy("ttl", 0.2)
    first = run(model, ask())[1]
    assert registry.watch("cpu").running
    deadline = time.monotonic() + 30
    while registry.pool("cpu").used() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (model.loaded, model.held_bytes(), registry.pool("cpu").used()) == (False, 0, 0)
    assert run(model, ask())[1].ids == first.ids


def test_only_idle_unpinned_models_are_evicted_for_another(
    checkpoint: Path, registry: Registry, tmp_path: Path
) -> None:
    other = write_tiny_qwen3(tmp_path / "other", seed=1)
    need = registry.open(checkpoint, context=CONTEXT, load=False).need.with_headroom(0.2)
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
