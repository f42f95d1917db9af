"""Start ComfyUI's main.py beside a torch for which PyPI's torchvision has no compiled operators.

torchvision and torchaudio on PyPI are compiled against PyPI's torch and do not load beside another build of it. All that ComfyUI
imports of them is plain Python, except that torchvision describes its operators to torch at import; they are declared here first.

    python launch_comfyui.py COMFYUI_FOLDER [arguments of main.py ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

# Operators that torchvision 0.28 and 0.29 describe at import; a newer one may need more: the error then names it.
OPERATORS = ("nms", "qnms")


def declare_operators() -> torch.library.Library:
    """Declare torchvision's operators without an implementation; they stay declared as long as the returned library lives."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def main(folder: str, arguments: list[str]) -> None:
    """Run `folder`/main.py as the main module, as `python main.py` would."""
    source = Path(folder).resolve()
    script = source / "main.py"
    kept = declare_operators()
    sys.argv = [str(script), *arguments]
    os.chdir(source)
    sys.path[0] = str(source)
    runpy.run_path(str(script), run_name="__main__")
    del kept


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
