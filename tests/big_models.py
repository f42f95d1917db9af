"""Random models for a real graphics card, of a size at which a painter and a writer do not fit together.

    python tests/big_models.py MODELS [PAINTER_WIDTH,DOUBLE,SINGLE WRITER_WIDTH,LAYERS]

The defaults make a painter of 2.5 GiB and a writer of 2.2 GiB in BF16. They are made on the card if there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import ENCODER, painter_shapes, random_tensors, write_image_models, write_language_model

PAINTER, WRITER = "2048,3,14", "2048,31"


def write_big_models(models: Path, painter: str = PAINTER, writer: str = WRITER) -> None:
    """Fill a models folder of ComfyUI: the files of write_image_models, diffusion_models/big_painter.safetensors,
    llm/big-writer.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, double, single = map(int, painter.split(","))
    hidden, layers = map(int, writer.split(","))
    write_image_models(models, (ENCODER["hidden_size"],))
    shapes = painter_shapes(ENCODER["hidden_size"], width=width, double=double, single=single)
    file = models / "diffusion_models" / "big_painter.safetensors"
    save_file(random_tensors(shapes, torch.bfloat16, seed=1, device=device), file, metadata={"format": "pt"})
    folder = write_language_model(models / "llm" / "big-writer", hidden=hidden, layers=layers, device=device)
    for path in (file, folder / "model.safetensors"):
        print(f"{path.relative_to(models)}: {path.stat().st_size / 2**30:.2f} GiB")


if __name__ == "__main__":
    write_big_models(Path(sys.argv[1]), *sys.argv[2:])
