"""Making and checking an installation: tree, ComfyUI, doctor, demo."""
