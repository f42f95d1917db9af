"""Which module reads which model_type; a family is imported when it is first used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from ..errors import ModelError

FAMILIES = {"qwen3": "qwen3"}


def family_of(config: Mapping[str, Any]) -> ModuleType:
    """The module of config.json's model_type; ModelError names what it is and what is supported."""
    kind = config.get("model_type")
    if kind in FAMILIES:
        return import_module(f"{__package__}.{FAMILIES[kind]}")
    architectures = config.get("architectures")
    named = f" ({architectures[0]})" if isinstance(architectures, list) and architectures else ""
    raise ModelError(f"model_type {kind!r}{named} is not supported; supported: {', '.join(sorted(FAMILIES))}")
