"""Which sampling is in force, and where each value comes from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from onedesk.service.core import NEUTRAL, Sampling, Thinking
from onedesk.service.engine.effective_sampling import NAMES, checkpoint_sampling, effective_sampling
from onedesk.service.errors import ModelError
from onedesk.service.loader.checkpoint import Checkpoint
from onedesk.service.model import qwen3, qwen3_5, qwen3_next, qwen4_exp

FAMILIES = [qwen3, qwen3_5, qwen3_next, qwen4_exp]
BARE = Checkpoint(Path("bare"), "bare", MappingProxyType({}), MappingProxyType({}), MappingProxyType({}), 0)


def with_file(**generation: Any) -> Checkpoint:
    return replace(BARE, generation=MappingProxyType(generation), has_generation=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("thinking", ["on", "off", "auto"])
@pytest.mark.parametrize("checkpoint", [BARE, with_file(), with_file(temperature=0.6, top_k=20)])
def test_greedy_is_greedy(family: Any, thinking: Thinking, checkpoint: Checkpoint) -> None:
    for temperature in (0, 0.0, -0.0, 1e-300):
        found, _ = effective_sampling(Sampling(temperature), checkpoint, family.default_sampling, thinking)
        assert (found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (0, 0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_advice_is_for_checkpoints_without_the_file_alone(family: Any) -> None:
    advice = family.default_sampling("auto")
    found, values = effective_sampling(Sampling(), BARE, family.default_sampling, "auto")
    assert found == advice
    assert {one.source for one in values.values()} == {"family"}
    found, values = effective_sampling(Sampling(), with_file(eos_token_id=3), family.default_sampling, "auto")
    assert found == NEUTRAL
    assert {one.source for one in values.values()} == {"default"}


def test_every_value_has_its_source() -> None:
    checkpoint = with_file(temperature=0.6, top_k=20, do_sample=True)
    found, values = effective_sampling(Sampling(top_k=5, seed=3), checkpoint, qwen3_5.default_sampling, "off")
    assert found == Sampling(0.6, 5, 1.0, 0.0, 0.0, 0.0, 1.0, seed=3)
    assert tuple(values) == NAMES
    sources = {name: one.source for name, one in values.items() if one.source != "default"}
    assert sources == {"temperature": "checkpoint", "top_k": "request"}
    assert all(one.value == getattr(found, name) for name, one in values.items())


def test_a_checkpoint_that_does_not_sample_is_greedy_with_its_penalties() -> None:
    found = checkpoint_sampling({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1})
    assert (found.temperature, found.repetition_penalty) == (0.0, 1.1)


@pytest.mark.parametrize("value", [10**400, 1e300, -1, "0.5", True, [1]])
def test_a_value_of_the_file_that_is_out_of_range_is_the_models(value: Any) -> None:
    with pytest.raises(ModelError, match=r"^generation_config.json: temperature is "):
        checkpoint_sampling({"temperature": value})
