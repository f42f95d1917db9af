"""Device work that a session does again and again, as CUDA graphs: launched as one instead of kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """Graphs by what they do. Work that is captured reads and writes the same addresses each time, and looks at no value.

    What a graph itself takes (some MiB of the driver's) goes when this is closed.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    @property
    def captured(self) -> int:
        """How many there are: where it grew, what was run took longer than it will from now on."""
        return len(self._graphs)

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Do what `key` stands for; the first time as it is, for it compiles what is not compiled yet, which a capture must not."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()
        self._graphs[key] = self._captured(work)

    def close(self) -> None:
        """Let go of all."""
        self._graphs.clear()

    def _captured(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Other threads (a painter's) may go on with their own work meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return graph
