"""Device memory: blocks of torch's own allocator, so that ComfyUI and every other user of torch sees the same bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import MemoryFull


class CudaSlab:
    """One torch block. It cannot be given back in parts, and lives for as long as a tensor on it does."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._device = device
        try:
            self._block: torch.Tensor | None = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise MemoryFull(f"{device} refused a block of {nbytes} bytes: {error}") from error

    def storage(self, offset: int, nbytes: int) -> torch.Tensor:
        if self._block is None:
            raise MemoryFull("the slab has been given back")
        return self._block[offset : offset + nbytes]

    def viewed(self, storage: object) -> bool:
        return False

    def populate(self, offset: int, nbytes: int) -> None:
        """Nothing to do: a device block is backed when it is made."""

    def resident(self, offset: int, nbytes: int) -> int:
        return 0 if self._block is None else nbytes

    def discard(self, offset: int, nbytes: int) -> None:
        """Nothing to do: only whole blocks go back."""

    def checksum(self, offset: int, nbytes: int) -> int:
        return int(self.storage(offset, nbytes).sum(dtype=torch.int64).item())

    def close(self) -> None:
        """Drop the block and empty torch's caches on both sides, so that the bytes reach the driver."""
        self._block = None
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        empty_host = getattr(torch.accelerator, "empty_host_cache", None)
        if empty_host is not None:
            empty_host()


class CudaBackend:
    """Plain device memory through torch."""

    name = "cuda"
    commits = True
    page = 0

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def open(self, nbytes: int, *, whole: bool) -> CudaSlab:
        return CudaSlab(nbytes, self._device)

    def capabilities(self) -> Mapping[str, bool]:
        return {"available": torch.cuda.is_available(), "host_cache": hasattr(torch.accelerator, "empty_host_cache")}
