"""The plain checks themselves: they must accept the truth and refuse what is wrong, or no figure of the demo models
means anything.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from onedesk.training import check, evaluate, scenes, shapes

COUNT = 150


@pytest.fixture(scope="module")
def drawn() -> list[tuple[scenes.Scene, np.ndarray]]:
    """Random scenes and their rendered pictures."""
    rng = random.Random(41)
    asked = [scenes.random_scene(rng) for _ in range(COUNT)]
    pictures = evaluate.to_pixels(shapes.render(torch.tensor([scenes.layout(s, rng) for s in asked])))
    return list(zip(asked, pictures, strict=True))


def test_the_picture_check_accepts_rendered_truth(drawn: list[tuple[scenes.Scene, np.ndarray]]) -> None:
    wrong = [scene for scene, picture in drawn if not check.judge(scene, picture).all]
    assert not wrong


def test_the_picture_check_bears_blur_and_noise(drawn: list[tuple[scenes.Scene, np.ndarray]]) -> None:
    generator = torch.Generator().manual_seed(1)
    right = 0
    for scene, picture in drawn:
        soft = torch.nn.functional.avg_pool2d(
            torch.from_numpy(picture).permute(2, 0, 1)[None].float(), 3, 1, 1, count_include_pad=False
        )
        noisy = (
            (soft + 4 * torch.randn(soft.shape, generator=generator)).clamp(0, 255).byte()[0].permute(1, 2, 0).numpy()
        )
        right += check.judge(scene, noisy).shapes
    assert right >= 0.97 * COUNT


def test_the_picture_check_refuses_another_scene(drawn: list[tuple[scenes.Scene, np.ndarray]]) -> None:
    accepted = [
        1
        for (scene, _), (_, picture) in zip(drawn, drawn[1:] + drawn[:1], strict=True)
        if check.judge(scene, picture).all
    ]
    assert len(accepted) <= 0.03 * COUNT


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_each_kind_is_told_from_the_others(kind: str) -> None:
    asked = scenes.Scene((scenes.Shape(kind, "red"),), "white")
    picture = evaluate.to_pixels(shapes.render(torch.tensor([scenes.layout(asked, random.Random(3))])))[0]
    seen = {
        other: check.judge(scenes.Scene((scenes.Shape(other, "red"),), "white"), picture).shapes
        for other in scenes.KINDS
    }
    assert seen == {other: other == kind for other in scenes.KINDS}


def test_colour_place_and_background_are_judged() -> None:
    asked = scenes.Scene((scenes.Shape("circle", "red", "top left"),), "blue")
    picture = evaluate.to_pixels(shapes.render(torch.tensor([scenes.layout(asked, random.Random(3))])))[0]
    assert check.judge(asked, picture) == check.Verdict(True, True, True)
    assert not check.judge(scenes.Scene((scenes.Shape("circle", "orange"),), "blue"), picture).shapes
    assert not check.judge(scenes.Scene((scenes.Shape("circle", "red", "bottom right"),), "blue"), picture).places
    assert not check.judge(scenes.Scene((scenes.Shape("circle", "red"),), "green"), picture).background


def test_words_of_an_idea() -> None:
    assert check.content_words("Please draw a RED fox in the snow!") == ["red", "fox", "snow"]
    assert check.lost_words("a red fox", "An etching of a red wolf") == ["fox"]
    assert check.lost_words("a cat", "a concatenation") == ["cat"]
    assert check.lost_words("画一只红色的狐狸", "一只红色的狐狸，油画") == []
    assert check.lost_words("画一只红色的狐狸", "一只蓝色的狐狸，油画") == ["红色"]


def test_attributes_repeats_and_objects() -> None:
    assert check.added_attributes("a fox in candle light", "an etching of a fox in candle light, 35mm lens") == [
        "35mm lens",
        "etching",
    ]
    assert check.repeats_four("one two three four, one two three four")
    assert not check.repeats_four("one two three four, one two three five")
    assert check.as_object('{"prompt": "a", "negative": "b"}') == {"prompt": "a", "negative": "b"}
    for broken in (
        '{"prompt": "a"}',
        '{"prompt": "a", "negative": 1}',
        "[]",
        "a fox",
        '{"prompt": "a", "negative": ""}',
    ):
        assert check.as_object(broken) is None
