"""The link types of Onedesk, under ComfyUI's names; their values are in values.py."""

from __future__ import annotations

from comfy_api.latest import io

MODEL = io.Custom("ONEDESK_MODEL")
MESSAGES = io.Custom("ONEDESK_MESSAGES")
SAMPLING = io.Custom("ONEDESK_SAMPLING")
CATEGORY = "Onedesk"
SEED_MAX = 2**64 - 1
