"""Draws with stock ComfyUI code on the CPU, in a process of its own: UNETLoader, VAELoader, KSampler at cfg 1,
VAEDecode.

python -m training.comfy_draw COMFYUI_DIR JOB.safetensors OUT.npy --painter FILE --vae FILE [--steps 12]
JOB holds text_0, text_1, ... [tokens, context] float32 and seeds [N]; OUT becomes [N, 128, 128, 3] uint8.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from onedesk.service.setup.launch_comfyui import OperatorsFirst
from safetensors.torch import load_file


def _comfyui(folder: Path, models: dict[str, Path]) -> ModuleType:
    """ComfyUI's node module, on the CPU, with the given files' folders as its model folders."""
    sys.meta_path.insert(0, OperatorsFirst())  # torchvision's compiled operators are absent with a CPU torch
    sys.path.insert(0, str(folder))
    from comfy.cli_args import args

    args.cpu = True
    import folder_paths

    import nodes

    for kind, path in models.items():
        folder_paths.add_model_folder_path(kind, str(path.parent), is_default=True)
    return nodes


def main() -> None:
    """Draw every job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--painter", type=Path, required=True)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sampler", default="dpmpp_2m")
    parser.add_argument("--scheduler", default="beta")
    settings = parser.parse_args()
    sys.argv = sys.argv[:1]
    job, out, steps = load_file(settings.job), settings.out.resolve(), settings.steps
    nodes = _comfyui(
        settings.comfyui.resolve(), {"diffusion_models": settings.painter.resolve(), "vae": settings.vae.resolve()}
    )
    made = []
    with torch.inference_mode():
        (model,) = nodes.UNETLoader().load_unet(settings.painter.name, "default")
        (vae,) = nodes.VAELoader().load_vae(settings.vae.name)
        for index, seed in enumerate(job["seeds"].tolist()):
            text = [[job[f"text_{index}"][None], {}]]
            empty = {"samples": torch.zeros(1, 16, 16, 16)}
            (latent,) = nodes.common_ksampler(
                model, seed, steps, 1.0, settings.sampler, settings.scheduler, text, text, empty
            )
            (picture,) = nodes.VAEDecode().decode(vae, latent)
            made.append((picture[0].clamp(0, 1) * 255).round().byte().cpu().numpy())
    np.save(out, np.stack(made))


if __name__ == "__main__":
    main()
