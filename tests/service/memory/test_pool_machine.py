"""Random walks over the pool on this machine's real memory, its invariants checked after every step."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from onedesk.service.memory.budget import KIB, MIB, MemorySettings
from onedesk.service.memory.policy import KINDS
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth


class PoolMachine(RuleBasedStateMachine):
    """Leases of random sizes are filled, kept, used and returned, and stale views are written: no lease ever sees
    another's bytes.
    """

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        chosen = MemorySettings(
            limit_bytes=64 * MIB, floor=64 * MIB, initial_slab=256 * KIB, own_slab=128 * KIB, debug=True
        )
        self.pool = Pool("cpu", chosen, read_truth)
        self.marks = count(1)
        self.live: dict[object, int] = {}
        self.stale: list[torch.Tensor] = []

    @rule(
        target=leases,
        nbytes=st.integers(1, 400 * KIB),
        kind=st.sampled_from(KINDS),
        align=st.sampled_from([64, 256, 4096]),
    )
    def lease(self, nbytes: int, kind: str, align: int) -> object:
        lease = self.pool.lease("owner", kind, nbytes, align=align)  # type: ignore[arg-type]
        mark = next(self.marks) % 250 + 1
        lease.tensor.fill_(mark)
        self.live[lease] = mark
        return lease

    @rule(lease=consumes(leases), keep_view=st.booleans())
    def release(self, lease: object, keep_view: bool) -> None:
        view = lease.tensor[::7] if keep_view else None  # type: ignore[attr-defined]
        del self.live[lease]
        released = lease.release()  # type: ignore[attr-defined]
        assert released.measured == released.asked <= lease.nbytes  # type: ignore[attr-defined]
        if view is not None:
            self.stale.append(view)

    @rule()
    def drop_views(self) -> None:
        self.stale.clear()

    @rule()
    def write_views(self) -> None:
        for view in self.stale:
            view.fill_(255)

    @invariant()
    def holds(self) -> None:
        self.pool.verify()
        assert self.pool.used() == sum(lease.nbytes for lease in self.live)  # type: ignore[attr-defined]
        for lease, mark in self.live.items():
            assert torch.all(lease.tensor == mark)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        with ExitStack() as stack:
            for lease in self.live:
                stack.callback(lease.release)  # type: ignore[attr-defined]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
