"""Several prompts prefilled in one pass: each leaves what it leaves alone, and a cancelled one costs the others
nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kept_kernels import keep_kernels
from onedesk.service.api import OpenModel
from onedesk.service.config import Config
from onedesk.service.core import Request, Result, Sampling
from onedesk.service.engine.buffers import MAX_BATCH
from onedesk.service.engine.completion import Prepared
from onedesk.service.engine.runner import Runner, Stopped
from onedesk.service.kernels.forward_batch import BLOCK, FEW_ROWS
from onedesk.service.registry import Registry
from tiny_families import write_family
from tiny_qwen3 import write_tiny_qwen3

CONTEXT = 192


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_qwen3(folder / "tiny", layers=2)
    write_family(folder / "hybrid", "qwen3_next")
    made = Registry()
    made.configure(Config(tree=folder, model_roots=(folder,), memory={"floor": 64 << 20}))
    made.config.cache.mkdir(exist_ok=True)
    keep_kernels(made.config.cache)
    yield made
    made.close()


def opened(registry: Registry, quant: str) -> OpenModel:
    return registry.open("tiny", context=CONTEXT, sequences=MAX_BATCH, quant=quant)


@pytest.fixture(scope="module")
def model(registry: Registry) -> OpenModel:
    return opened(registry, "int8")


def runner_of(model: OpenModel) -> Runner:
    model.load()
    assert model.session is not None
    return model.session.runner


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 200, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def ask(ids: Sequence[int], seed: int = 7, n: int = 1, tokens: int = 8) -> Request:
    return Request(
        ids=tuple(ids), sampling=Sampling(temperature=1.0, seed=seed), max_tokens=tokens, n=n, repetition_stop=False
    )


def results(model: OpenModel, requests: Sequence[Request], **options: object) -> dict[tuple[int, int], Result]:
    events = model.generate_batch(requests, **options)  # pyright: ignore[reportArgumentType]
    found = {(event.request, event.choice): event.result for event in events if event.result is not None}
    runner = runner_of(model)
    runner.kv.check()
    assert runner.kv.available == runner.kv.blocks
    return found


def passes(model: OpenModel, result: Result) -> int:
    return round(result.stages["prefill"].bytes / model._blueprint.pass_bytes)


def alone(model: OpenModel, request: Request) -> list[tuple[int, ...]]:
    """Each choice alone, without a cached prefix."""
    model.give_way()
    return [result.ids for _, result in sorted(results(model, [request]).items())]


@pytest.mark.parametrize("quant", ["none", "int8"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(FEW_ROWS + 1, 40), min_size=2, max_size=6),
    begun=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_scores_and_cache_are_those_of_each_alone(
    registry: Registry, quant: str, lengths: list[int], begun: list[int]
) -> None:
    runner = runner_of(opened(registry, quant))
    prompts = [
        prompt(length + blocks * 11, place) for place, (length, blocks) in enumerate(zip(lengths, begun, strict=False))
    ]
    kept = [0 if blocks == 0 else blocks * 11 for _, blocks in zip(lengths, begun, strict=False)]

    def read(held: ExitStack, together: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        rows = [held.enter_context(runner.kv.open(CONTEXT // 2)) for _ in prompts]
        for row, ids, first in zip(rows, prompts, kept, strict=True):
            if first:
                runner.prefill(row, ids[:first], None, lambda _: None)
        rest = [ids[first:] for ids, first in zip(prompts, kept, strict=True)]
        if together:
            scores = runner.prefill_several(rows, rest, None).clone()
        else:
            scores = torch.stack(
                [runner.prefill(row, ids, None, lambda _: None).clone() for row, ids in zip(rows, rest, strict=True)]
            )
        assert [row.length for row in rows] == [len(ids) for ids in prompts]
        return scores, [runner.decode([row], [3]).clone() for row in rows]

    with ExitStack() as held, ExitStack() as others:
        (scores, after), (expected, expected_after) = read(held, True), read(others, False)
        runner.kv.check()
    assert torch.equal(scores, expected)
    assert all(torch.equal(one, other) for one, other in zip(after, expected_after, strict=True))


def test_prompts_that_fit_are_prefilled_in_one_pass(model: OpenModel) -> None:
    requests = [ask(prompt(length, length), n=2 if length == 14 else 1) for length in (9, 14, 30, 12, 25, 17, 33)]
    expected = [alone(model, request) for request in requests]
    model.give_way()
    found = results(model, requests)
    assert [[found[at, choice].ids for choice in range(request.n)] for at, request in enumerate(requests)] == expected
    # The other choice of the second waits for its own prompt, and so do the later requests.
    assert [passes(model, found[at, 0]) for at in (0, len(requests) - 1)] == [2, 2]


def test_a_shared_prefix_is_prefilled_once(model: OpenModel) -> None:
    head = prompt(2 * BLOCK, 1)
    requests = [ask([*head, *prompt(20 + place, 50 + place)]) for place in range(4)]
    expected = [alone(model, request) for request in requests]
    model.give_way()
    found = results(model, requests)
    assert [[found[place, 0].ids] for place in range(4)] == expected
    assert [found[place, 0].usage.cached for place in range(4)] == [0, *[len(head)] * 3]
    assert passes(model, found[3, 0]) == 2


def test_a_few_tokens_are_prefilled_alone(model: OpenModel) -> None:
    requests = [ask(prompt(length, length)) for length in (20, 5, 21, 22)]
    expected = [alone(model, request) for request in requests]
    model.give_way()
    found = results(model, requests)
    assert [[found[place, 0].ids] for place in range(4)] == expected
    assert passes(model, found[3, 0]) == 3


@pytest.mark.parametrize("gone", [(1,), (0, 2), (0, 1, 2)])
def test_a_cancelled_prompt_costs_the_others_nothing(
    model: OpenModel, gone: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ask(prompt(20, place)) for place in range(3)]
    expected = [alone(model, request) for request in requests]
    model.give_way()
    runner, stopped = runner_of(model), []
    several = runner.prefill_several

    inside: list[bool] = []

    def spied(*parts: object) -> torch.Tensor:
        inside.append(True)
        try:
            return several(*parts)  # pyright: ignore[reportArgumentType]
        except Stopped:
            stopped.append(parts)
            raise

    monkeypatch.setattr(runner, "prefill_several", spied)
    found = results(model, requests, cancel_request=lambda place: bool(inside) and place in gone)
    for place in range(3):
        assert (found[place, 0].finish == "cancelled") == (place in gone)
        assert found[place, 0].ids == (() if place in gone else expected[place][0])
    assert len(stopped) == (len(gone) == 3)


def test_a_request_joins_a_pass_that_has_just_begun(model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [ask(prompt(20, place)) for place in range(5)]
    expected = [alone(model, request) for request in requests]
    model.give_way()
    runner, read = runner_of(model), []
    several = runner.prefill_several
    monkeypatch.setattr(runner, "prefill_several", lambda *parts: read.append(len(parts[0])) or several(*parts))
    # Called before each step and at the first two layers of each pass: one at the start, two during it, one during its
    # restart.
    coming = iter([[0], [], [1, 2], [], [3], [], [], [], [4]])

    def arrivals() -> list[Prepared]:
        return [model.prepared(requests[place]) for place in next(coming, ())]

    found = {event.request: event.result for event in model.serve(arrivals) if event.result is not None}
    assert [[found[place].ids] for place in range(5)] == expected
    assert read == [3, 4]
    assert passes(model, found[3]) <= 3


def test_recurrent_networks_prefill_one_after_the_other(registry: Registry) -> None:
    model = registry.open("hybrid", context=128, sequences=2)
    found = results(model, [ask(prompt(20, place), tokens=2) for place in range(2)])
    assert not runner_of(model).reads_several
    assert passes(model, found[1, 0]) >= 2
    model.give_way()
