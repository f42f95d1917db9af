"""The command as a child process, and the helpers that its tests share."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "onedesk.service"]
ENDS_WITHIN = 60  # seconds until a hanging child fails its test; starting torch on a busy machine takes several

Run = Callable[..., tuple[int, Any]]


def pipe_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def start(tree: Path, *arguments: str | bytes, **options: Any) -> subprocess.Popen[bytes]:
    command = [*COMMAND, *arguments, "--config", str(tree / "onedesk.toml")]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )
