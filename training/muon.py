"""Muon, an optimizer for weight matrices (Keller Jordan, 2024): momentum with orthogonalized updates; AdamW for all
else.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn


def orthogonal(updates: torch.Tensor) -> torch.Tensor:
    """updates [N, rows, columns] -> approximately the nearest matrices with all singular values near 1, by five
    odd-polynomial iterations.
    """
    x = updates.to(torch.bfloat16)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Update size is matched to AdamW's (0.2 root mean square), so that both use one learning rate (Liu et al.,
    2025).
    """

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for weight in group["params"]:
                shapes[weight.shape].append(weight)
            for shape, weights in shapes.items():
                grads = [w.grad for w in weights]
                held = [self.state[w].setdefault("held", torch.zeros_like(w)) for w in weights]
                torch._foreach_lerp_(held, grads, 1 - group["momentum"])
                ahead = torch._foreach_lerp(grads, held, group["momentum"])
                update = orthogonal(torch.stack(ahead)).to(weights[0].dtype)
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, list(update.unbind(0)), alpha=-group["lr"] * 0.2 * max(shape) ** 0.5)


def make_optimizers(network: nn.Module, rate: float, device: str) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the rest."""
    inner = [p for n, p in network.named_parameters() if p.ndim == 2 and "blocks" in n]
    chosen = set(map(id, inner))
    rest = [p for p in network.parameters() if id(p) not in chosen]
    adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=device == "cuda")
    muon = Muon(inner, rate)
    for optimizer, factor in ((muon, 1.0), (adam, 0.4)):
        for group in optimizer.param_groups:
            group["factor"] = factor  # share of the scheduled rate
    return [muon, adam]
