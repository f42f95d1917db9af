"""transformers as the reference: it imports torchvision, whose operators may need declaring first (see
setup/launch_comfyui.py).
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from onedesk.service.setup.launch_comfyui import OperatorsFirst


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model over the checkpoint in `folder`: the class from its config, eager attention,
    evaluation mode.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        sys.meta_path.insert(0, OperatorsFirst())
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    return (
        getattr(importlib.import_module("transformers"), kind)
        .from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        .eval()
    )
