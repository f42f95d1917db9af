"""How many rows write at once, and when a model is loaded anew: decided by figures, so with figures that a test
sets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kept_kernels import keep_kernels
from onedesk.service.api import OpenModel
from onedesk.service.config import Config, ServiceSettings
from onedesk.service.core import Event
from onedesk.service.memory.thermal import Thermal
from onedesk.service.registry import Registry
from onedesk.service.server import concurrency as places_module
from onedesk.service.server import maintenance as renewal_module
from onedesk.service.server.concurrency import BatchSizes
from onedesk.service.server.maintenance import IDLE_SECONDS, Renewal, renew_when_idle
from onedesk.service.server.statistics import Figures
from tiny_models import write_language_model


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("models")
    write_language_model(folder / "tiny")
    keep_kernels(folder / "cache")
    made = Registry()
    made.configure(Config(tree=folder, model_roots=(folder,), memory={"floor": 64 << 20}))
    yield made
    made.close()


@pytest.fixture
def model(registry: Registry) -> OpenModel:
    return registry.open("tiny", context=128, load=False, sequences=3)


class Clock:
    """A clock that a test moves; each token of a measurement takes what `seconds` says for so many rows."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def paced(monkeypatch: pytest.MonkeyPatch, model: OpenModel, step: dict[int, float]) -> None:
    """Let a step of n rows take step[n] seconds."""
    clock = Clock()
    real = model.generate_batch

    def generate_batch(requests: Any, **options: Any) -> Iterator[Event]:
        for event in real(requests, **options):
            clock.now += step[len(requests)] / len(requests) if event.token is not None else 0.0
            yield event

    monkeypatch.setattr(model, "generate_batch", generate_batch)
    monkeypatch.setattr(places_module.time, "perf_counter", clock.perf_counter)


def test_rows_together_where_they_are_faster(
    model: OpenModel, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced(monkeypatch, model, {1: 1.0, 4: 1.5})
    sizes = BatchSizes(4, registry)
    assert sizes.now(model) == 4
    sizes.measure(model)
    assert sizes.now(model) == sizes.of("tiny") == 4


def test_one_after_the_other_where_that_is_faster(
    model: OpenModel, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced(monkeypatch, model, {1: 1.0, 4: 3.9})
    sizes = BatchSizes(4, registry)
    sizes.measure(model, cancel=lambda: True)
    assert sizes.now(model) == 4  # a measurement that was cut short says nothing
    sizes.measure(model)
    assert sizes.now(model) == 1
    assert BatchSizes(1, registry).now(model) == 1
    assert BatchSizes(1000, registry).now(model) == 8


def test_one_place_while_memory_is_short_or_the_machine_too_hot(model: OpenModel, registry: Registry) -> None:
    sizes, watch = BatchSizes(4, registry), registry.watch(model.pool.device)
    assert sizes.now(model) == 4
    watch.thermal = Thermal(99.0, ("zone at 99 of 100 degrees",))
    assert sizes.now(model) == 1
    watch.thermal = Thermal(50.0)
    assert sizes.now(model) == 4


def test_keys_and_values_have_room_for_several(model: OpenModel, registry: Registry) -> None:
    one = registry.open("tiny", context=128, load=False)
    assert model is not one
    assert model.need.kv == 3 * one.need.kv
    model.give_way()
    assert model.kv_blocks == (0, 0, 0)
    model.load()
    assert model.kv_blocks == (0, 0, 3 * 128 // 32)
    model.give_way()


def test_fewer_where_the_budget_has_not_so_much(registry: Registry, tmp_path: Path) -> None:
    one = registry.open("tiny", context=4096, load=False)
    small = Registry()
    room = int(one.need.with_headroom(0.2) * 2.5 / 0.95)
    small.configure(replace(registry.config, memory={"floor": 64 << 20, "limit_bytes": room}))
    try:
        model = small.open("tiny", context=4096, load=False, sequences=8)
        assert one.need.kv < model.need.kv < 8 * one.need.kv
        assert model.need.with_headroom(0.2) <= model.pool.budget.spendable
    finally:
        small.close()


class Moving:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_old_model_is_reloaded_while_idle(model: OpenModel) -> None:
    clock = Moving()
    renewal = Renewal(ServiceSettings(renew_hours=2, renew_fragmentation=0), clock)
    assert not renewal.due(model, 1e9)  # not loaded
    model.load()
    assert not renewal.due(model, 1e9)  # since just now
    clock.now = 2 * 3600
    assert not renewal.due(model, IDLE_SECONDS - 1)
    assert renewal.due(model, IDLE_SECONDS)
    assert not renewal.renew(model, lambda: True)
    assert renewal.due(model, IDLE_SECONDS)
    loaded = model.pool.counters().releases
    assert renewal.renew(model, lambda: False)
    assert model.loaded
    assert model.pool.counters().releases == loaded + 3
    assert not renewal.due(model, IDLE_SECONDS)
    assert not Renewal(ServiceSettings(renew_hours=0, renew_fragmentation=0), clock).due(model, 1e9)


def test_a_model_is_loaded_anew_when_its_pool_is_in_pieces(model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Moving()
    renewal = Renewal(ServiceSettings(renew_hours=0, renew_fragmentation=0.5), clock)
    model.load()
    assert not renewal.due(model, 1e9)
    clock.now = 1000.0
    assert not renewal.due(model, 1e9)
    monkeypatch.setattr(model.pool, "fragmentation", lambda: 0.6)
    assert renewal.due(model, 1e9)


def test_a_model_whose_files_are_gone_does_not_end_the_renewing(
    model: OpenModel, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renewal_module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(Renewal, "due", lambda self, model, idle: True)
    monkeypatch.setattr(registry, "models", lambda: [model])
    model.load()
    aside = model.path.rename(model.path.with_name("aside"))
    loaded: list[bool] = []

    async def in_turn(work: Callable[[], None]) -> None:
        work()
        loaded.append(model.loaded)
        if len(loaded) == 2:
            raise asyncio.CancelledError  # as at the end of the service
        aside.rename(model.path)

    worker = SimpleNamespace(name=model.name, line=(), aborting=False, idle_seconds=1e9, in_turn=in_turn)
    service = SimpleNamespace(
        settings=ServiceSettings(), workers=[worker], registry=registry, asleep=False, stopping=False, figures=Figures()
    )
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(renew_when_idle(service))
    assert loaded == [False, True]
    assert service.figures.renewals == 1
    assert "tiny was not loaded again: model.safetensors" in caplog.text
