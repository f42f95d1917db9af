"""Start ComfyUI's main.py with a torch for which PyPI's torchvision has no compiled operators.

torchvision and torchaudio on PyPI are compiled against PyPI's torch and do not load with another build of it. All
that ComfyUI imports of them is plain Python, except that torchvision describes its operators to torch at import; they
are declared just before.

    python launch_comfyui.py COMFYUI_FOLDER [arguments of main.py ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

# Operators that torchvision 0.28 and 0.29 describe at import; a newer one may need more: the error then names it.
OPERATORS = ("nms", "qnms")


class OperatorsFirst(MetaPathFinder):
    """Declares torchvision's operators, without an implementation, at the moment that torchvision is imported.

    Not earlier: ComfyUI sets torch's options in the environment before it imports torch.
    """

    def __init__(self) -> None:
        self.library: object = None

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Always returns None: it only declares the operators, for as long as `library` lives."""
        if name == "torchvision" and self.library is None:
            import torch

            self.library = library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in OPERATORS:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def main(folder: str, arguments: list[str]) -> None:
    """Run `folder`/main.py as the main module, as `python main.py` would."""
    source = Path(folder).resolve()
    script = source / "main.py"
    sys.argv = [str(script), *arguments]
    os.chdir(source)
    sys.path[0] = str(source)
    sys.meta_path.insert(0, OperatorsFirst())
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
