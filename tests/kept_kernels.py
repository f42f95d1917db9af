"""Compiled kernels for the trees that tests make: compiling them for each would take ten seconds of CPU time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from onedesk.service.config import load_config
from onedesk.service.core import CancelCheck
from onedesk.service.kernels.cpu.compile import compile_library


def keep_kernels(cache: Path) -> None:
    """Put the compiled kernels into the cache of a new tree, as an earlier use would have."""
    cache.mkdir(parents=True, exist_ok=True)
    for library in kept():
        shutil.copy(library, cache)


def kept() -> list[Path]:
    """The compiled kernels in the checkout's own cache, compiled there if absent."""
    here = load_config(None).cache
    compile_library(here)
    return sorted(here.glob("kernels-*.so"))


def building_once(build: Callable[..., str]) -> Callable[..., str]:
    """`build` of kernels/cpu/compile.py for this process: an existing library is copied; other sources, or a full disk,
    are compiled.
    """
    there = {library.name: library for library in kept()}

    def build_or_copy(compiler: str, target: Path, cancel: CancelCheck | None) -> str:
        library = there.get(target.name)
        if library is None or not library.is_file() or library == target:
            return build(compiler, target, cancel)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
        except OSError:
            with suppress(OSError):
                target.unlink()
            return build(compiler, target, cancel)
        return ""

    return build_or_copy
