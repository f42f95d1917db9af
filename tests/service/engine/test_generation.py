"""Choices and lists on a real tiny model: each is what it is alone, whatever runs beside it, ahead of it or is taken from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.api import OpenModel
from onedesk.service.config import Config
from onedesk.service.core import Event, Message, Request, Result, Sampling
from onedesk.service.engine.runner import Runner
from onedesk.service.engine.sampler import Sampler
from onedesk.service.engine.speculate import PassCosts
from onedesk.service.engine.stepper import Feed, HostStepper, Picked, pick
from onedesk.service.engine.work import Row
from onedesk.service.kernels.rows import BLOCK, FEW_ROWS
from onedesk.service.registry import Registry
from tiny_qwen3 import write_tiny_qwen3

Place = tuple[int, int]
CONTEXT = 1024
NARROW = 160


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_qwen3(folder / "tiny", layers=2)
    made = Registry()
    made.configure(Config(tree=folder, model_roots=(folder,), memory={"floor": 64 << 20}))
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(registry: Registry) -> OpenModel:
    return registry.open("tiny", context=CONTEXT)


def ask(text: str = "a red cat", **changes: Any) -> Request:
    return replace(Request(messages=(Message("user", text),), sampling=Sampling(seed=7), max_tokens=24), **changes)


def results(events: Sequence[Event]) -> dict[Place, Result]:
    """The result of each choice; its events must add up to it, and none may come after it."""
    found: dict[Place, Result] = {}
    tokens: dict[Place, list[int]] = {}
    texts: dict[Place, str] = {}
    for event in events:
        place = event.request, event.choice
        assert place not in found, "an event after the result"
        if event.token is not None:
            tokens.setdefault(place, []).append(event.token)
        texts[place] = texts.get(place, "") + event.text
        if event.result is not None:
            found[place] = event.result
            assert tuple(tokens.get(place, [])) == event.result.ids
            assert event.result.text in ("", texts[place]) or event.result.reasoning
    return found


def run(model: OpenModel, *requests: Request, **options: Any) -> dict[Place, Result]:
    found = results(list(model.generate_batch(requests, **options)))
    check(model)
    return found


def check(model: OpenModel) -> None:
    """Nothing is held when nothing runs, but what is kept for reuse."""
    session = model._session
    assert session is not None
    session.runner.kv.check()
    assert session.runner.kv.available == session.runner.kv.blocks
    assert session.runner.kv.cold == len(session.prefix)


def alone(model: OpenModel, request: Request, choice: int = 0, *, known: dict[tuple[int, str], Result] = {}) -> Result:  # noqa: B006
    """The one choice, without anything beside it, before it or guessed; written once for all tests."""
    seed = ((request.sampling.seed or 0) + choice) % 2**64
    single = replace(request, n=1, best_of=None, sampling=replace(request.sampling, seed=seed), prefix_reuse=False, speculation=False)
    key = (model.context, repr(single))
    if key not in known:
        known[key] = run(model, single)[0, 0]
    return known[key]


def same(one: Result, other: Result) -> bool:
    return (one.ids, one.text, one.reasoning, one.finish, one.seed) == (other.ids, other.text, other.reasoning, other.finish, other.seed)


class AheadStepper(HostStepper):
    """A device that computes at once what is launched, before anybody has seen the step before, with draws that it is given.

    Rows that the host must choose for are chosen from the scores when they are collected: the next pass writes over them.
    """

    ahead = 1
    stage: Literal["decode", "sample"] = "decode"

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.blind = 0
        self._chosen: deque[list[Picked | tuple[Sampler, torch.Tensor]]] = deque()

    def runs_ahead(self, sampler: Sampler, /) -> bool:
        return sampler.plain

    def launch(self, feeds: Sequence[Feed], /) -> None:
        assert len(self._chosen) <= self.ahead
        before = self._chosen[-1] if self._chosen else []
        self.blind += sum(feed.token is None for feed in feeds)
        known = []
        for feed in feeds:
            chosen = before[feed.source] if feed.token is None else Picked(feed.token)
            assert isinstance(chosen, Picked)
            assert chosen.token >= 0
            known.append(replace(feed, token=chosen.token))
        super().launch(known)
        scores = self._under_way.pop()[1]
        self._chosen.append([self._picked(feed, row) for feed, row in zip(known, scores, strict=True)])

    def collect(self) -> list[Picked]:
        return [one if isinstance(one, Picked) else pick(*one) for one in self._chosen.popleft()]

    def _picked(self, feed: Feed, row: torch.Tensor) -> Picked | tuple[Sampler, torch.Tensor]:
        if not feed.wanted:
            return Picked(-1)
        if not feed.sampler.plain:
            return feed.sampler, row
        row = row.clone()
        drawn, feed.sampler.drawn = feed.sampler.drawn, feed.draw
        picked = pick(feed.sampler, row)
        feed.sampler.drawn = drawn
        return picked


@pytest.fixture(params=["host", "ahead"])
def stepped(request: pytest.FixtureRequest, model: OpenModel) -> Iterator[OpenModel]:
    """The model on a stepper that waits for the host, and on one that runs ahead of it."""
    yield from on_stepper(model, request.param)


@pytest.fixture(params=["host", "ahead"])
def narrow(request: pytest.FixtureRequest, registry: Registry) -> Iterator[OpenModel]:
    """As `stepped`, with a context that few answers fill."""
    yield from on_stepper(registry.open("tiny", context=NARROW), request.param)


def on_stepper(model: OpenModel, kind: str) -> Iterator[OpenModel]:
    model.load()
    session = model._session
    assert session is not None
    before = session.stepper
    if kind == "ahead":
        session.stepper = AheadStepper(session.runner)
    yield model
    if isinstance(session.stepper, AheadStepper):
        assert session.stepper.blind, "nothing was launched ahead"
        assert not session.stepper._chosen, "a step was left under way"
    session.stepper = before


def test_choices_are_what_each_seed_writes_alone(stepped: OpenModel) -> None:
    request = ask(n=5, sampling=Sampling(seed=2**64 - 2))
    found = run(stepped, request)
    assert [found[0, choice].seed for choice in range(5)] == [2**64 - 2, 2**64 - 1, 0, 1, 2]
    assert all(same(found[0, choice], alone(stepped, request, choice)) for choice in range(5))
    assert len({found[0, choice].ids for choice in range(5)}) == 5


def test_more_choices_than_places_follow_when_others_have_ended(stepped: OpenModel) -> None:
    request = ask(n=20, max_tokens=12)
    found = run(stepped, request)
    assert len(found) == 20
    assert all(same(found[0, choice], alone(stepped, request, choice)) for choice in (0, 7, 8, 19))


def test_a_row_that_the_host_chooses_for_ends_beside_rows_that_run_ahead(stepped: OpenModel) -> None:
    penalized = Sampling(seed=1, frequency_penalty=0.5)
    requests = [ask("ends first", sampling=penalized, max_tokens=tokens) for tokens in (4, 5, 9)] + [ask("goes on", max_tokens=20)]
    found = run(stepped, *requests)
    assert all(same(found[place, 0], alone(stepped, request)) for place, request in enumerate(requests))


ASKED = st.builds(
    lambda text, tokens, seed, n, stop, greedy, penalty: ask(
        text * 3,
        max_tokens=tokens,
        n=n,
        stop=(stop,) if stop else (),
        sampling=Sampling(seed=seed, temperature=0 if greedy else None, frequency_penalty=penalty),
    ),
    st.text("abc ", min_size=1, max_size=40).filter(str.strip),
    st.integers(1, 25),
    st.integers(0, 2**64 - 1),
    st.integers(1, 3),
    st.sampled_from(["", "", "e", "\n", "a"]),
    st.booleans(),
    st.sampled_from([None, None, 0.5]),
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(ASKED, min_size=1, max_size=4))
def test_a_list_is_what_its_items_are_alone(stepped: OpenModel, requests: list[Request]) -> None:
    found = run(stepped, *requests)
    assert set(found) == {(place, choice) for place, request in enumerate(requests) for choice in range(request.n)}
    for (place, choice), result in found.items():
        assert same(result, alone(stepped, requests[place], choice))


THINKING = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n<think>"


def thinker(seed: int, **changes: Any) -> Request:
    """Thinks until its context is full, for a random model all but never closes its thoughts."""
    asked = Request(prompt=THINKING, sampling=Sampling(seed=seed, temperature=0.5, top_k=0), max_tokens=10, repetition_stop=False)
    return replace(asked, **changes)


def test_a_spent_budget_of_thinking_is_closed_by_force_in_every_row(stepped: OpenModel) -> None:
    requests = [thinker(seed, thinking_budget=5 + seed) for seed in range(4)]
    found = run(stepped, *requests, ask())
    for place, request in enumerate([*requests, ask()]):
        assert same(found[place, 0], alone(stepped, request))
    assert all("That is enough thinking" in found[place, 0].reasoning for place in range(4))


def test_what_outgrows_its_room_sets_back_the_youngest_and_loses_nothing(narrow: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    set_back: list[int] = []
    back = Row.set_back
    monkeypatch.setattr(Row, "set_back", lambda row: (set_back.append(row.ticket.request), back(row)))
    requests = [thinker(seed) for seed in range(3)]
    found = run(narrow, *requests)
    assert set_back, "nobody was set back"
    assert 0 not in set_back, "the oldest was set back"
    assert "length" in {result.finish for result in found.values()}
    for place, request in enumerate(requests):
        assert same(found[place, 0], alone(narrow, request)), place


def test_a_cancelled_item_ends_alone_and_its_blocks_are_free_at_once(stepped: OpenModel) -> None:
    requests = [ask(f"number {place}", sampling=Sampling(seed=place), max_tokens=60) for place in range(3)]
    wanted = [alone(stepped, request) for request in requests]
    kv = stepped._session.runner.kv  # type: ignore[union-attr]
    events: list[Event] = []
    available: list[int] = []
    for event in stepped.generate_batch(requests, cancel_request=lambda place: place == 1 and tokens(events, 1) >= 5):
        events.append(event)
        if event.request == 1:
            available.append(kv.available)
    found = results(events)
    check(stepped)
    assert (found[1, 0].finish, found[1, 0].ids) == ("cancelled", wanted[1].ids[:5])
    assert available[-1] > available[-2]
    assert same(found[0, 0], wanted[0])
    assert same(found[2, 0], wanted[2])


def test_stop_ends_all_and_keeps_what_each_has(stepped: OpenModel) -> None:
    requests = [ask(f"number {place}", n=2, max_tokens=60) for place in range(6)]
    events: list[Event] = []
    for event in stepped.generate_batch(requests, cancel=lambda: tokens(events, 0) >= 6):
        events.append(event)
    found = results(events)
    check(stepped)
    assert len(found) == 12
    assert {result.finish for result in found.values()} <= {"cancelled", "stop"}
    assert [len(found[5, choice].ids) for choice in range(2)] == [0, 0], "it had no place yet"
    for choice in range(2):
        assert found[0, choice].ids == alone(stepped, requests[0], choice).ids[: len(found[0, choice].ids)]


def test_a_dropped_stream_leaves_nothing_behind(stepped: OpenModel) -> None:
    stream = stepped.generate_batch([ask(n=3), ask("b", max_tokens=50)])
    seen = 0
    while seen < 10:
        seen += next(stream).token is not None
    stream.close()
    assert not stepped.busy
    check(stepped)
    assert same(run(stepped, ask())[0, 0], alone(stepped, ask()))


def tokens(events: Sequence[Event], request: int) -> int:
    return sum(event.request == request and event.token is not None for event in events)


LONG = "You are a careful writer of prompts. " * 8


def with_system(text: str, **changes: Any) -> Request:
    return ask(messages=(Message("system", LONG), Message("user", text)), **changes)


def test_a_system_prompt_is_read_once(model: OpenModel) -> None:
    model.give_way()
    first = run(model, with_system("a cat"))[0, 0]
    assert first.usage.cached == 0
    second = run(model, with_system("a dog"))[0, 0]
    shared = len(model.encode(model.render((Message("system", LONG),)))) // BLOCK * BLOCK
    assert second.usage.cached in (shared - BLOCK, shared)
    assert same(second, alone(model, with_system("a dog")))
    again = run(model, with_system("a cat"))[0, 0]
    assert again.usage.cached == (again.usage.prompt - FEW_ROWS - 1) // BLOCK * BLOCK
    assert same(again, first)


@pytest.mark.parametrize("behind", [*range(1, 12), 31, 32, 33, 224, 225, 231, 232, 233])
def test_how_much_of_a_prompt_was_kept_does_not_change_one_bit_of_its_scores(model: OpenModel, behind: int) -> None:
    """Behind a beginning of 64 tokens, with last chunks of every awkward length."""
    model.load()
    session = model._session
    assert session is not None
    ids = [3 + (7 * place) % 250 for place in range(64 + behind)]
    scores = []
    for kept in (False, True):
        shared = session.prefix.match(ids[:-FEW_ROWS]) if kept else []
        with session.runner.kv.open(CONTEXT, shared) as kv:
            assert kv.length == (min(64 + behind - FEW_ROWS - 1, 64) // BLOCK * BLOCK if kept else 0)
            scores.append(session.runner.prefill(kv, ids[kv.length :], None, lambda _: None).clone())
            if not kept:
                session.prefix.insert(ids[:64], kv.table)
    assert torch.equal(scores[0], scores[1])
    session.prefix.clear()


def test_prompts_of_one_list_share_their_beginning(model: OpenModel) -> None:
    model.give_way()
    found = run(model, *(with_system(f"item {place}") for place in range(5)))
    assert [result.usage.cached > 200 for _, result in sorted(found.items())] == [False, True, True, True, True]


def test_scoring_and_hidden_states_leave_the_prefix_and_giving_way_drops_it(model: OpenModel) -> None:
    run(model, with_system("a cat"))
    model.score(range(3, 60))
    model.embed_prompt("a small text", [-1])
    assert run(model, with_system("a dog"))[0, 0].usage.cached > 200
    model.give_way()
    assert run(model, with_system("a dog"))[0, 0].usage.cached == 0


def test_a_prefix_gives_way_to_whoever_needs_the_room(model: OpenModel) -> None:
    run(model, with_system("a cat"))
    big = Request(ids=tuple(5 + place % 200 for place in range(CONTEXT - 20)), max_tokens=20, sampling=Sampling(seed=1))
    wanted = run(model, big)[0, 0]
    assert same(wanted, alone(model, big))
    assert run(model, with_system("a cat"))[0, 0].usage.cached < 200


def test_the_answer_is_part_of_the_next_turns_prefix(model: OpenModel) -> None:
    model.give_way()
    question = tuple(range(3, 43))
    first = run(model, Request(ids=question, max_tokens=40, sampling=Sampling(seed=3, logit_bias={2: -100.0})))[0, 0]
    following = Request(ids=(*question, *first.ids, 7, 8), max_tokens=5, sampling=Sampling(seed=3))
    found = run(model, following)[0, 0]
    assert found.usage.cached == (len(question) + len(first.ids) + 2 - FEW_ROWS - 1) // BLOCK * BLOCK
    assert same(found, alone(model, following))


class Free(PassCosts):
    """Passes of any width cost the same, so that every guess is checked."""

    def note(self, rows: int, seconds: float) -> None:
        self.measured = dict.fromkeys(range(1, 9), 1.0)


REPEATS = (11, 12, 13, 14, 15, 16, 17, 18) * 6


@pytest.mark.parametrize(
    "sampling", [Sampling(seed=3, temperature=0), Sampling(seed=4, temperature=0.4), Sampling(seed=5, frequency_penalty=0.1)]
)
@pytest.mark.parametrize("ids", [REPEATS, tuple(range(3, 60))])
def test_guessed_tokens_change_nothing_of_what_is_written(model: OpenModel, sampling: Sampling, ids: tuple[int, ...]) -> None:
    biased = replace(sampling, logit_bias={2: -100.0} | dict.fromkeys(range(11, 14), 6.0))
    request = Request(ids=ids, max_tokens=60, sampling=biased)
    wanted = alone(model, request)
    model._session.costs = Free()  # type: ignore[union-attr]
    found = run(model, request)[0, 0]
    model._session.costs = PassCosts()  # type: ignore[union-attr]
    assert same(found, wanted)
    stage = found.stages["speculation"]
    assert stage.proposed > 0
    assert 0 <= stage.accepted <= stage.proposed
    assert stage.accepted > 0 or sampling.temperature != 0


def test_guesses_end_where_the_answer_does(model: OpenModel) -> None:
    requests = [ask(max_tokens=30, sampling=Sampling(seed=3, temperature=0), stop=stop) for stop in ((), ("e",), ("at",))]
    requests += [thinker(1, thinking_budget=9, sampling=Sampling(seed=3, temperature=0))]
    for request in requests:
        wanted = alone(model, request)
        model._session.costs = Free()  # type: ignore[union-attr]
        assert same(run(model, request)[0, 0], wanted)
        model._session.costs = PassCosts()  # type: ignore[union-attr]


def test_best_of_gives_the_likeliest_as_the_model_scores_them(model: OpenModel) -> None:
    request = ask(n=2, best_of=6, max_tokens=10)
    found = run(model, request)
    singles = [alone(model, request, choice) for choice in range(6)]
    prompt = model.encode(model.render(request.messages))
    ends = {"stop": model.encode("<|im_end|>")}

    def total(result: Result) -> float:
        logprobs = model.score([*prompt, *result.ids, *ends.get(result.finish, [])])
        return sum(logprobs[len(prompt) - 1 :])

    best = sorted(singles, key=total, reverse=True)[:2]
    assert set(found) == {(0, 0), (0, 1)}
    for place, wanted in enumerate(best):
        assert found[0, place].ids == wanted.ids
        assert found[0, place].seed == wanted.seed
        assert found[0, place].logprob == pytest.approx(total(wanted), abs=1e-3)


def test_a_search_beside_other_work_changes_neither(model: OpenModel) -> None:
    search = Request(ids=tuple(range(3, 30)), beams=3, n=3, max_tokens=10, sampling=Sampling(seed=0))
    lone = run(model, search)
    found = run(model, ask(), search, ask("b", n=2))
    for choice in range(3):
        assert same(found[1, choice], lone[0, choice])
    assert same(found[0, 0], alone(model, ask()))
    assert same(found[2, 1], alone(model, ask("b", n=2), 1))


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_stopped_search_gives_its_best_so_far(model: OpenModel, after: int) -> None:
    steps: list[int] = []
    request = Request(ids=tuple(range(3, 30)), beams=4, max_tokens=30, sampling=Sampling(logit_bias={2: -100.0}))
    stream = model.generate(request, cancel=lambda: len(steps) >= after)
    events = []
    for event in stream:
        events.append(event)
        if event.progress is not None and event.progress.stage == "decode":
            steps.append(1)
    check(model)
    result = results(events)[0, 0]
    assert result.finish == "cancelled"
    assert len(result.ids) <= after + 2
