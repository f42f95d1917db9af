"""transformers as the oracle: it imports torchvision, whose operators may have to be declared first (see setup/launch_comfyui.py)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from onedesk.service.setup.launch_comfyui import OperatorsFirst


def load_qwen3(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' Qwen3ForCausalLM over the checkpoint in `folder`, eager attention, for evaluation."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        sys.meta_path.insert(0, OperatorsFirst())
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
