"""Making and checking an installation: directory tree, ComfyUI, environments, systemd unit."""
