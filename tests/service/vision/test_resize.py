"""Sizes, resized pixels, patches and clips against the published processors, bit by bit."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.core import Picture
from onedesk.service.errors import ModelError, RequestError
from onedesk.service.setup.launch_comfyui import OperatorsFirst
from onedesk.service.vision.clip import clip_pairs, sampled_frames
from onedesk.service.vision.preprocessor import read_preprocessor
from onedesk.service.vision.resize import resize_picture
from onedesk.service.vision.tensors import pictures_of
from pictures import QWEN2_5_VL, QWEN3_VL, array, drawn, pillow

SIZES = [(32, 32), (33, 47), (300, 400), (1080, 1920), (777, 333), (20, 3900), (1, 1), (3900, 20)]
SMALL = QWEN3_VL | {"size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}}


def transformers(module: str) -> Any:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        sys.meta_path.insert(0, OperatorsFirst())
    return importlib.import_module(f"transformers.models.{module}")


@pytest.fixture(scope="module")
def processing() -> Any:
    return transformers("qwen2_vl.image_processing_qwen2_vl")


def published(processing: Any, document: dict[str, Any]) -> Any:
    kept = {key: value for key, value in document.items() if key not in ("processor_class", "image_processor_type")}
    return processing.Qwen2VLImageProcessor(**kept)


@pytest.mark.parametrize("document", [QWEN3_VL, QWEN2_5_VL, SMALL], ids=["patch 16", "patch 14", "shrunk"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_patches_are_those_of_the_published_processor_bit_by_bit(
    processing: Any, size: tuple[int, int], document: dict[str, Any]
):
    picture = drawn(size[1], size[0], seed=3)
    wanted = published(processing, document)(images=[pillow(picture)], return_tensors="pt")
    found = resize_picture(picture, read_preprocessor(document))
    assert [1, *found.grid] == wanted["image_grid_thw"][0].tolist()
    assert found.tokens == found.grid[0] * found.grid[1] // 4
    assert torch.equal(found.patches(), wanted["pixel_values"])


def test_block_rows_one_by_one_are_the_same_patches():
    found = resize_picture(drawn(300, 200), read_preprocessor(QWEN3_VL))
    rows = [found.patches(row, row + 1) for row in range(found.grid[0] // 2)]
    assert torch.equal(torch.cat(rows), found.patches())


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([QWEN3_VL, QWEN2_5_VL, SMALL]))
def test_target_sizes_are_those_of_the_published_processor(height: int, width: int, document: dict[str, Any]):
    smart = transformers("qwen2_vl.image_processing_qwen2_vl").smart_resize
    prep = read_preprocessor(document)
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(RequestError, match="at most 200 : 1"):
            prep.target_size(height, width)
        return
    assert prep.target_size(height, width) == smart(height, width, prep.factor, prep.min_pixels, prep.max_pixels)


def test_a_picture_of_ratio_201_is_refused_by_name():
    with pytest.raises(RequestError, match=r"drawn 0 has 10 x 2010 pixels, a ratio of 201 : 1; at most 200 : 1"):
        resize_picture(drawn(10, 2010), read_preprocessor(QWEN3_VL))


def test_4097_squared_is_brought_to_the_limit():
    prep = read_preprocessor(QWEN3_VL)
    assert prep.target_size(4097, 4097) == (4096, 4096)
    assert prep.tokens(4096, 4096) == 16384


def test_a_limit_of_pixels_lowers_the_greatest_area_only():
    prep = read_preprocessor(QWEN3_VL).with_pixels(262_144)
    assert prep.target_size(2000, 2000) == (512, 512)
    assert prep.target_size(100, 100) == (256, 256)
    assert read_preprocessor(QWEN3_VL).with_pixels(10**9).max_pixels == 16_777_216
    with pytest.raises(RequestError, match="pixels is 1000; this model reads pictures of at least 65,536"):
        prep.with_pixels(1000)


def test_the_digest_knows_pixels_and_preprocessing():
    one, two = read_preprocessor(QWEN3_VL), read_preprocessor(QWEN2_5_VL)
    picture = drawn(256, 256)
    changed = bytearray(picture.rgb)
    changed[1000] ^= 1
    digest = resize_picture(picture, one).digest
    assert digest == resize_picture(drawn(256, 256), one).digest
    assert digest == resize_picture(picture, one.with_pixels(70_000)).digest
    assert digest != resize_picture(Picture(256, 256, bytes(changed)), one).digest
    assert digest != resize_picture(picture, two).digest


def test_the_image_processor_of_a_joined_file_is_read():
    joined = {
        "image_processor": QWEN3_VL,
        "video_processor": QWEN3_VL | {"size": {"longest_edge": 25165824, "shortest_edge": 4096}},
    }
    assert read_preprocessor(joined).max_pixels == 16_777_216
    assert read_preprocessor(joined, "video_processor").max_pixels == 25_165_824


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"patch_size": None}, "patch_size = None"),
        ({"merge_size": 0}, "merge_size = 0"),
        ({"temporal_patch_size": True}, "temporal_patch_size = True"),
        ({"size": None}, r"max_pixels \(or size.longest_edge\) = None|min_pixels \(or size.shortest_edge\) = None"),
        ({"image_mean": [0.5]}, r"image_mean = \[0.5\]; three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "numbers above 0"),
        ({"do_normalize": False}, "do_normalize = False"),
        ({"resample": 2}, "resample = 2"),
        ({"rescale_factor": 0}, "rescale_factor = 0"),
        ({"size": {"shortest_edge": 5000, "longest_edge": 4000}}, "least area of 5000"),
    ],
)
def test_what_a_file_lacks_or_asks_for_beyond_is_named(change: dict[str, Any], words: str):
    with pytest.raises(ModelError, match=words):
        read_preprocessor(QWEN3_VL | change)


def test_image_tensors_become_pictures():
    levels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, 3)
    images = torch.from_numpy(levels).float() / 255
    (found,) = pictures_of(images)
    assert (array(found) == levels[0]).all()
    assert pictures_of(torch.cat((images, torch.full((1, 16, 16, 1), 0.5)), 3)) == (found,)
    assert pictures_of(images[..., :1]) == (found,)
    wide = pictures_of(torch.tensor([-1.0, 2.0, 0.5]).view(1, 1, 1, 3).repeat(2, 1, 1, 1))
    assert [picture.rgb for picture in wide] == [bytes((0, 255, 128))] * 2
    assert wide[1].name == "picture 2 of image"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_image_tensors_with_no_numbers_are_refused(value: float):
    images = torch.zeros(2, 4, 4, 3)
    images[1, 2, 2, 0] = value
    with pytest.raises(RequestError, match=r"picture 2 of 2 in image has values that are no finite numbers"):
        pictures_of(images)
    for wrong in (
        torch.zeros(4, 4, 3),
        torch.zeros(1, 4, 4, 2),
        torch.zeros(0, 4, 4, 3),
        torch.zeros(1, 4, 4, 3).int(),
    ):
        with pytest.raises(RequestError, match=r"(is|are) needed"):
            pictures_of(wrong)


@pytest.mark.parametrize(("total", "rate"), [(1, 24), (3, 24), (7, 3.0), (48, 24), (250, 23.976), (4000, 1.5)])
def test_clips_are_those_of_the_published_processors(total: int, rate: float):
    video = transformers("qwen3_vl.video_processing_qwen3_vl")
    settings = {"shortest_edge": 4096, "longest_edge": 25165824}
    processor = video.Qwen3VLVideoProcessor(size=settings, patch_size=16, merge_size=2, temporal_patch_size=2)
    metadata = type("Metadata", (), {"total_num_frames": total, "fps": rate})()
    indices = processor.sample_frames(metadata, fps=2)
    assert list(sampled_frames(total, rate)) == indices.tolist()
    times = transformers("qwen3_vl.processing_qwen3_vl").Qwen3VLProcessor._calculate_timestamps(None, indices, rate)
    prep = read_preprocessor(QWEN3_VL | {"size": settings})
    for height, width in ((16, 40), (300, 400), (1080, 1920)):
        if len(indices) > 1:
            cap = max(min(768 * 1024, prep.max_pixels // len(indices)), int(4096 * 1.05)) * len(indices)
            wanted = video.smart_resize(len(indices), height, width, 2, 32, 4096, cap)
            assert prep.clip_size(len(indices), height, width, frame_tokens=768) == wanted
    if total > 300:
        return
    pairs = clip_pairs([drawn(48, 32, seed) for seed in range(total)], rate, prep)
    assert [pair.time for pair in pairs] == times
    assert pairs[0].label == f"<{times[0]:.1f} seconds>"


def test_pairs_are_cut_as_the_published_processor_cuts_them():
    video = transformers("qwen3_vl.video_processing_qwen3_vl")
    settings = {"shortest_edge": 4096, "longest_edge": 25165824}
    frames = [drawn(100, 70, seed) for seed in range(5)]
    prep = read_preprocessor(QWEN3_VL | {"size": settings})
    pairs = clip_pairs(frames, 2.0, prep)
    tensors = torch.stack([torch.from_numpy(array(frame).copy()).permute(2, 0, 1) for frame in frames])
    processor = video.Qwen3VLVideoProcessor(
        size=settings, image_mean=[0.5] * 3, image_std=[0.5] * 3, cap_pixels_per_frame=True
    )
    wanted = processor(videos=[tensors], do_sample_frames=False, return_tensors="pt")
    assert [3, *pairs[0].picture.grid] == wanted["video_grid_thw"][0].tolist()
    assert torch.equal(torch.cat([pair.picture.patches() for pair in pairs]), wanted["pixel_values_videos"])


def test_clips_of_two_sizes_and_of_no_frames_are_refused():
    prep = read_preprocessor(QWEN3_VL)
    with pytest.raises(RequestError, match=r"frames of 48 x 32 and of 32 x 32 pixels"):
        clip_pairs([drawn(48, 32), drawn(32, 32)], 24, prep)
    with pytest.raises(RequestError, match="no frames"):
        clip_pairs([], 24, prep)
    with pytest.raises(RequestError, match="fps is 0"):
        clip_pairs([drawn(48, 32)], 0, prep)
