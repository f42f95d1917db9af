"""Trains the demo painter on the writer's hidden states.

python -m training.painter --writer FOLDER --vae FILE --out FILE [--seconds 420] [--compile]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from . import examples
from .autoencoder import Autoencoder, load_autoencoder
from .flux import Painter, Shape, resume, save_painter
from .muon import make_optimizers
from .network import CONFIG, WriterNetwork, load_network
from .shapes import render
from .writer import rate

LAYERS = (3, 6)  # the writer's states after these blocks are the painter's text


class Pairs:
    """Prompts, states and latents on the device; texts are encoded and pictures drawn at their first use."""

    def __init__(
        self, ids: np.ndarray, layouts: np.ndarray, autoencoder: Autoencoder, writer: WriterNetwork, device: str
    ) -> None:
        self.ids = torch.from_numpy(ids[:, : examples.PROMPT].astype(np.int32)).to(device)
        self.lengths = torch.from_numpy(ids[:, examples.PROMPT].astype(np.int64)).to(device)
        self.layouts = torch.from_numpy(layouts).to(device)
        self.latents = torch.zeros(len(ids), 16, 16, 16, dtype=torch.float16, device=device)
        self.ready, self.device, self.writer = 0, device, writer
        self.autoencoder = autoencoder.to(memory_format=torch.channels_last)
        self.mean, self.std = self._statistics()
        width = len(self.mean)
        self.states = torch.zeros(len(ids), examples.PROMPT, width, dtype=torch.bfloat16, device=device)

    def _statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of each state dimension over real tokens."""
        ids, lengths = self.ids[:4096].long(), self.lengths[:4096]
        states = torch.cat([text_states(self.writer, part) for part in ids.split(512)])
        real = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
        return states[real].mean(0), states[real].std(0).clamp(min=1e-3)

    @torch.no_grad()
    def prepare(self, until: int) -> None:
        """Read texts and encode pictures up to row `until`."""
        while self.ready < min(until, len(self.ids)):
            rows = slice(self.ready, min(self.ready + 1024, len(self.ids)))
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                pictures = render(self.layouts[rows]).contiguous(memory_format=torch.channels_last)
                self.latents[rows] = self.autoencoder.encode(pictures).to(torch.float16)
            self.states[rows] = ((text_states(self.writer, self.ids[rows].long()) - self.mean) / self.std).to(
                torch.bfloat16
            )
            self.ready = rows.stop


@torch.no_grad()
def text_states(writer: WriterNetwork, ids: torch.Tensor) -> torch.Tensor:
    """ids [B, T] -> the writer's states [B, T, hidden * len(LAYERS)] float32; padding on the right changes nothing
    before it.
    """
    device = ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return writer.states(ids, LAYERS).float()


def _times(count: int, device: str) -> torch.Tensor:
    """Half uniform, half towards the noisy middle, where the layout is determined."""
    even = torch.rand(count, device=device)
    middle = torch.sigmoid(torch.randn(count, device=device) + 0.3)
    return torch.where(torch.rand(count, device=device) < 0.5, even, middle)


def train(
    pairs: Pairs,
    painter: Painter,
    settings: argparse.Namespace,
    save: Callable[[dict[str, torch.Tensor]], None],
) -> dict[str, torch.Tensor]:
    """Flow matching for a fixed wall-clock time; returns the running average of the weights."""
    device, batch, seconds = pairs.device, settings.batch, settings.seconds
    optimizers = make_optimizers(painter, settings.rate, device)
    average = {k: v.detach().clone() for k, v in painter.state_dict().items()}
    place = torch.arange(examples.PROMPT, device=device)

    def loss_of(
        latents: torch.Tensor, noise: torch.Tensor, now: torch.Tensor, text: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        mixed = latents + now[:, None, None, None] * (noise - latents)
        velocity = painter(mixed, now, text, mask)
        return (velocity.float() - (noise - latents)).square().mean()

    run = torch.compile(loss_of) if settings.compile else loss_of
    begin, step, saved, total = time.perf_counter(), 0, 0.0, torch.zeros((), device=device)
    order = torch.arange(len(pairs.ids), device=device)
    while (passed := time.perf_counter() - begin) < seconds:
        at = (step * batch) % max(1, len(order) - batch + 1)
        if pairs.ready == len(order) and at < batch:
            order = torch.randperm(len(order), device=device)
        pairs.prepare(at + batch)
        rows = order[at : at + batch]
        mask = place[None] < pairs.lengths[rows][:, None]
        text, latents = pairs.states[rows].float(), pairs.latents[rows].float()
        for group in (g for o in optimizers for g in o.param_groups):
            group["lr"] = rate(passed / seconds, 0.04, settings.rate) * group["factor"]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = run(latents, torch.randn_like(latents), _times(len(rows), device), text, mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(painter.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        now = painter.state_dict()
        keep = min(0.999, (step + 1) / (step + 20))
        torch._foreach_lerp_(list(average.values()), [now[k] for k in average], 1 - keep)
        total += loss.detach()
        step += 1
        if step % 200 == 0:
            print(
                f"painter step {step} loss {total.item() / 200:.4f} at {time.perf_counter() - begin:.0f} s", flush=True
            )
            if step == 800 and settings.guard and total.item() / 200 > settings.guard:
                raise SystemExit(3)
            total.zero_()
        if step == 20 and device == "cuda":  # compilation is done: start the clock of the schedule
            begin = time.perf_counter()
            continue
        if passed - saved > 120:
            saved = passed
            save(average)
    print(f"painter: {step} steps of {batch} pairs", flush=True)
    return average


def main() -> None:
    """Pairs, training, one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writer", type=Path, required=True)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--pairs", type=int, default=500_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--resume", type=Path, help="go on from this file")
    parser.add_argument(
        "--guard", type=float, default=0.0, help="stop with status 3 if the loss at step 800 is above this"
    )
    parser.add_argument("--compile", action="store_true")
    settings = parser.parse_args()
    begin = time.perf_counter()
    ids, layouts = examples.painter_rows(settings.writer, settings.pairs, settings.seed * 1_000_000, settings.workers)
    print(f"painter: {len(ids)} pairs in {time.perf_counter() - begin:.0f} s", flush=True)
    torch.manual_seed(settings.seed)
    writer, autoencoder = (
        load_network(settings.writer, settings.device),
        load_autoencoder(settings.vae, settings.device),
    )
    pairs = Pairs(ids, layouts, autoencoder, writer, settings.device)
    mean, std = pairs.mean, pairs.std
    painter = Painter(Shape(context=CONFIG["hidden_size"] * len(LAYERS))).to(settings.device)
    if settings.resume:
        resume(painter, settings.resume, mean, std)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    note = {
        "onedesk": "demo painter, an honest toy",
        "text_encoder": "onedesk-demo-writer",
        "layers": ",".join(map(str, LAYERS)),
    }

    def save(weights: dict[str, torch.Tensor]) -> None:
        save_painter(weights, mean, std, settings.out, note)

    save(train(pairs, painter, settings, save))


if __name__ == "__main__":
    main()
