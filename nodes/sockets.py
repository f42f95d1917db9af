"""The link types of Onedesk, as ComfyUI names them; what travels on them is in values.py."""

from __future__ import annotations

from comfy_api.latest import io

MODEL = io.Custom("ONEDESK_MODEL")
MESSAGES = io.Custom("ONEDESK_MESSAGES")
SAMPLING = io.Custom("ONEDESK_SAMPLING")
CATEGORY = "Onedesk"
SEED_MAX = 2**64 - 1
