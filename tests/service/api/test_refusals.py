"""The one door: what is refused, before any work and with what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asking import CONTEXT, ask
from onedesk.service.api import OpenModel
from onedesk.service.config import Config
from onedesk.service.core import Request, Sampling
from onedesk.service.errors import FileError, MemoryFull, ModelError, RequestError
from onedesk.service.loader.names import ModelRoots
from onedesk.service.registry import Registry


@pytest.mark.parametrize("length", [32, 33, 5000])
def test_a_prompt_as_long_as_the_context_is_refused(registry: Registry, length: int) -> None:
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
        (ask(best_of=2, n=3), "best_of is 2 and n is 3; the first must be at least the second"),
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
            r"8 beams of up to 900 tokens after a prompt of \d+ need KV for [\d,]+ tokens, and the context gives 1,024",
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


def test_one_bad_item_refuses_the_list_and_is_named(registry: Registry) -> None:
    model = registry.open("tiny", context=CONTEXT, load=False)
    with pytest.raises(RequestError, match="item 2 of 3: max_tokens is 0"):
        model.generate_batch([ask(), ask(max_tokens=0), ask()])
    with pytest.raises(RequestError, match="item 3 of 3: the prompt has 1024 tokens and the context is 1024"):
        model.generate_batch([ask(), ask(), Request(ids=(5,) * CONTEXT)])
    with pytest.raises(RequestError, match="the list of requests is empty"):
        model.generate_batch([])
    assert not model.loaded


def test_a_megabyte_prompt_is_refused_with_both_numbers(registry: Registry) -> None:
    model = registry.open("tiny", context=CONTEXT, load=False)
    with pytest.raises(RequestError, match=r"the prompt has more than \d{4,} tokens and the context is 1024"):
        model.generate(ask("word " * 200_000))


def test_a_model_that_does_not_fit_is_refused(checkpoint: Path, registry: Registry) -> None:
    registry.configure(
        Config(
            tree=checkpoint.parent, model_roots=(checkpoint.parent,), memory={"limit_bytes": 4 << 20, "floor": 1 << 20}
        )
    )
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
def test_a_choice_that_cannot_be_is_refused(
    registry: Registry, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
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
