"""The layout of a picture's patches: rows and columns in merge-block order, weights of learned positions, windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from .vision_config import THETA, TowerShape


@dataclass(frozen=True, slots=True)
class Segments:
    """Rows that attend to each other: runs of (first row, how many segments, rows of each)."""

    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Segments:
        runs, first = [], 0
        for length, group in groupby(lengths):
            count = len(list(group))
            runs.append((first, count, length))
            first += count * length
        return cls(tuple(runs))


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """One frame of `grid` patches in the order in which a tower reads them.

    rows, columns: int64 [patches], the positions in the grid. order: int64 [merged rows], where windows need another
    order; `rows` and `columns` are in that order already. frame, windows: which rows attend to each other.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    order: torch.Tensor | None
    frame: Segments
    windows: Segments

    def angles(self, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin fp32 [patches, head_dim / 2] of the rotary embedding: rows rotate the first half, columns the
        second.
        """
        half = head_dim // 2
        frequencies = 1.0 / THETA ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        coordinates = torch.stack((self.rows, self.columns), 1).float()
        turned = (coordinates[:, :, None] * frequencies).flatten(1)
        return turned.cos(), turned.sin()


def lay_out(shape: TowerShape, grid: tuple[int, int]) -> PatchLayout:
    """The layout of a frame. ValueError for a grid that cannot be merged."""
    height, width = grid
    merge = shape.merge
    if height % merge or width % merge or not height * width:
        raise ValueError(f"a grid of {height} x {width} patches cannot be merged {merge} x {merge}")
    merged = torch.arange(height * width).view(height // merge, merge, width // merge, merge).transpose(1, 2)
    order, windows = None, Segments(())
    flat = merged.reshape(-1, merge * merge)
    if shape.window:
        order, lengths = _windows(height // merge, width // merge, shape.window)
        flat = flat[order]
        windows = Segments.of([length * merge * merge for length in lengths])
    flat = flat.reshape(-1)
    return PatchLayout(flat // width, flat % width, order, Segments.of([height * width]), windows)


def _windows(height: int, width: int, window: int) -> tuple[torch.Tensor, list[int]]:
    """Merged rows in window order, and the rows per window; windows at the lower and right edges may be smaller."""
    numbers = torch.arange(height * width).view(height, width)
    pieces = [
        numbers[top : top + window, left : left + window].reshape(-1)
        for top in range(0, height, window)
        for left in range(0, width, window)
    ]
    return torch.cat(pieces), [len(piece) for piece in pieces]


def position_weights(
    shape: TowerShape, grid: tuple[int, int], layout: PatchLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """The four learned positions around each patch and their weights: int64 and fp32 [patches, 4].

    The grid is spread over the square of positions so that the corners meet (align_corners), bilinear in FP32.
    """
    down, up = (
        _axis(along, length, shape.side) for along, length in ((layout.rows, grid[0]), (layout.columns, grid[1]))
    )
    indices = down[0][:, :, None] * shape.side + up[0][:, None, :]
    weights = down[1][:, :, None] * up[1][:, None, :]
    return indices.flatten(1), weights.flatten(1)


def _axis(coordinates: torch.Tensor, length: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two neighbours on one axis and their weights."""
    spread = coordinates.float() * (side - 1) / max(1, length - 1)
    below = spread.floor()
    neighbours = below.long()[:, None] + torch.arange(2)
    weights = 1 - (spread[:, None] - neighbours.float()).abs()
    return neighbours.clamp(0, side - 1), weights.clamp(min=0)
