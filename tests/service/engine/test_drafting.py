"""Drafts for networks with recurrent layers: from the layer or looked up, right or wrong, the completions are the
same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drafted import CONTEXT, PROMPT, Told, arbitrary, passes, start, tell, write, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kept_kernels import keep_kernels
from onedesk.service.api import OpenModel, open_model
from onedesk.service.core import Request, Sampling
from onedesk.service.engine import speculate
from onedesk.service.kernels.forward_batch import BLOCK
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from tiny_families import write_family

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool("cpu", MemorySettings(floor=64 << 20), lambda: read_truth("cpu"))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    keep_kernels(folder)
    return folder


@pytest.fixture(autouse=True)
def bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixed costs are no share of the real time, so the bound on losses is lifted."""
    monkeypatch.setattr(speculate, "MAX_LOSS", 1e9)


@pytest.fixture(scope="module", params=FAMILIES)
def rigged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: Pool, kernels: Path
) -> Iterator[OpenModel]:
    model = start(write(tmp_path_factory.mktemp("models") / "rigged", request.param, rigged=True), pool, kernels)
    yield model
    _close(model)


@pytest.fixture(scope="module", params=FAMILIES)
def stirred(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: Pool, kernels: Path
) -> Iterator[OpenModel]:
    model = start(write(tmp_path_factory.mktemp("models") / "random", request.param, rigged=False), pool, kernels)
    yield model
    _close(model)


@pytest.fixture(scope="module")
def misled(tmp_path_factory: pytest.TempPathFactory, pool: Pool, kernels: Path) -> Iterator[OpenModel]:
    """A model of which about every third draft token is wrong."""
    model = start(
        write(tmp_path_factory.mktemp("models") / "misled", "qwen4_exp", rigged=True, wrong=0.25), pool, kernels
    )
    yield model
    _close(model)


def _close(model: OpenModel) -> None:
    runner = tell(model)
    runner.kv.check()
    assert runner.kv.available == runner.kv.blocks
    if runner.drafting is not None:
        runner.drafting.cache.check()
    model.close()


def ask(*, greedy: bool = True, **changes: Any) -> Request:
    sampling = Sampling(temperature=0.0 if greedy else 0.9, top_k=20, seed=11, logit_bias={2: -100.0})
    return replace(Request(ids=PROMPT, sampling=sampling, max_tokens=50, prefix_reuse=False), **changes)


@pytest.mark.parametrize("greedy", [True, False])
def test_right_drafts_save_passes_and_change_nothing(rigged: OpenModel, greedy: bool) -> None:
    request = ask(greedy=greedy)
    plain, drafted = written(rigged, replace(request, speculation=False)), written(rigged, request)
    assert (drafted.ids, drafted.finish) == (plain.ids, plain.finish)
    assert ("draft" in plain.stages, "speculation" in plain.stages, passes(rigged, plain)) == (False, False, 49)
    drafts = drafted.stages["draft"]
    assert drafts.accepted == drafts.proposed > 35
    assert passes(rigged, drafted) < 15
    assert drafts.bytes == drafts.proposed * rigged._blueprint.draft_token_bytes


@pytest.mark.parametrize("greedy", [True, False])
def test_drafts_that_are_wrong_are_soon_left_alone(stirred: OpenModel, greedy: bool) -> None:
    tell(stirred, Told(0.2))
    request = ask(greedy=greedy)
    plain, drafted = written(stirred, replace(request, speculation=False)), written(stirred, request)
    assert drafted.ids == plain.ids
    drafts = drafted.stages["draft"]
    assert drafts.accepted < 4
    assert 0 < drafts.proposed < 25
    # A text that repeats itself also has right draft tokens from its own n-grams.
    lookups = drafted.stages["speculation"].accepted if "speculation" in drafted.stages else 0
    assert passes(stirred, drafted) >= 49 - drafts.accepted - lookups


def test_a_text_ends_inside_a_draft(rigged: OpenModel) -> None:
    whole = written(rigged, ask()).ids
    for limit in (1, 2, 7, 8, 9):
        result = written(rigged, ask(max_tokens=limit))
        assert (result.ids, result.finish) == (whole[:limit], "length")
    model = rigged._blueprint
    limits = [
        event.result for event in rigged.generate(ask(ids=PROMPT * 6, max_tokens=200)) if event.result is not None
    ]
    assert (len(limits[0].ids), limits[0].finish) == (model.context - 6 * len(PROMPT), "length")
    for place in (5, 12):
        cut = replace(ask().sampling, logit_bias={2: -100.0, whole[place]: -100.0})
        assert written(rigged, ask(sampling=cut)).ids == written(rigged, ask(sampling=cut, speculation=False)).ids


def test_choices_and_requests_together_are_not_drafted(rigged: OpenModel) -> None:
    alone = written(rigged, ask(greedy=False, speculation=False)).ids
    both = [
        event.result
        for event in rigged.generate_batch([ask(greedy=False), ask(greedy=False, max_tokens=9)])
        if event.result
    ]
    found = {len(result.ids): result for result in both}
    assert (found[50].ids, found[9].ids) == (alone, alone[:9])
    choices = [event.result for event in rigged.generate(ask(greedy=False, n=2)) if event.result]
    assert alone in [choice.ids for choice in choices]
    # after the shorter one the longer is alone: it is drafted from the rows computed since
    assert found[50].stages["draft"].accepted > 20


def test_a_conversation_continues_after_drafts(misled: OpenModel) -> None:
    """States at block boundaries are kept although a verify pass computes several tokens."""
    first = written(misled, ask(max_tokens=60, prefix_reuse=True))
    assert 0 < first.stages["draft"].accepted < first.stages["draft"].proposed
    longer = (*PROMPT, *first.ids, *PROMPT[:9])
    again, fresh = (written(misled, ask(ids=longer, prefix_reuse=reuse)) for reuse in (True, False))
    assert again.ids == fresh.ids
    assert again.usage.cached == (len(PROMPT) + 60 - 1) // BLOCK * BLOCK


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), chance=st.floats(0.0, 1.0), reuse=st.booleans())
def test_any_drafts_leave_the_text_as_it_is(misled: OpenModel, seed: int, chance: float, reuse: bool) -> None:
    """Drafts of any length, right up to any token, from the layer or invented."""
    draw, request = random.Random(seed), ask(greedy=seed % 2 == 0, ids=PROMPT[: 5 + seed % 30], prefix_reuse=reuse)
    wanted = written(misled, replace(request, speculation=False)).ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onedesk.service.engine.decode_loop.Speculator", arbitrary(request, wanted, draw, chance))
        assert written(misled, request).ids == wanted
    tell(misled).kv.check()


def test_lookups_pay_for_recurrent_networks_too(tmp_path: Path, pool: Pool, kernels: Path) -> None:
    model = start(write_family(tmp_path / "plain", "qwen3_5", seed=5), pool, kernels)
    assert tell(model).drafting is None
    bias = {2: -100.0} | {token: 1e4 * (1 + token % 2) for token in range(3, 7)}
    request = ask(sampling=Sampling(temperature=0.0, logit_bias=bias))
    plain, drafted = written(model, replace(request, speculation=False)), written(model, request)
    assert drafted.ids == plain.ids
    assert drafted.stages["speculation"].accepted > 20
    assert passes(model, drafted) < 30
    model.close()


def test_without_room_for_the_layer_a_model_is_opened_without_it(tmp_path: Path, kernels: Path) -> None:
    folder = write(tmp_path / "tiny", "qwen3_5", rigged=False)
    roomy = Pool("cpu", MemorySettings(floor=64 << 20), lambda: read_truth("cpu"))
    with_it = open_model(folder, pool=roomy, context=CONTEXT, load=False, kernel_cache=kernels)
    assert with_it._blueprint.config.draft
    bare = with_it._blueprint.without_draft().need.with_headroom(roomy.settings.headroom)
    assert bare < with_it.need.with_headroom(roomy.settings.headroom)
    narrow = Pool("cpu", MemorySettings(floor=0, limit_bytes=int(bare / 0.95) + 65536), lambda: read_truth("cpu"))
    without = start(folder, narrow, kernels)
    assert not without._blueprint.config.draft
    assert tell(without).drafting is None
    assert written(without, ask()).ids == written(start(folder, roomy, kernels, draft=False), ask()).ids
