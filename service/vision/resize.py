"""Pixels resized as the checkpoint's preprocessor says, and cut into the vectors that a vision tower reads.

Resizing is bicubic with antialiasing on 8-bit levels, always on the CPU by torch: bit-equal to torchvision, which the
published processors use. Pillow differs by one level, and by up to 10 where the height shrinks and the width grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
import torch.nn.functional as F

from ..core import Picture
from ..errors import RequestError
from .preprocessor import Preprocessor

# Increment it when the same file gives other patches, so that no older stored result is used.
VERSION = 1


@dataclass(frozen=True, slots=True)
class ResizedPicture:
    """One picture, or one pair of frames of a clip: `levels` uint8 [frames, 3, height, width], a still has one frame.

    `source` is the picture's width and height before; `digest` identifies levels, size and preprocessing.
    """

    levels: torch.Tensor
    preprocessor: Preprocessor
    name: str
    source: tuple[int, int]
    digest: bytes

    @property
    def height(self) -> int:
        return self.levels.shape[2]

    @property
    def width(self) -> int:
        return self.levels.shape[3]

    @property
    def grid(self) -> tuple[int, int]:
        """Patches per column and per row."""
        return self.height // self.preprocessor.patch, self.width // self.preprocessor.patch

    @property
    def tokens(self) -> int:
        """Its rows in the language model."""
        return self.preprocessor.tokens(self.height, self.width)

    @property
    def patch_width(self) -> int:
        """Numbers of one patch: channels x frames x patch x patch."""
        return 3 * self.preprocessor.frames * self.preprocessor.patch**2

    def patches(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Patch vectors fp32 [rows, patch_width] of the block rows `first`..`last` - 1 (a block row is `merge` rows of
        patches).

        Order: block column, row in the block, column in the block; a vector is [channel][frame][row][column]. A still
        stands for all frames of its patch.
        """
        prep, (rows, columns) = self.preprocessor, self.grid
        merge, patch = prep.merge, prep.patch
        last = rows // merge if last is None else last
        cut = self.levels[:, :, first * prep.factor : last * prep.factor]
        # Scaled in fp32, as the published processors do: fp64 would round differently.
        mean, std = (torch.tensor(values).mul(1 / prep.rescale).view(1, 3, 1, 1) for values in (prep.mean, prep.std))
        scaled = cut.float().sub_(mean).div_(std)
        blocks = scaled.view(-1, 3, last - first, merge, patch, columns // merge, merge, patch)
        ordered = blocks.permute(2, 5, 3, 6, 1, 0, 4, 7)
        if ordered.shape[5] != prep.frames:
            ordered = ordered.expand(-1, -1, -1, -1, -1, prep.frames, -1, -1)
        return ordered.reshape(-1, self.patch_width)


def resize_picture(picture: Picture, preprocessor: Preprocessor) -> ResizedPicture:
    """The picture at the preprocessor's size. Raises RequestError for an aspect ratio that no model reads."""
    size = preprocessor.target_size(picture.height, picture.width, picture.name)
    levels = resize_levels(levels_of(picture), size)
    return resized(levels, preprocessor, picture.name, (picture.width, picture.height))


def levels_of(picture: Picture) -> torch.Tensor:
    """uint8 [1, 3, height, width] of decoded pixels. Raises RequestError where their count does not match the size."""
    if picture.width < 1 or picture.height < 1 or len(picture.rgb) != 3 * picture.width * picture.height:
        raise RequestError(
            f"{picture.name} has {len(picture.rgb)} bytes for {picture.width} x {picture.height} pixels of 3 bytes;"
            " decode it again"
        )
    flat = torch.frombuffer(bytearray(picture.rgb), dtype=torch.uint8)
    return flat.view(1, picture.height, picture.width, 3).permute(0, 3, 1, 2).contiguous()


def resize_levels(levels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """uint8 [frames, 3, *size] from uint8 [frames, 3, height, width]."""
    if tuple(levels.shape[2:]) == size:
        return levels
    return F.interpolate(levels, size=list(size), mode="bicubic", align_corners=False, antialias=True)


def resized(levels: torch.Tensor, preprocessor: Preprocessor, name: str, source: tuple[int, int]) -> ResizedPicture:
    """The levels with the digest that identifies them."""
    cut = (
        preprocessor.patch,
        preprocessor.merge,
        preprocessor.frames,
        preprocessor.mean,
        preprocessor.std,
        preprocessor.rescale,
    )
    header = f"{VERSION} {tuple(levels.shape)} {cut}".encode()
    digest = blake2b(header + b"\0", digest_size=16)
    digest.update(levels.contiguous().numpy().data)
    return ResizedPicture(levels, preprocessor, name, source, digest.digest())
