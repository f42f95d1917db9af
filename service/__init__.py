"""The product without ComfyUI."""
