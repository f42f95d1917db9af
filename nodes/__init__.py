"""The ComfyUI nodes: thin wrappers of service/api."""
