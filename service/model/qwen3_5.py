"""qwen3_5 (Qwen3.5, and 3.6 to 3.8 where they are dense): gated delta nets, every fourth layer gated attention, SwiGLU.

Source: transformers' Qwen3_5 configuration and the published checkpoints' tensor names. Of a checkpoint with vision the
text network is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import Sampling, Thinking
from .decoder import build, destinations
from .hybrid import read_hybrid_decoder
from .shape import DecoderConfig

__all__ = ["BESIDE", "build", "default_sampling", "destinations", "read_config"]

# Tensors in addition to the text network: the vision tower, and a draft layer.
BESIDE = ("model.visual.", "visual.", "mtp.")


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read and check a qwen3_5 config.json (its text part); raises ModelError for what would change the arithmetic."""
    return read_hybrid_decoder(config, fused=False)


def default_sampling(thinking: Thinking) -> Sampling:
    """Qwen's advice for Qwen3.5 and later (model cards, 2026) for checkpoints without a generation_config.json."""
    if thinking == "off":
        return Sampling(0.7, 20, 0.8, 0.0, 1.5, 0.0, 1.0)
    return Sampling(1.0, 20, 0.95, 0.0, 1.5, 0.0, 1.0)
