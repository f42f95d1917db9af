"""Repeated device work of a session as CUDA graphs: one launch instead of one per kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """Graphs by a key. Captured work reads and writes the same addresses each time, and the host looks at no value.

    A graph takes a few MiB of the driver's memory, returned by `close`.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        # One stream for all captures: cuBLAS keeps a workspace of 32 MiB per stream that it was used on.
        self._side: torch.cuda.Stream | None = None

    @property
    def captured(self) -> int:
        """How many graphs there are. Work that made one took longer than it will from now on."""
        return len(self._graphs)

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Run the work of `key`. The first time it runs uncaptured, because it may compile kernels, which a capture
        must not."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()
        self._graphs[key] = self._captured(work)

    def close(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()

    def _captured(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        side = self._side = self._side or torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Other threads, such as an image model's, may use the device meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return graph
