"""What the checks of CUDA kernels share: random weights and rows, and the error of a result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..service.kernels.forward_batch import NormWeight
from ..service.quant.weight import Format, QuantizedWeight, Weight, dequantize, pack_nibbles

# Rounding a result to bf16 gives 1.7e-3, to fp16 2.1e-4. A norm or a gate in between rounds twice.
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


@dataclass(frozen=True, slots=True)
class Finding:
    """The error of a kernel, and its bound."""

    kernel: str
    form: str
    error: float
    bound: float

    @property
    def off(self) -> float:
        """The error in units of its bound."""
        return self.error / max(self.bound, 1e-9)


def apart(found: torch.Tensor, truth: torch.Tensor) -> float:
    """|found - truth| / |truth|; infinite if something is NaN."""
    error = (found.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-30)
    return float(error) if bool(torch.isfinite(found.float()).all()) else float("inf")


class Maker:
    """Random numbers on a device, the same in every run."""

    def __init__(self, device: str, activation: torch.dtype) -> None:
        self.device, self.activation = device, activation
        self._random = torch.Generator(device=device).manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random, device=self.device)

    def rows(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape).to(self.activation)

    def empty(self, *shape: int) -> torch.Tensor:
        """A result buffer filled with NaN, so that an unwritten element shows."""
        return torch.full(shape, float("nan"), device=self.device, dtype=self.activation)

    def norm(self, cols: int) -> NormWeight:
        return NormWeight(self.normal(cols).abs() + 0.5, 1e-6)

    def weight(self, held: Format | None, rows: int, cols: int) -> Weight:
        """Random numbers in the format, with one row of zeros, one group of zeros and one huge number."""
        if held is None:
            weight = self.rows(rows, cols) * 0.2
            weight[1] = 0
            weight[2, 3] = 60  # with more, fp16 does not hold the result of gates
            return weight
        scales = self.normal(rows, held.groups(cols)) * 0.01
        scales[1] = 0
        scales[2, 0] = 0.05
        if held.name == "nvfp4":
            nibbles = torch.randint(0, 16, (rows, cols), generator=self._random, device=self.device).to(torch.uint8)
            factors = self.normal(rows, 1).abs() * 1e-4
            # From the smallest to the largest e4m3, 448; more is NaN.
            held_scales = (scales.abs() * 1e4).clamp(max=448)
            held_scales[2, 1] = 2**-9
            parts = pack_nibbles(nibbles), held_scales.to(torch.float8_e4m3fn)
            return QuantizedWeight(held, rows, cols, *parts, factors=factors)
        if held.name == "int4":
            nibbles = torch.randint(0, 16, (rows, cols), generator=self._random, device=self.device).to(torch.uint8)
            offsets = None if held.symmetric else (self.normal(rows, held.groups(cols)) * 0.05).half()
            return QuantizedWeight(held, rows, cols, pack_nibbles(nibbles), scales.half(), offsets)
        if held.name == "fp8":
            return QuantizedWeight(held, rows, cols, self.normal(rows, cols).to(torch.float8_e4m3fn), scales)
        q = torch.randint(-127, 128, (rows, cols), generator=self._random, device=self.device).to(torch.int8)
        return QuantizedWeight(held, rows, cols, q, scales)


def wide(weight: Weight) -> torch.Tensor:
    """The numbers of the weight in fp32."""
    return dequantize(weight) if isinstance(weight, QuantizedWeight) else weight.float()
