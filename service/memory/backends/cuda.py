"""Device memory: blocks of torch's own allocator, so that ComfyUI and every other user of torch sees the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...errors import MemoryFull
from .protocol import Returned, SlabView

_CHUNK = 64 << 20


def _host_cache_emptier() -> Callable[[], object] | None:
    """torch's way to drop its cache of pinned host blocks: public from 2.13 on (2.11 on an H200 lacked it), private
    before.
    """
    public = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    return public or getattr(torch._C, "_host_emptyCache", None)


def empty_caches(device: torch.device) -> None:
    """Return torch's cached memory to the driver, on device and host: pinned host blocks are bytes of the pool too."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    empty_host = _host_cache_emptier()
    if empty_host is not None:
        empty_host()


class DeviceSlab:
    """A block on a device as a uint8 tensor. It goes back only as a whole, after the last tensor on it has died: a
    stale view shows as a shortfall of the release, never as a wrong address.
    """

    def __init__(self, block: torch.Tensor) -> None:
        self.nbytes = block.numel()
        self._block: torch.Tensor | None = block

    def view(self, offset: int, nbytes: int) -> SlabView:
        return SlabView(self._open_block()[offset : offset + nbytes], None)

    def populate(self, offset: int, nbytes: int) -> None:
        """Nothing to do: a device block has its pages from the start."""

    def advise(self, advice: str, offset: int, nbytes: int) -> bool:
        return False

    def lock(self, offset: int, nbytes: int) -> bool:
        """A device block is never paged out."""
        return True

    def resident(self, offset: int, nbytes: int) -> int:
        return 0 if self._block is None else nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._open_block()[offset : offset + nbytes].cpu().numpy().tobytes()

    def write(self, offset: int, data: bytes) -> None:
        self._open_block()[offset : offset + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def checksum(self, offset: int, nbytes: int) -> int:
        """Sum of bytes weighted by their offset, modulo 2^64; in chunks, so that it needs little extra memory."""
        total, block = 0, self._open_block()
        for start in range(offset, offset + nbytes, _CHUNK):
            chunk = block[start : min(start + _CHUNK, offset + nbytes)].to(torch.int64)
            weights = torch.arange(start, start + chunk.numel(), device=block.device) * 2 + 1
            total += int((chunk * weights).sum().item())
        return total % (1 << 64)

    def give_back(self, offset: int, nbytes: int) -> Returned:
        """A part cannot go back alone. Its bytes stay in the slab for the next lease."""
        return Returned(0, 0)

    def _open_block(self) -> torch.Tensor:
        if self._block is None:
            raise MemoryFull("the slab has been given back; lease again")
        return self._block


class CudaSlab(DeviceSlab):
    """One block of torch's allocator."""

    def __init__(self, nbytes: int, device: torch.device, integrated: bool) -> None:
        try:
            super().__init__(torch.empty(nbytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError as error:
            first = str(error).splitlines()[0]
            raise MemoryFull(
                f"{device} refused a block of {nbytes} bytes: {first}; release a model or choose less"
            ) from error
        self._device = device
        self._integrated = integrated

    def close(self) -> Returned:
        """Drop the block, empty torch's caches, and measure how much more torch can give away: the driver's free memory
        plus torch's unused memory. On an integrated GPU, where the page cache moves the driver's figure, the second
        alone.

        torch keeps memory that shares an allocation with another block: CUDA's own pool (cudaMallocAsync, ComfyUI's
        choice) returns whole chunks of 32 MiB only, and torch's allocator puts blocks below 10 MiB into pieces of 20
        MiB. On an H200 27 to 59 MiB of a model's 2,370 MiB were in such chunks and came back with the next block. Any
        user of torch can have them at once.
        """
        if self._block is None:
            return Returned(0, 0)
        empty_caches(self._device)
        before = self._measure()
        self._block = None
        empty_caches(self._device)
        return Returned(self.nbytes, max(0, min(self.nbytes, self._measure() - before)))

    def _measure(self) -> int:
        allocated = torch.cuda.memory_allocated(self._device)
        if self._integrated:
            return -allocated
        return torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device) - allocated


class CudaBackend:
    """Plain device memory through torch."""

    name = "cuda"
    residency = "device"
    commits = True
    page = 0
    alignment = 512  # torch's own rounding of every block
    movable = 0

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def open(self, nbytes: int, *, whole: bool) -> CudaSlab:
        return CudaSlab(
            nbytes, self._device, bool(getattr(torch.cuda.get_device_properties(self._device), "is_integrated", 0))
        )

    def capabilities(self) -> Mapping[str, bool]:
        available = torch.cuda.is_available()
        integrated = available and bool(getattr(torch.cuda.get_device_properties(self._device), "is_integrated", 0))
        own_pool = available and torch.cuda.get_allocator_backend() == "cudaMallocAsync"
        return {
            "available": available,
            "integrated": integrated,
            "cuda_malloc_async": own_pool,
            "empty_host_cache": _host_cache_emptier() is not None,
        }
