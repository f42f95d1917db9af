"""Onedesk: Qwen beside image models in one memory pool. ComfyUI finds its door here; without ComfyUI this is a plain package."""

from typing import Any

WEB_DIRECTORY = "./nodes/web"


async def comfy_entrypoint() -> Any:
    """What ComfyUI calls when it loads the pack; only then is anything of ComfyUI imported."""
    from .nodes.extension import Onedesk

    return Onedesk()
