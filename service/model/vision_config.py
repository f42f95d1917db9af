"""The vision part of config.json: the shape of the tower and the token ids of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from ..errors import ModelError
from .spec import LARGEST, LAYERS, ConfigReader

# Prefixes of the tower's tensors in checkpoints.
PREFIXES = ("model.visual.", "visual.")
# Families whose towers have taps (deepstack); later families ignore such a list in their configs.
TAPPED = frozenset({"qwen3_vl", "qwen3_vl_moe"})
WINDOWED = frozenset({"qwen2_5_vl"})
SEEING = frozenset({"qwen3_5", "qwen3_5_moe", "qwen4_exp"}) | TAPPED | WINDOWED
CHANNELS = 3
THETA = 10000.0
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class TowerShape:
    """A vision tower: `depth` blocks of `hidden` with `heads` and a feed-forward of `intermediate`, rows of `out` for
    the decoder.

    `patch` pixels per side and `frames` frames per patch, `merge` x `merge` patches per row. `side`: side length of the
    square of learned positions, 0 without. `taps`: blocks after which a further row is taken. `window`: merged rows per
    side of an attention window, for all blocks except those in `full`; 0: every block attends to the whole frame.
    `gated`: RMS norms and SiLU gates (qwen2_5_vl) instead of layer norms and GELU.
    """

    depth: int
    hidden: int
    heads: int
    intermediate: int
    out: int
    patch: int
    frames: int
    merge: int
    side: int
    taps: tuple[int, ...] = ()
    window: int = 0
    full: frozenset[int] = frozenset()
    gated: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.frames * self.patch**2

    @property
    def merged(self) -> int:
        """Width of the patches that are merged into one row."""
        return self.hidden * self.merge**2

    @property
    def columns(self) -> int:
        """The widest row that a product reads."""
        return max(self.merged, self.intermediate, self.patch_width)

    def tokens(self, grid: tuple[int, int]) -> int:
        """Rows of the decoder for a picture of `grid` patches."""
        return grid[0] * grid[1] // self.merge**2


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The tower and the token ids of pictures: `image` and `video` are replaced by their rows, between `start` and
    `end`.
    """

    tower: TowerShape
    image: int
    video: int
    start: int
    end: int


def sees(config: Mapping[str, Any], kind: str) -> bool:
    """Whether a config.json of text family `kind` describes a tower."""
    return kind in SEEING and isinstance(config.get("vision_config"), Mapping)


def read_vision(config: Mapping[str, Any], kind: str, hidden: int) -> VisionConfig:
    """The vision part of a config.json of text family `kind` whose decoder is `hidden` wide. Raises ModelError."""
    shape = read_tower_shape(config, kind)
    if shape.out != hidden:
        raise ModelError(
            f"config.json has vision_config.out_hidden_size = {shape.out} for a decoder of hidden_size = {hidden}; they"
            " must be equal"
        )
    outer = ConfigReader(config)
    ids = (outer.integer(f"{name}_token_id") for name in ("image", "video", "vision_start", "vision_end"))
    return VisionConfig(shape, *ids)


def read_tower_shape(config: Mapping[str, Any], kind: str) -> TowerShape:
    """The tower alone. Raises ModelError."""
    inner = config.get("vision_config")
    if not sees(config, kind) or not isinstance(inner, Mapping):
        raise ModelError(f"model_type {kind!r} has no vision tower; models that see are {', '.join(sorted(SEEING))}")
    read = _Within({f"vision_config.{key}": value for key, value in inner.items()})
    read.require("hidden_act", "silu" if kind in WINDOWED else "gelu_pytorch_tanh", "the tower's feed-forward")
    for key in ("in_channels", "in_chans"):
        read.require(key, CHANNELS, "red, green and blue")
    return _tower(read, kind)


class _Within(ConfigReader):
    """The reader of vision_config; messages name the whole path."""

    def integer(self, key: str, default: int | None = None, *, most: int = LARGEST) -> int:
        name = f"vision_config.{key}"
        value = self._config.get(name)
        if isinstance(value, list) and value and all(item == value[0] for item in value):  # one per dimension
            return ConfigReader({name: value[0]}).integer(name, default, most=most)
        return super().integer(name, default, most=most)

    def numbers(self, key: str) -> tuple[int, ...]:
        return super().numbers(f"vision_config.{key}")

    def require(self, key: str, allowed: Any, meaning: str, *also: Any) -> None:
        super().require(f"vision_config.{key}", allowed, meaning, *also)


def _tower(read: _Within, kind: str) -> TowerShape:
    depth = read.integer("depth", most=LAYERS)
    hidden, heads = read.integer("hidden_size"), read.integer("num_heads")
    merge, patch = read.integer("spatial_merge_size", 2), read.integer("patch_size")
    if hidden % heads or hidden // heads % 4:
        raise ModelError(
            f"config.json has vision_config.hidden_size = {hidden} and num_heads = {heads}; heads must divide it into"
            " multiples of 4"
        )
    side = window = 0
    full: frozenset[int] = frozenset()
    if kind in WINDOWED:
        window = read.integer("window_size") // merge // patch
        full = frozenset(read.numbers("fullatt_block_indexes"))
        if not window:
            raise ModelError(
                f"config.json has a vision_config.window_size below {merge * patch} pixels, less than one row"
            )
    else:
        count = read.integer("num_position_embeddings")
        side = isqrt(count)
        if side**2 != count:
            raise ModelError(
                f"config.json has vision_config.num_position_embeddings = {count}; a square number is needed"
            )
    taps = read.numbers("deepstack_visual_indexes") if kind in TAPPED else ()
    if list(taps) != sorted(set(taps)) or any(tap >= depth for tap in taps):
        raise ModelError(
            f"config.json has vision_config.deepstack_visual_indexes = {list(taps)}; rising numbers below the depth"
            f" {depth} are needed"
        )
    return TowerShape(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=read.integer("intermediate_size"),
        out=read.integer("out_hidden_size"),
        patch=patch,
        frames=read.integer("temporal_patch_size", 2),
        merge=merge,
        side=side,
        taps=taps,
        window=window,
        full=full,
        gated=kind in WINDOWED,
    )
