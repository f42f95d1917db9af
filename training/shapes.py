"""Draws layouts of scenes.layout as pictures, by signed distances, on any torch device."""

from __future__ import annotations

import math

import torch

from .scenes import FIELDS, SIZE


def _distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Signed distance to each kind of shape of radius 1 about the origin (y grows downwards): [..., 6], negative
    inside.
    """
    length = torch.sqrt(x * x + y * y)
    circle = length - 1
    square = torch.maximum(x.abs(), y.abs()) - 0.88
    lower = y - 0.62
    side = x.abs() * math.cos(math.pi / 6) - (y + 1.12) * math.sin(math.pi / 6)
    triangle = torch.maximum(lower, side)
    # A star is symmetric about each of its ten half sectors: fold the angle from the upper tip and measure to one edge.
    angle = torch.atan2(x, -y).abs()
    sector = 2 * math.pi / 5
    folded = (angle - sector * torch.round(angle / sector)).abs()
    px, py = length * torch.sin(folded), length * torch.cos(folded)
    outer, inner = 1.18, 0.5
    ix, iy = inner * math.sin(math.pi / 5), inner * math.cos(math.pi / 5)
    ex, ey = ix, iy - outer
    star = ((py - outer) * ex - px * ey) / math.hypot(ex, ey)
    # A heart is a square on its corner with a half disc on both upper sides.
    a = 2 / 1.707
    hy = y - 0.1
    corner = (x.abs() + hy.abs() - a * math.sqrt(0.5)) * math.sqrt(0.5)
    lobe = torch.sqrt((x.abs() - a * 0.3536) ** 2 + (hy + a * 0.3536) ** 2) - a / 2
    heart = torch.minimum(corner, lobe)
    ring = (length - 0.78).abs() - 0.22
    return torch.stack([circle, square, triangle, star, heart, ring], dim=-1)


def render(layouts: torch.Tensor, size: int = SIZE) -> torch.Tensor:
    """layouts [N, 3 + 2 * FIELDS] float32 -> pictures [N, 3, size, size] float32 in 0..1, edges one pixel soft."""
    layouts = layouts.float()
    grid = (torch.arange(size, device=layouts.device) + 0.5) * (SIZE / size)
    picture = layouts[:, :3, None, None].expand(-1, 3, size, size)
    for start in range(3, 3 + 2 * FIELDS, FIELDS):
        kind, color = layouts[:, start], layouts[:, start + 1 : start + 4]
        x0, y0, r = (layouts[:, start + i, None, None] for i in (4, 5, 6))
        x = ((grid[None, None, :] - x0) / r).expand(-1, size, size)
        y = ((grid[None, :, None] - y0) / r).expand(-1, size, size)
        every = _distances(x, y)
        index = kind.clamp(min=0).long()[:, None, None, None].expand(-1, size, size, 1)
        distance = every.gather(-1, index)[..., 0] * r * (size / SIZE)
        cover = (0.5 - distance).clamp(0, 1) * (kind >= 0)[:, None, None]
        picture = picture + cover[:, None] * (color[:, :, None, None] - picture)
    return picture
