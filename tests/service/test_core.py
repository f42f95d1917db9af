"""Every number of a request, in the type in which it is used: what is let through never fails a sampler or leaves
what is allowed.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.core import FP32_MAX, FP32_SMALLEST, Request, Sampling, fp32
from onedesk.service.engine.sampler import Sampler
from onedesk.service.errors import RequestError

NEUTRAL = Sampling(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0)
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
WHOLES = ("max_tokens", "total_tokens", "thinking_budget", "n", "best_of", "beams", "logprobs", "pixels")
EDGES: list[Any] = [
    0,
    -0.0,
    1,
    -1,
    2,
    0.5,
    1e-5,
    1e-44,
    5e-324,
    1e-300,
    FP32_SMALLEST,
    FP32_MAX,
    2 * FP32_MAX,
    1e300,
    1e308,
    -1e308,
    2**63,
    2**64,
    10**307,
    10**400,
    -(10**400),
    10**5000,
    math.nan,
    math.inf,
    -math.inf,
]
NO_NUMBERS: list[Any] = [True, False, "1", "", b"1", [], {}, 1j, "9" * 5000]


def check(request: Request) -> str:
    """The refusal of a request, "" for none. Anything else that is raised is a failure."""
    try:
        request.validated()
    except RequestError as error:
        return str(error)
    return ""


def sampled(name: str, value: Any) -> Request:
    return Request(ids=(1,), sampling=Sampling(**{name: value}))


@pytest.mark.parametrize("name", [*FLOATS, "top_k", "seed"])
@pytest.mark.parametrize(
    "value", [*NO_NUMBERS, math.nan, math.inf, -math.inf, 10**400, -(10**400), 10**5000], ids=lambda v: repr(type(v))
)
def test_what_is_no_number_of_the_type_is_refused_by_its_name(name: str, value: Any) -> None:
    refusal = check(sampled(name, value))
    assert refusal.startswith(f"{name} is ")
    assert len(refusal) < 200


@pytest.mark.parametrize("name", WHOLES)
@pytest.mark.parametrize("value", [*NO_NUMBERS, 0.5, 1.0, math.nan, 10**400, 10**5000, -1], ids=lambda v: repr(type(v)))
def test_a_count_is_a_whole_number_of_63_bits(name: str, value: Any) -> None:
    refusal = check(replace(Request(ids=(1,)), **{name: value}))
    assert refusal.startswith(f"{name} is ")
    assert len(refusal) < 200


@pytest.mark.parametrize(
    "value", [*NO_NUMBERS, None, 1e300, -1e300, 10**400, math.inf, math.nan], ids=lambda v: repr(type(v))
)
def test_a_bias_is_a_number_of_fp32(value: Any) -> None:
    assert check(sampled("logit_bias", {3: value})).startswith("logit_bias has 3: ")


@pytest.mark.parametrize("token", [True, -1, "1", 1.0, None])
def test_a_bias_is_for_a_token_id(token: Any) -> None:
    assert "logit_bias" in check(sampled("logit_bias", {token: 1.0}))


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [1e-300, 5e-324, 1e-44, 0.0, -0.0])
def test_what_is_zero_in_fp32_is_zero(name: str, value: float) -> None:
    assert "use a number above 0" in check(sampled(name, value))


def test_fp32_is_what_numpy_makes_of_normal_numbers() -> None:
    for value in (0.1, 0.7, -2.0, FP32_MAX, FP32_SMALLEST, 16777217):
        assert fp32(value) == float(np.float32(value))
    assert fp32(1e-300) == fp32(-0.0) == 0.0
    assert [fp32(value) for value in (FP32_MAX * 2, 10**400, math.nan, True, "1")] == [None] * 5


def test_every_numeric_field_is_covered_here() -> None:
    """A number that is added to a request is added to these tests."""
    plain = {
        "messages",
        "prompt",
        "ids",
        "sampling",
        "stop",
        "thinking",
        "repetition_stop",
        "prefix_reuse",
        "speculation",
    }
    plain |= {"json_schema", "json_frame", "tools", "template_options", "images"}
    # `calls` is counted by the service from tools that are given, the others are switches.
    plain |= {"calls", "add_generation_prompt", "continue_final_message", "parse_special"}
    assert {f.name for f in fields(Sampling)} == {*FLOATS, "top_k", "seed", "logit_bias"}
    missing = {f.name for f in fields(Request)} - plain - {*WHOLES}
    assert not missing


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_whatever_the_numbers_an_allowed_token_is_chosen(data: st.DataObject) -> None:
    numbers = st.one_of(st.none(), st.sampled_from(EDGES), st.floats(allow_nan=False), st.integers(-3, 60))
    values: dict[str, Any] = {name: data.draw(numbers, label=name) for name in (*FLOATS, "top_k")}
    bias = data.draw(
        st.dictionaries(st.integers(0, 39), numbers.filter(lambda value: value is not None), max_size=6), label="bias"
    )
    values = {name: value for name, value in values.items() if not check(sampled(name, value))}
    bias = {token: value for token, value in bias.items() if not check(sampled("logit_bias", {token: value}))}
    sampling = Sampling(**values, logit_bias=bias).validated().with_defaults(NEUTRAL)
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=40, max_size=40).filter(any), label="allowed"))
    sampler = Sampler(sampling, data.draw(st.sampled_from([0, 7, 2**32, 2**64 - 1]), label="seed"), (1, 2, 3), 40)
    sampler.allowed = lambda: allowed
    spread = data.draw(st.sampled_from([0.0, 1.0, 80.0, 1e30]), label="spread")
    scores = torch.randn(48, generator=torch.Generator().manual_seed(len(bias))) * spread
    for _ in range(4):
        token = sampler.choose(scores.clone())
        assert allowed[token]
        sampler.accept(token)
