"""ComfyUI's IMAGE tensors to RGB pixels."""

from __future__ import annotations

import torch

from ..core import Picture
from ..errors import RequestError


def pictures_of(images: torch.Tensor, name: str = "image") -> tuple[Picture, ...]:
    """One picture per item of IMAGE, float [batch, height, width, channels] from 0 to 1 with 1, 3 or 4 channels.

    Values are rounded to 8 bits and clamped; one channel stands for all three, a fourth is dropped. Raises RequestError
    for another shape and for values that are not finite.
    """
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[-1] not in (1, 3, 4) or 0 in shape:
        raise RequestError(
            f"{name} has the shape {list(shape)}; [batch, height, width, channels] with 1, 3 or 4 channels is needed"
        )
    if not images.is_floating_point():
        raise RequestError(
            f"{name} has the type {str(images.dtype).removeprefix('torch.')}; floating numbers from 0 to 1 are needed"
        )
    count, height, width, _ = shape
    found = []
    for index, image in enumerate(images):
        numbers = image[..., :3].detach().to("cpu", torch.float32)
        if not bool(torch.isfinite(numbers).all()):
            raise RequestError(
                f"picture {index + 1} of {count} in {name} has values that are no finite numbers (NaN or infinity)"
            )
        levels = numbers.mul(255).round_().clamp_(0, 255).to(torch.uint8).expand(height, width, 3).contiguous()
        label = name if count == 1 else f"picture {index + 1} of {name}"
        found.append(Picture(width, height, levels.numpy().tobytes(), label))
    return tuple(found)
