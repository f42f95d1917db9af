"""Pictures for tests, drawn by a seed: noise with smooth parts, so that every difference in resizing shows."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from onedesk.service.core import Picture
from PIL import Image


def drawn(width: int, height: int, seed: int = 0) -> Picture:
    """A picture of noise over slopes."""
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    slope = (rows * 255 // max(1, height - 1) + columns * 255 // max(1, width - 1)) // 2
    noise = generator.integers(-60, 61, (height, width, 3))
    return Picture(width, height, (slope[:, :, None] + noise).clip(0, 255).astype(np.uint8).tobytes(), f"drawn {seed}")


def pillow(picture: Picture) -> Image.Image:
    return Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def array(picture: Picture) -> np.ndarray:
    return np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)


# The content of published preprocessor_config.json files of two generations.
QWEN3_VL = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
QWEN2_5_VL = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
}
