"""From an entry of onedesk.toml to the engine that it names, and to the model that is asked for there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..config import PeerSettings
from ..memory.pool import Pool
from .engine import ChildEngine, served_name
from .other import OtherServer
from .peer import Peer, Wanted


def make_peer(settings: PeerSettings, cache: Path, pool: Callable[[], Pool]) -> Peer:
    """The engine of an entry; nothing is started or asked yet."""
    return ChildEngine(settings, cache, pool) if settings.ours else OtherServer(settings)


def wanted_of(settings: PeerSettings) -> Wanted:
    """The model of an entry, by its name there; "" where the entry names none."""
    return Wanted(served_name(settings) if settings.ours else settings.model)
