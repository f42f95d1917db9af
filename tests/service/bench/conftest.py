"""What the measurements share: a small buffer to find the read bandwidth with."""

from __future__ import annotations

import pytest
from onedesk.service.bench import ceiling


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer of 1 GiB takes five seconds of a processor a call, and each measurement makes two."""
    monkeypatch.setattr(ceiling, "BUFFER_BYTES", ceiling.SMALLEST_BUFFER)
