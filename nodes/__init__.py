"""The ComfyUI face: thin wrappers of service/api."""
