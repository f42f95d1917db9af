"""From an entry of onedesk.toml to its engine and the model that is requested there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..config import PeerSettings
from ..core import ModelSpec
from ..memory.budget import show
from ..memory.pool import Pool
from . import llama_server, vllm
from .child import check_program
from .child_engine import ChildEngine, served_names
from .launch import weight_bytes
from .openai_server import OtherServer
from .peer import Peer


def make_peer(settings: PeerSettings, cache: Path, pool: Callable[[], Pool]) -> Peer:
    """The engine of an entry. Starts nothing and sends nothing."""
    return ChildEngine(settings, cache, pool) if settings.ours else OtherServer(settings)


def check_peer(settings: PeerSettings) -> str:
    """One line about an entry, without starting or asking anything. Raises PeerError, FileError for an entry that
    cannot work.
    """
    if not settings.ours:
        OtherServer(settings).reach()
        return "a server that runs by itself; its address and key can be read"
    title = f"[peers.{settings.name}]"
    of_this = llama_server.named_models(settings).get(settings.asked, settings.model)
    model, default = Path(of_this), vllm.COMMAND if settings.kind == "vllm" else llama_server.COMMAND
    program = check_program(title, (settings.command or default)[0], os.environ.get("PATH"))
    file = model if settings.kind == "vllm" else llama_server.model_file(title, model)
    return f"{program} with {model.name}, {show(weight_bytes(title, file))} of weights within {show(settings.memory)}"


def wanted_of(settings: PeerSettings) -> ModelSpec:
    """The model of an entry, by its name in that engine; "" if the entry names none."""
    return ModelSpec((settings.asked or served_names(settings)[0]) if settings.ours else settings.model)


def engine_of(settings: PeerSettings) -> PeerSettings:
    """The settings without the requested model: equal for all entries of one engine."""
    return replace(settings, asked="")
