"""A pull's behaviour on the network: connections, waiting, retries, and how often data is synced to the disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubLimits:
    """`rate` is in bytes per second, 0 for no limit; all times are in seconds.

    A connection that delivers less than `stall_rate` bytes per second over `stall` seconds is dropped. After `tries`
    attempts in a row that each gain less than `progress` bytes the pull fails; after `first_tries` if the hub has not
    answered at all. `sync` is how many bytes are written
    between two syncs; only synced bytes count after a crash. `reserve` bytes stay free on the disk.
    """

    connections: int = 4
    rate: float = 0.0
    stall: float = 30.0
    stall_rate: int = 1024
    connect: float = 30.0
    tries: int = 8
    first_tries: int = 3
    progress: int = 64 << 10
    backoff: float = 1.0
    longest_backoff: float = 30.0
    longest_wait: float = 600.0
    sync: int = 64 << 20
    reserve: int = 1 << 30
    recheck: int = 4 << 30  # bytes between two checks of the free disk space
