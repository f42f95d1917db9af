"""Opening: loading starts before the rest of the session is built, and a failed opening returns every lease."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from onedesk.service.api import open_model
from onedesk.service.engine import session
from onedesk.service.errors import Cancelled, MemoryFull
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.memory.budget import MIB, MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.arrival import WeightArrival
from tiny_qwen3 import write_tiny_qwen3


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A pool for sessions whose kernels need no compiler."""
    monkeypatch.setattr(session, "choose_kernels", lambda *_: ReferenceKernels())
    return Pool("cpu", MemorySettings(limit_bytes=256 * MIB, floor=MIB), lambda: read_truth("cpu"))


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_failed_opening_returns_every_lease_once(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    model = open_model(
        write_tiny_qwen3(tmp_path / "tiny"),
        pool=pool,
        context=64,
        device="cpu",
        quant=quant,
        kernel_cache=tmp_path,
        load=False,
    )
    with monkeypatch.context() as patch:
        patch.setattr(session, "PagedKV", lambda *_: (_ for _ in ()).throw(MemoryFull("no pages")))
        with pytest.raises(MemoryFull, match="no pages"):
            model.load()
    assert pool.used() == 0
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("onedesk-load")] == []
    pool.verify()
    model.load()
    model.close()
    assert pool.used() == 0


@pytest.mark.parametrize(
    ("quant", "wanted"), [("none", ["reading", "kernels", "pages"]), ("int8", ["kernels", "reading", "pages"])]
)
def test_reading_begins_before_the_rest_is_made(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch, quant: str, wanted: list[str]
) -> None:
    """Kernels too are chosen, and if need be compiled, while weights are read; only converting weights needs them."""
    order: list[str] = []
    start, build, choose = WeightArrival.start, session.PagedKV, session.choose_kernels

    def starts(arrival: WeightArrival) -> WeightArrival:
        order.append("reading")
        return start(arrival)

    def builds(*arguments: object) -> object:
        order.append("pages")
        return build(*arguments)  # type: ignore[arg-type]

    def chooses(*arguments: object) -> object:
        order.append("kernels")
        return choose(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(WeightArrival, "start", starts)
    monkeypatch.setattr(session, "PagedKV", builds)
    monkeypatch.setattr(session, "choose_kernels", chooses)
    folder = write_tiny_qwen3(tmp_path / "tiny")
    model = open_model(folder, pool=pool, context=64, device="cpu", quant=quant, kernel_cache=tmp_path)
    assert order == wanted
    model.close()


def test_a_load_that_is_stopped_while_kernels_are_compiled_returns_every_lease(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> ReferenceKernels:
        raise Cancelled("stopped while kernels were compiled")

    monkeypatch.setattr(session, "choose_kernels", stopped)
    with pytest.raises(Cancelled, match="while kernels were compiled"):
        open_model(write_tiny_qwen3(tmp_path / "tiny"), pool=pool, context=64, device="cpu", kernel_cache=tmp_path)
    assert pool.used() == 0
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("onedesk-load")] == []
