"""A checkpoint's preprocessor_config.json: how a picture is resized and cut, and how its values are scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import Field, ModelError, RequestError

FILE, OLD_FILE = "preprocessor_config.json", "processor_config.json"
MAX_RATIO = 200
BICUBIC = 3  # Pillow's number, as in the files
Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Preprocessor:
    """`patch` pixels per side of a patch, `merge` x `merge` patches per token, `frames` frames per patch.

    A picture becomes at least `min_pixels` and at most `max_pixels` large (areas). Values 0..255 become (x - mean) /
    std with mean and std in units of 1 / `rescale`.
    """

    patch: int
    merge: int
    frames: int
    min_pixels: int
    max_pixels: int
    mean: Triple
    std: Triple
    rescale: float = 1 / 255

    @property
    def factor(self) -> int:
        """Pixels per side of a token; the sides of a resized picture are multiples of it."""
        return self.patch * self.merge

    def with_pixels(self, pixels: int) -> Preprocessor:
        """The same with pictures of at most `pixels`. Raises RequestError below the model's minimum."""
        if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < self.min_pixels:
            raise RequestError(
                Field("pixels"), f" is {pixels!r}; this model reads pictures of at least {self.min_pixels:,} pixels"
            )
        return replace(self, max_pixels=min(self.max_pixels, pixels))

    def target_size(self, height: int, width: int, name: str = "the picture") -> tuple[int, int]:
        """Height and width after resizing: multiples of `factor`, the area within the limits. Raises RequestError."""
        _check_ratio(height, width, name)
        rows, columns = (round(side / self.factor) * self.factor for side in (height, width))
        return self._within(rows, columns, height, width, 1, rows * columns)

    def clip_size(
        self, frames: int, height: int, width: int, *, frame_tokens: int | None, name: str = "the clip"
    ) -> tuple[int, int]:
        """As `target_size` for every frame of a clip: `min_pixels` and `max_pixels` bound the area of all frames
        together.

        `frame_tokens` bounds the tokens of one frame as well, as qwen-vl-utils does; None: no such bound. Raises
        RequestError.
        """
        if frames < self.frames:
            raise RequestError(f"{name} has {frames} frame; at least {self.frames} are needed")
        if height < self.factor or width < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        _check_ratio(height, width, name)
        bounded = self
        if frame_tokens is not None:
            each = max(min(frame_tokens * self.factor**2, self.max_pixels // frames), int(self.min_pixels * 1.05))
            bounded = replace(self, max_pixels=each * frames)
        rows, columns = (round(side / self.factor) * self.factor for side in (height, width))
        area = round(frames / self.frames) * self.frames * rows * columns
        return bounded._within(rows, columns, height, width, frames, area)

    def _within(self, rows: int, columns: int, height: int, width: int, frames: int, area: int) -> tuple[int, int]:
        factor = self.factor
        if area > self.max_pixels:
            shrink = math.sqrt(frames * height * width / self.max_pixels)
            return max(factor, int(height / shrink / factor) * factor), max(
                factor, int(width / shrink / factor) * factor
            )
        if area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
        return rows, columns

    def tokens(self, height: int, width: int) -> int:
        """Rows in the language model for a resized picture."""
        return height * width // self.factor**2


def _check_ratio(height: int, width: int, name: str) -> None:
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_RATIO:
        raise RequestError(
            f"{name} has {width} x {height} pixels, a ratio of {ratio:.0f} : 1; at most {MAX_RATIO} : 1 can be read"
        )


def read_preprocessor(document: Mapping[str, Any], which: str = "image_processor", file: str = FILE) -> Preprocessor:
    """The preprocessor of pictures ("image_processor") or clips ("video_processor") from the content of `file`.

    Where the document holds both, the named one is read. Raises ModelError for missing values and unsupported steps.
    """
    inner = document.get(which)
    if isinstance(inner, Mapping):
        document = inner
    for key, wanted in (("do_resize", True), ("do_rescale", True), ("do_normalize", True), ("do_convert_rgb", True)):
        if document.get(key, wanted) is not wanted:
            raise ModelError(f"{file} has {key} = {document[key]!r}; only {str(wanted).lower()} is supported")
    if document.get("resample", BICUBIC) != BICUBIC:
        raise ModelError(f"{file} has resample = {document['resample']!r}; only {BICUBIC} (bicubic) is supported")
    size = document.get("size")
    size = size if isinstance(size, Mapping) else {}
    least, most = (
        _whole(document.get(old, size.get(new, size.get(old))), f"{old} (or size.{new})", file)
        for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    patch, merge, frames = (
        _whole(document.get(key), key, file) for key in ("patch_size", "merge_size", "temporal_patch_size")
    )
    rescale = document.get("rescale_factor", 1 / 255)
    if isinstance(rescale, bool) or not isinstance(rescale, int | float) or not 0 < rescale <= 1:
        raise ModelError(f"{file} has rescale_factor = {rescale!r}; a number above 0 and at most 1 is needed")
    if least > most:
        raise ModelError(
            f"{file} has a least area of {least} and a greatest of {most} pixels; the first must not be above the"
            " second"
        )
    mean, std = (_triple(document.get(key), key, file) for key in ("image_mean", "image_std"))
    if min(std) <= 0:
        raise ModelError(f"{file} has image_std = {list(std)}; numbers above 0 are needed")
    return Preprocessor(patch, merge, frames, least, most, mean, std, float(rescale))


def _whole(value: Any, key: str, file: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ModelError(
            f"{file} has {key} = {value!r}; a whole number from 1 is needed. Get the file that belongs to the weights"
        )
    return value


def _triple(value: Any, key: str, file: str) -> Triple:
    numbers = value if isinstance(value, list) else []
    good = [float(n) for n in numbers if isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n)]
    if len(numbers) != 3 or len(good) != 3:
        raise ModelError(
            f"{file} has {key} = {value!r}; three numbers are needed. Get the file that belongs to the weights"
        )
    return good[0], good[1], good[2]
