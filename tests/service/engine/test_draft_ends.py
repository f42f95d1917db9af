"""Completions that end, or continue with a forced token, inside a draft: they are those of single steps, and blocks are
freed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kept_kernels import keep_kernels
from onedesk.service.api import OpenModel, open_model
from onedesk.service.cache.hybrid_kv import HybridKV
from onedesk.service.core import Request, Result, Sampling
from onedesk.service.engine import speculate
from onedesk.service.engine.speculate import PassCosts
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from safetensors.torch import load_file
from tiny_drafts import write_rigged
from tiny_qwen3 import tiny_tokenizer

LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
END = 2  # the models' end of a text
THINKING = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n<think>"


class Cheap(PassCosts):
    """Fixed costs, not measured: every draft of seven tokens pays."""

    def __init__(self) -> None:
        super().__init__({rows: 1 + 0.05 * (rows - 1) for rows in range(1, 9)}, 0.05, 0.05)

    def record(self, rows: int, seconds: float) -> None:
        pass

    def record_draft(self, tokens: int, unread: int, seconds: float) -> None:
        pass


@pytest.fixture(scope="module", params=["qwen3_5", "qwen4_exp"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text is one cycle of all tokens, and whose drafts are all right."""
    more: dict[str, Any] = {"ple_layer_ids": [1]} if request.param == "qwen4_exp" else {}
    words = tiny_tokenizer()
    more["vocab_size"] = words.get_vocab_size()
    folder = write_rigged(tmp_path_factory.mktemp("models") / "rigged", request.param, **LAYERS, **more)
    words.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    kernels = tmp_path_factory.mktemp("kernels")
    keep_kernels(kernels)
    pool = Pool("cpu", MemorySettings(floor=64 << 20), lambda: read_truth("cpu"))
    opened = open_model(folder, pool=pool, context=256, kernel_cache=kernels)
    opened.load()
    assert opened.session is not None
    opened.session.costs = Cheap()
    yield opened
    pages = opened.session.runner.kv
    pages.check()
    assert isinstance(pages, HybridKV)
    assert pages.available == pages.blocks
    opened.close()


@pytest.fixture(autouse=True)
def bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixed costs are no share of the real time, so the bound on losses is lifted."""
    monkeypatch.setattr(speculate, "MAX_LOSS", 1e9)


def cycle_to(folder: Path, token: int, count: int) -> list[int]:
    """The `count` tokens that come before `token` in the cycle."""
    tensors = load_file(folder / "model.safetensors")
    table, head = (
        next(tensors[name] for name in tensors if name.endswith(f"{which}.weight"))
        for which in ("embed_tokens", "lm_head")
    )
    before = (table @ head.t()).argmax(1).argsort().tolist()
    found = [token]
    while len(found) <= count:
        found.insert(0, before[found[0]])
    return found[:-1]


def both(model: OpenModel, request: Request) -> Result:
    """The result with drafts, which is that without."""
    plain, drafted = (written(model, replace(request, speculation=on)) for on in (False, True))
    assert (drafted.ids, drafted.text, drafted.reasoning, drafted.finish) == (
        plain.ids,
        plain.text,
        plain.reasoning,
        plain.finish,
    )
    assert drafted.usage == plain.usage
    assert "draft" not in plain.stages
    assert model.session is not None
    model.session.runner.kv.check()
    return drafted


def written(model: OpenModel, request: Request) -> Result:
    return next(event.result for event in model.generate(request) if event.result is not None)


def ask(**changes: Any) -> Request:
    return replace(
        Request(sampling=Sampling(temperature=0.0), max_tokens=60, prefix_reuse=False, repetition_stop=False), **changes
    )


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.7, top_k=3, seed=5)])
def test_an_end_inside_a_draft(model: OpenModel, folder: Path, sampling: Sampling) -> None:
    inside = 0
    for count in range(5, 13):
        chain = cycle_to(folder, END, count)
        result = both(model, ask(ids=(7, 9, *chain[:1]), sampling=sampling, prefix_reuse=count % 2 == 0))
        assert (list(result.ids), result.finish, result.usage.completion) == (chain[1:], "stop", count)
        drafts = result.stages["draft"]
        assert drafts.accepted > 0
        inside += drafts.accepted < drafts.proposed  # all of them are right, as far as the text goes
    assert inside >= 6


def test_a_conversation_continues_after_an_end_inside_a_draft(model: OpenModel, folder: Path) -> None:
    """The state kept at the last block boundary is the one there, not one of the rejected draft tokens."""
    chain = cycle_to(folder, END, 80)
    first = both(model, ask(ids=tuple(chain[:21]), prefix_reuse=True, max_tokens=100))
    assert first.finish == "stop"
    longer = (*chain[:21], *first.ids, *chain[30:40])
    again, fresh = (written(model, ask(ids=longer, prefix_reuse=reuse)) for reuse in (True, False))
    assert again.ids == fresh.ids
    assert again.usage.cached == 64


def test_a_stop_string_inside_a_draft(model: OpenModel) -> None:
    plain = both(model, ask(prompt="a red cat", max_tokens=40)).text
    stops = [plain[at : at + 2] for at in range(6, len(plain) - 2, 5) if plain.find(plain[at : at + 2]) == at]
    assert len(stops) >= 3
    inside = 0
    for stop in stops:
        result = both(model, ask(prompt="a red cat", max_tokens=40, stop=(stop,)))
        assert (result.text, result.finish) == (plain[: plain.index(stop)], "stop_string")
        drafts = result.stages.get("draft")
        inside += drafts is not None and drafts.accepted < drafts.proposed
    assert inside > 0


@pytest.mark.parametrize("budget", [3, 5, 9, 14])
def test_a_thinking_budget_that_ends_inside_a_draft(model: OpenModel, budget: int) -> None:
    """The forced token replaces the draft; drafting continues after it."""
    sampling = Sampling(temperature=0.0, logit_bias={END: -1e4})
    result = both(model, ask(prompt=THINKING, thinking_budget=budget, max_tokens=25, sampling=sampling))
    assert "That is enough thinking" in result.reasoning
    drafts = result.stages["draft"]
    assert 0 < drafts.accepted < drafts.proposed


def test_a_stopped_text_leaves_no_state_taken(model: OpenModel) -> None:
    events = model.generate(
        ask(prompt="a red cat", max_tokens=100, sampling=Sampling(temperature=0.0, logit_bias={END: -1e4}))
    )
    for event in events:
        if event.token is not None:
            break
    next(events)
    events.close()
    assert model.session is not None
    model.session.runner.kv.check()
