"""Frames of a clip: which are sampled, their times, and the pairs that a tower reads as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..core import Picture
from ..errors import Field, RequestError
from .preprocessor import Preprocessor
from .resize import ResizedPicture, levels_of, resize_levels, resized

RATE = 2.0  # frames per second that are read
LEAST_FRAMES, MOST_FRAMES = 4, 768
# The most tokens per frame, as in qwen-vl-utils; without it, a short clip costs almost as many tokens as a long one.
FRAME_TOKENS = 768


@dataclass(frozen=True, slots=True)
class FramePair:
    """Frames that become one patch layer, and the mean of their times in seconds."""

    picture: ResizedPicture
    time: float

    @property
    def label(self) -> str:
        """The text before the pair in a prompt."""
        return f"<{self.time:.1f} seconds>"


def sampled_frames(total: int, rate: float, wanted: float = RATE) -> tuple[int, ...]:
    """Indices of the frames to sample from a clip of `total` frames at `rate` per second, `wanted` per second.
    RequestError.
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1000:
        raise RequestError(Field("fps"), f" is {rate!r}; use a number above 0 and at most 1000")
    if total < 1:
        raise RequestError("the clip has no frames")
    count = min(max(int(total / rate * wanted), LEAST_FRAMES), MOST_FRAMES, total)
    return tuple(int(index) for index in np.linspace(0, total - 1, count).round())


def clip_pairs(
    frames: Sequence[Picture], rate: float, preprocessor: Preprocessor, name: str = "the clip"
) -> tuple[FramePair, ...]:
    """The pairs of a clip whose `frames` come at `rate` per second; `preprocessor` is that of clips. Raises
    RequestError.

    All frames are resized to one size. Of an odd number of frames the last is repeated.
    """
    chosen = list(sampled_frames(len(frames), rate))
    height, width = frames[0].height, frames[0].width
    other = next((frame for frame in frames if (frame.height, frame.width) != (height, width)), None)
    if other is not None:
        raise RequestError(
            f"{name} has frames of {width} x {height} and of {other.width} x {other.height} pixels; all must have one"
            " size"
        )
    size = preprocessor.clip_size(
        max(len(chosen), preprocessor.frames), height, width, frame_tokens=FRAME_TOKENS, name=name
    )
    chosen += [chosen[-1]] * (-len(chosen) % preprocessor.frames)
    pairs = []
    for first in range(0, len(chosen), preprocessor.frames):
        group = chosen[first : first + preprocessor.frames]
        levels = torch.cat([resize_levels(levels_of(frames[index]), size) for index in group])
        picture = resized(levels, preprocessor, f"frames {group[0]} to {group[-1]} of {name}", (width, height))
        pairs.append(FramePair(picture, (group[0] / rate + group[-1] / rate) / 2))
    return tuple(pairs)
