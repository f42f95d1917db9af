"""Prompts with pictures through the engine: what is written, how often the tower runs, what is kept, and what is
refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.service.api import OpenModel, open_model
from onedesk.service.core import Message, Picture, Request, Result, Sampling
from onedesk.service.errors import ModelError, RequestError
from onedesk.service.kernels.cpu.cpu_kernels import CpuKernels
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from pictures import drawn, pillow
from tiny_families import write_family
from tiny_vision import END, IMAGE, SEEING, START, Oracle, write_seeing

GREEDY = Sampling(temperature=0.0, presence_penalty=0.0, repetition_penalty=1.0)
TOKENS = 8
FEW = [5, 6, 7, 8, 9]


def opened(folder: Path, cache: Path, context: int = 640) -> OpenModel:
    pool = Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))
    return open_model(folder, pool=pool, context=context, kernel_cache=cache, load=False, sequences=2)


def asked(ids: list[int], *images: Picture, **more: Any) -> Request:
    plain = {"sampling": GREEDY, "max_tokens": TOKENS, "speculation": False}
    return Request(ids=tuple(ids), images=images, **plain | more)


def answer(model: OpenModel, request: Request, **more: Any) -> Result:
    return next(event.result for event in model.generate(request, **more) if event.result is not None)


def question(count: int, tail: int = 11) -> list[int]:
    """Ids with `count` places for pictures, text before, between and after."""
    ids = list(range(40, 49))
    for number in range(count):
        ids += [START, IMAGE, END, *range(60 + 10 * number, 60 + 10 * number + 5)]
    return [*ids, *range(100, 100 + tail)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("seeing") / "model", "qwen3_vl")


@pytest.fixture
def model(folder: Path, cache: Path) -> Iterator[OpenModel]:
    found = opened(folder, cache)
    yield found
    found.close()
    assert found.pool.used() == 0


@pytest.mark.parametrize("family", sorted(SEEING))
def test_what_is_written_is_what_transformers_writes(tmp_path: Path, cache: Path, family: str):
    folder = write_seeing(tmp_path / family, family)
    model, oracle = opened(folder, cache), Oracle(folder)
    patch = oracle.processor.patch_size
    images = [drawn(10 * patch, 6 * patch, 1), drawn(45 * patch - 3, 37 * patch + 5, 2)]
    inputs = oracle.inputs([pillow(image) for image in images])
    rows = (inputs["image_grid_thw"].prod(1) // 4).tolist()
    assert rows[1] > 256, "less than a chunk"
    ids: list[int] = []
    for token in question(2):
        ids += [IMAGE] * rows.pop(0) if token == IMAGE else [token]
    whole = torch.tensor([ids])
    with torch.no_grad():
        written = oracle.model.generate(
            input_ids=whole,
            mm_token_type_ids=(whole == IMAGE).int(),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            **inputs,
        )[0, len(ids) :].tolist()
    found = answer(model, asked(question(2), *images, pixels=10**7))
    assert list(found.ids) == written[: len(found.ids)]
    assert len(found.ids) == TOKENS or found.finish == "stop"
    assert model.reader.runs == 2, "the tower runs once per picture, whatever the chunks"
    assert found.usage.prompt == len(ids)
    model.close()
    assert model.pool.used() == 0


def test_a_second_question_reads_neither_tower_nor_picture_again(model: OpenModel):
    picture = drawn(200, 160)
    first = answer(model, asked(question(1), picture))
    held = model.reader.held_bytes()
    second = answer(model, asked([*question(1), 7, 8], picture))
    assert model.reader.runs == 1
    assert second.usage.cached >= 32
    assert first.usage.cached == 0
    assert answer(model, asked(question(1), picture)).ids == first.ids
    assert model.reader.held_bytes() == held
    changed = bytearray(picture.rgb)
    changed[:3] = bytes(255 - level for level in changed[:3])
    other = answer(model, asked(question(1), Picture(200, 160, bytes(changed))))
    assert model.reader.runs == 2
    assert other.usage.cached < 32, "rows of another picture were taken"


def test_pictures_in_another_order_are_another_prompt(model: OpenModel):
    images = drawn(200, 160, 1), drawn(200, 160, 2)
    one = answer(model, asked(question(2), *images, logprobs=0))
    two = answer(model, asked(question(2), *images[::-1], logprobs=0))
    assert two.usage.cached < 32
    assert model.reader.runs == 2
    alone = answer(model, asked(question(2), *images, prefix_reuse=False))
    assert alone.ids == one.ids


def test_answers_of_a_batch_are_those_of_each_alone(model: OpenModel):
    requests = [
        asked(question(1 + number % 2), *[drawn(120 + 40 * number, 96, number + n) for n in range(1 + number % 2)])
        for number in range(4)
    ]
    requests.append(asked(list(range(30, 80))))
    together = {event.request: event.result for event in model.generate_batch(requests) if event.result is not None}
    for place, request in enumerate(requests):
        alone = answer(model, replace(request, prefix_reuse=False))
        assert together[place] is not None
        assert together[place].ids == alone.ids, place


def test_choices_share_one_reading(model: OpenModel):
    request = asked(question(1), drawn(120, 96), n=2, sampling=Sampling(temperature=1.0, seed=5))
    choices = [event.result for event in model.generate(request) if event.result is not None]
    assert len(choices) == 2
    assert model.reader.runs == 1


def test_it_is_stopped_within_the_tower_and_goes_on_later(model: OpenModel):
    picture = drawn(300, 300)
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls > 20

    assert answer(model, asked(question(1), picture), cancel=stop).finish == "cancelled"
    assert model.reader.runs == 0
    assert answer(model, asked(question(1), picture)).finish in ("length", "stop")
    assert model.reader.runs == 1


def test_the_tower_gives_way_alone_and_wakes_alone(model: OpenModel):
    before = answer(model, asked(question(1), drawn(200, 160)))
    held = model.held_bytes()
    (weights, _) = model.reader.give_way()
    assert weights.asked > 0
    assert 0 < model.held_bytes() < held
    assert model.loaded
    text = answer(model, asked(list(range(30, 70))))
    assert text.ids
    again = answer(model, asked(question(1), drawn(200, 160), prefix_reuse=False))
    assert again.ids == before.ids
    assert model.reader.runs == 1, "the rows of the last picture were kept"
    answer(model, asked(question(1), drawn(200, 160, 9)))
    assert model.reader.runs == 2


@pytest.mark.parametrize(("width", "height"), [(608, 832), (608, 864)])  # 494 tokens, and 513: slices of 2 rows
def test_a_picture_that_was_read_holds_no_scratch(model: OpenModel, width: int, height: int):
    """Calls of few rows are kept by the CPU's kernels, with their operands."""
    for seed in range(3):
        picture = drawn(width, height, seed)
        answer(model, asked(question(1), picture, pixels=1_000_000, prefix_reuse=False, max_tokens=1))
        kernels = model.reader._awake.tower.kernels  # type: ignore[union-attr]
        assert isinstance(kernels, CpuKernels)
        assert not kernels._calls._kept


def test_kept_rows_give_way_under_pressure(model: OpenModel):
    answer(model, asked(question(1), drawn(200, 160)))
    held = model.reader.held_bytes()
    released = [one for one in model.pool.make_room(model.pool.room().budget + 1) if one.asked]
    assert released
    assert model.reader.held_bytes() < held
    assert answer(model, asked(question(1), drawn(200, 160))).ids


def test_a_limit_of_pixels_makes_fewer_rows(model: OpenModel):
    picture = drawn(640, 640)
    assert model.picture_sizes([picture]) == [(512, 512, 256)]
    assert model.picture_sizes([picture], 10**6) == [(640, 640, 400)]
    assert model.picture_sizes([replace(picture, pixels=65536)], 10**6) == [(256, 256, 64)]
    assert model.picture_sizes([picture], 65536) == [(256, 256, 64)]
    assert answer(model, asked(question(1), picture, pixels=65536)).usage.prompt == len(question(1)) + 63
    with pytest.raises(RequestError, match=r"pixels is 100; this model reads pictures of at least 1,024 pixels"):
        model.generate(asked(question(1), picture, pixels=100))


def test_what_cannot_be_read_is_refused_before_any_work(model: OpenModel):
    small, large = drawn(64, 64), drawn(1000, 1000)
    with pytest.raises(
        RequestError, match=r"the prompt has \d+ tokens, 961 of them for 1 pictures, and the context is 640"
    ):
        model.generate(asked(question(1), large, pixels=10**7))
    with pytest.raises(
        RequestError, match=r"there are 1 runs of image tokens, but 2 pictures.*image token 500 must stand once"
    ):
        model.generate(asked(question(1), small, small))
    with pytest.raises(RequestError, match=r"2 image tokens, but 1 pictures"):
        model.generate(asked(question(2), small))
    with pytest.raises(RequestError, match=r"image token 500 at position 10, but no picture"):
        model.generate(asked(question(1)))
    with pytest.raises(RequestError, match=r"has 100 pictures; at most 64"):
        model.generate(asked(question(1), *[small] * 100))
    with pytest.raises(RequestError, match="ratio of 201 : 1"):
        model.generate(asked(question(1), drawn(2010, 10)))
    with pytest.raises(RequestError, match=r"has 12 bytes for 4 x 4 pixels"):
        model.generate(asked(question(1), Picture(4, 4, bytes(12))))
    with pytest.raises(RequestError, match="images go with a prompt or with ids"):
        model.generate(Request(messages=(Message("user", "what is it?"),), images=(small,)))
    with pytest.raises(RequestError, match="pixels is True"):
        model.generate(asked(question(1), small, pixels=True))
    assert not model.loaded
    assert model.reader.runs == 0


def test_a_model_that_only_writes_says_which_models_see(tmp_path: Path, cache: Path):
    model = opened(write_family(tmp_path / "writer", "qwen3"), cache)
    with pytest.raises(
        ModelError, match=r"writer reads no pictures: model_type 'qwen3' has none; models that see are qwen2_5_vl, "
    ):
        model.generate(asked(question(1), drawn(64, 64)))
    assert not model.sees
    assert answer(model, asked(FEW)).ids
    model.close()


def test_a_checkpoint_without_its_preprocessor_still_writes(tmp_path: Path, folder: Path, cache: Path):
    copy = tmp_path / "blind"
    shutil.copytree(folder, copy)
    (copy / "preprocessor_config.json").unlink()
    model = opened(copy, cache)
    with pytest.raises(ModelError, match=r"blind has no preprocessor_config.json, which says how pictures are resized"):
        model.generate(asked(question(1), drawn(64, 64)))
    assert answer(model, asked(FEW)).ids
    model.close()


def test_a_preprocessor_of_another_model_is_refused(tmp_path: Path, folder: Path, cache: Path):
    copy = tmp_path / "mixed"
    shutil.copytree(folder, copy)
    document = (copy / "preprocessor_config.json").read_text().replace('"patch_size": 16', '"patch_size": 14')
    (copy / "preprocessor_config.json").write_text(document)
    model = opened(copy, cache)
    with pytest.raises(ModelError, match=r"has patch_size = 14 and the tower of config.json 16"):
        model.generate(asked(question(1), drawn(64, 64)))
    model.close()
