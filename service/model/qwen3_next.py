"""qwen3_next: gated delta nets, every fourth layer gated attention, experts with a shared one; norms stored around
zero.

Source: transformers' Qwen3Next configuration and the published checkpoints' tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import Sampling, Thinking
from .decoder import build, destinations
from .hybrid import read_hybrid_decoder
from .shape import DecoderConfig, read_experts
from .spec import ConfigReader

__all__ = ["BESIDE", "build", "default_sampling", "destinations", "read_config"]

# Tensors in addition to the text network: a draft layer.
BESIDE = ("mtp.",)


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read and check a qwen3_next config.json; raises ModelError for what would change the arithmetic."""
    read = ConfigReader(config)
    experts = read_experts(read, shared=True, normalized=read.flag("norm_topk_prob", True))
    dense, step = frozenset(read.numbers("mlp_only_layers")), read.integer("decoder_sparse_step", 1)
    return read_hybrid_decoder(config, fused=True, experts=experts, dense=dense, sparse_step=step)


def default_sampling(thinking: Thinking) -> Sampling:
    """Qwen's advice for Qwen3-Next (model cards, 2025) for checkpoints without a generation_config.json."""
    if thinking == "on":
        return Sampling(0.6, 20, 0.95, 0.0, 0.0, 0.0, 1.0)
    return Sampling(0.7, 20, 0.8, 0.0, 0.0, 0.0, 1.0)
