"""What a process holds while something runs: its peak, and the page cache that its files took."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .page_cache import Residency

STATUS = Path("/proc/self/status")
SAMPLE_SECONDS = 0.005


def status_bytes(*keys: str) -> int:
    """The sum of some kB lines of this process's /proc/self/status, in bytes (VmHWM, RssAnon, RssShmem)."""
    lines = (line.split() for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words and words[0].rstrip(":") in keys)


class PeakWatch:
    """Samples, from entering to leaving, this process's own memory plus what `files` gained in the page cache; `peak`
    in bytes.

    Counted from the state at entering: memory held before, and pages that were cached before, are not in it.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.peak = 0
        self._residency = Residency(files)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="onedesk-peak", daemon=True)
        self._own = self._cached = 0

    def __enter__(self) -> PeakWatch:
        self._own, self._cached = status_bytes("RssAnon", "RssShmem"), self._residency.resident()
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.look()

    def look(self) -> None:
        """Take a sample now."""
        own = status_bytes("RssAnon", "RssShmem") - self._own
        self.peak = max(self.peak, own + max(0, self._residency.resident() - self._cached))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.look()
        self._residency.close()
