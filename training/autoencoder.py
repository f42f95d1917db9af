"""Trains the painter's autoencoder, 16 channels at an eighth of the size, with the shape and tensor names of a TAESD
file.

python -m training.autoencoder --out FILE [--seconds 200]
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from . import scenes
from .shapes import render
from .writer import rate

CHANNELS = 16
# ComfyUI's Flux latent format is (latent - shift) * scale; with the same numbers in the file the painter receives the
# encoder's own output.
SCALE, SHIFT = 0.3611, 0.1159


class Clamp(nn.Module):
    """Keeps latents within -3..3, smoothly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 3) * 3


class Block(nn.Module):
    """Three convolutions with a residual path."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)]
        self.conv = nn.Sequential(wide[0], nn.ReLU(), wide[1], nn.ReLU(), wide[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv(x) + x)


def _encoder() -> nn.Sequential:
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), Block()]
    for _ in range(3):
        parts += [nn.Conv2d(64, 64, 3, stride=2, padding=1, bias=False), Block(), Block(), Block()]
    return nn.Sequential(*parts, nn.Conv2d(64, CHANNELS, 3, padding=1))


def _decoder() -> nn.Sequential:
    parts: list[nn.Module] = [Clamp(), nn.Conv2d(CHANNELS, 64, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        parts += [Block(), Block(), Block(), nn.Upsample(scale_factor=2), nn.Conv2d(64, 64, 3, padding=1, bias=False)]
    return nn.Sequential(*parts, Block(), nn.Conv2d(64, 3, 3, padding=1))


class Autoencoder(nn.Module):
    """Pictures [N, 3, H, W] in 0..1 <-> latents [N, 16, H/8, W/8] of about unit size."""

    def __init__(self) -> None:
        super().__init__()
        self.taesd_encoder, self.taesd_decoder = _encoder(), _decoder()

    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.taesd_encoder(pictures)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.taesd_decoder(latents)


def save_autoencoder(model: Autoencoder, path: Path) -> None:
    """One FP16 file that ComfyUI's VAELoader takes."""
    weights = {k: v.detach().to("cpu", torch.float16).contiguous() for k, v in model.state_dict().items()}
    weights["vae_scale"], weights["vae_shift"] = torch.tensor(SCALE), torch.tensor(SHIFT)
    save_file(weights, path, metadata={"format": "pt", "onedesk": "demo painter autoencoder, an honest toy"})


def load_autoencoder(path: Path, device: str) -> Autoencoder:
    """The model of a saved file, float32."""
    weights = {k: v.float() for k, v in load_file(path).items() if not k.startswith("vae_")}
    model = Autoencoder()
    model.load_state_dict(weights)
    return model.to(device).eval()


def random_layouts(count: int, seed: int) -> torch.Tensor:
    """Half are layouts of scenes, half have random colours anywhere: [count, 17] float32."""
    rng, rows = random.Random(seed), []
    for index in range(count):
        row = scenes.layout(scenes.random_scene(rng), rng)
        if index % 2:
            row[:3] = [rng.random() for _ in range(3)]
            for start in (3, 3 + scenes.FIELDS):
                color = [rng.random() for _ in range(3)]
                row[start : start + 7] = [
                    rng.randrange(6),
                    *color,
                    rng.uniform(0, 128),
                    rng.uniform(0, 128),
                    rng.uniform(6, 60),
                ]
        rows.append(row)
    return torch.tensor(rows)


def train(layouts: torch.Tensor, seconds: float, batch: int, peak: float, seed: int, device: str) -> Autoencoder:
    """Reconstruct pictures through latents that are pulled towards unit size and carry a little noise."""
    torch.manual_seed(seed)
    model = Autoencoder().to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=1e-4)
    layouts = layouts.to(device)
    begin, step = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = rate(passed / seconds, 0.03, peak)
        pictures = render(layouts[torch.randint(len(layouts), (batch,), device=device)]).contiguous(
            memory_format=torch.channels_last
        )
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            latents = model.encode(pictures)
            back = model.decode(latents + 0.08 * torch.randn_like(latents))
        back, latents = back.float(), latents.float()
        size = latents.mean((0, 2, 3)).square().mean() + (latents.std((0, 2, 3)) - 1).square().mean()
        far = F.relu(latents.abs() - 2.5).square().mean()
        loss = F.l1_loss(back, pictures) + 4 * F.mse_loss(back, pictures) + 0.02 * size + 0.1 * far
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0:
            report = f"loss {loss.item():.5f} mse {F.mse_loss(back, pictures).item():.6f} size {size.item():.4f}"
            print(f"autoencoder step {step} {report} at {passed:.0f} s", flush=True)
        step += 1
    largest = latents.abs().max().item()
    print(
        f"autoencoder: {step} steps of {batch}, latent std {latents.std().item():.3f}, largest {largest:.2f}",
        flush=True,
    )
    return model


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--layouts", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    layouts = random_layouts(arguments.layouts, arguments.seed)
    model = train(layouts, arguments.seconds, arguments.batch, arguments.rate, arguments.seed, arguments.device)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    save_autoencoder(model, arguments.out)


if __name__ == "__main__":
    main()
