"""Progress of a long step of the installer, read from the log of its command. Standard library only."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

LOG = logging.getLogger(__name__)
# Seconds between two lines in a file or pipe, and between two updates on a terminal, whose line is overwritten.
EVERY = 20.0
LOOK = 1.0
LARGE = 5.0  # MB from which on a file's size is shown

# pip's messages; they are always English and give sizes in bytes, kB and MB of 1,000.
_FETCHING = re.compile(r"^\s*Downloading (\S+)(?: \(([\d.]+) (bytes|kB|MB)\))?", re.MULTILINE)
_LOOKING = re.compile(r"^Collecting (\S+)", re.MULTILINE)
_UNPACKING = re.compile(r"^Installing collected packages: (.+)$", re.MULTILINE)
_UNITS = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0}


def doing(log: str, temporary: Path, environment: Path) -> str:
    """pip's latest action by its log; "working" where the log has none. pip downloads into `temporary`, and installs
    into `environment`.
    """
    last = max(
        (match for kind in (_FETCHING, _LOOKING, _UNPACKING) for match in kind.finditer(log)),
        key=re.Match.start,
        default=None,
    )
    if last is None:
        return "working"
    if last.re is _LOOKING:
        return f"looking for {last[1]}"
    if last.re is _UNPACKING:
        return _unpacking(last[1].split(", "), environment)
    name = unquote(last[1]).rpartition("/")[2].partition("#")[0]
    if last[2] is None:
        return f"fetching {name}"
    size = float(last[2]) * _UNITS[last[3]]
    return f"fetching {name}" + (
        f", {min(_fetched(temporary, name), size):,.0f} of {size:,.0f} MB" if size >= LARGE else ""
    )


def _unpacking(names: list[str], environment: Path) -> str:
    """The package being unpacked. pip unpacks one after the other and reports no end: a package with metadata
    is done.
    """
    there = {
        record.name.partition("-")[0].lower() for record in environment.glob("lib/python3*/site-packages/*.dist-info")
    }
    lacking = [index for index, name in enumerate(names) if re.sub(r"[-.]", "_", name).lower() not in there]
    index = lacking[0] if lacking else len(names) - 1
    return f"unpacking {names[index]}, {index + 1} of {len(names)}"


def _fetched(temporary: Path, name: str) -> float:
    """MB of the file so far; pip deletes it after unpacking."""
    with suppress(OSError):
        return max((path.stat().st_size for path in temporary.rglob(name)), default=0) / 1e6
    return 0.0


@dataclass(slots=True)
class Teller:
    """Reports the progress of `step` at intervals; on a terminal it overwrites one line."""

    step: str
    log: Path
    temporary: Path
    environment: Path
    every: float = EVERY
    began: float = field(default_factory=time.monotonic)
    shown_at: float = field(default_factory=time.monotonic)
    start: int = 0

    def __post_init__(self) -> None:
        self.start = self.log.stat().st_size  # earlier runs precede it

    def tell(self) -> None:
        """Report the progress, unless it was just reported."""
        now, live = time.monotonic(), sys.stdout.isatty()
        if not live and now - self.shown_at < self.every:
            return
        self.shown_at = now
        with self.log.open("rb") as file:
            file.seek(self.start)
            what = doing(file.read().decode("utf-8", errors="replace"), self.temporary, self.environment)
        line = f"{self.step:<9} {now - self.began:.0f} s: {what}"
        if live:
            sys.stdout.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
            sys.stdout.flush()
        else:
            LOG.info("%s", line)

    def end(self) -> None:
        """Clear the terminal's line."""
        if sys.stdout.isatty():
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()
