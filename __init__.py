"""Onedesk: Qwen beside image models in one memory pool. ComfyUI finds its door here; without ComfyUI this is a plain package."""
