"""transformers as the oracle: it imports torchvision, whose operators may have to be declared first (see setup/launch_comfyui.py)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from onedesk.service.setup.launch_comfyui import declare_operators

_DECLARED: list[torch.library.Library] = []


def load_qwen3(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' Qwen3ForCausalLM over the checkpoint in `folder`, eager attention, for evaluation."""
    if not _DECLARED:
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            _DECLARED.append(declare_operators())
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
