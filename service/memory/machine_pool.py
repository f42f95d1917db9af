"""A pool on this very machine, sized with what other processes of this user hold and were promised."""

from __future__ import annotations

from collections.abc import Callable

from .budget import MemorySettings
from .claims import Claims, claims_folder
from .pool import Pool
from .truth import read_truth


def make_pool(device: str, settings: MemorySettings, slow: Callable[[], bool] | None = None) -> Pool:
    """A pool of `device`: cpu, cuda or cuda:N; new loads wait while `slow()` is true.

    Raises RequestError if the settings cannot be met, with the figures.
    """
    return Pool(device, settings, lambda: read_truth(device), Claims(device, claims_folder()), slow)
