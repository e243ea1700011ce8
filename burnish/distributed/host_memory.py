"""Host memory for offloaded tensors and for blocks of files, pinned for CUDA devices.

Allocating and pinning pages costs more than a copy, so a process keeps them.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from burnish.distributed.device import synchronize
from burnish.errors import BurnishError, refusing

_ALIGN = 512
_LEAST = 4 << 20


class Arena:
    """An allocator of host memory beside one device.

    It grows by at least a quarter and merges free regions, so equal needs in every step soon take one region.
    """

    def __init__(self, device: torch.device, least: int = _LEAST) -> None:
        self._device = device
        self._least = least
        self._regions: list[_Region] = []
        self._taking = Lock()  # several threads read a checkpoint
        self._returned: deque[tuple[_Region, int, int]] = deque()

    @property
    def held(self) -> int:
        """Bytes taken from the system."""
        return sum(region.size for region in self._regions)

    @property
    def used(self) -> int:
        """Bytes in use."""
        with self._taking:
            self._take_back()
        return sum(region.used for region in self._regions)

    def take(self, size: int) -> Tensor:
        """Return `size` uninitialized bytes, uint8. They are free once no view of the tensor is left.

        Raises `BurnishError` without memory.
        """
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        room = -(-size // _ALIGN) * _ALIGN
        with self._taking, _chosen(self._device):
            region, start = self._find_room(room)
        bytes_ = (ctypes.c_char * size).from_address(region.address + start)
        # No lock: the garbage collector may call this in the middle of anything above.
        give_back = weakref.finalize(bytes_, self._returned.append, (region, start, start + room))
        give_back.atexit = False
        return torch.frombuffer(bytes_, dtype=torch.uint8)

    def _find_room(self, room: int) -> tuple[_Region, int]:
        self._take_back()
        # A tensor lies within one region, so several free ones serve better as a single one.
        if sum(not region.used for region in self._regions) > 1:
            self._add(self._close_free())
        for region in self._regions:
            start = region.take(room)
            if start is not None:
                return region, start
        free = self._close_free()
        region = self._add(max(room, free, self.held // 4))
        return region, region.take(room) or 0

    def _take_back(self) -> None:
        while self._returned:
            region, start, stop = self._returned.popleft()
            region.free(start, stop)

    def _close_free(self) -> int:
        free = [region for region in self._regions if not region.used]
        if free:
            synchronize(self._device)  # copies to and from this memory may still be running
        self._regions = [region for region in self._regions if region.used]
        for region in free:
            region.close()
        return sum(region.size for region in free)

    def _add(self, size: int) -> _Region:
        region = _Region(max(size, self._least), self._device)
        self._regions.append(region)
        return region


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return a uint8 view of a tensor's whole storage."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


class _Region:
    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._memory = torch.frombuffer(_pages(size), dtype=torch.uint8)
        self._unpin: Callable[[], object] | None = None
        if device.type == "cuda" and page_lock(self._memory, device):
            self._unpin = unpin_at_end = weakref.finalize(self, page_unlock, self._memory, device)
            unpin_at_end.atexit = False  # CUDA may have shut down by then
        self._gaps = [(0, size)]

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    @property
    def used(self) -> int:
        return self.size - sum(stop - start for start, stop in self._gaps)

    def take(self, size: int) -> int | None:
        for index, (start, stop) in enumerate(self._gaps):
            if stop - start >= size:
                self._gaps[index : index + 1] = (
                    [(start + size, stop)] if stop - start > size else []
                )
                return start
        return None

    def free(self, start: int, stop: int) -> None:
        insort(self._gaps, (start, stop))
        joined: list[tuple[int, int]] = []
        for first, last in self._gaps:
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], last)
            else:
                joined.append((first, last))
        self._gaps = joined

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()


def _pages(size: int) -> mmap.mmap:
    with refusing(
        "the machine has no host memory left for offloading",
        BurnishError,
        want=f"{size / 1e9:.2f} GB more for one process",
        do="set batch.tokens_per_device lower, or do without engine.activation_offload, "
        "engine.optimizer_offload or engine.offload_during_rollout; without these, start fewer processes on a machine",
    ):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def page_lock(memory: Tensor, device: torch.device) -> bool:
    """Register memory with CUDA. Return False if it refuses; copies are only slower."""
    size = memory.nbytes
    if size == 0:
        return False
    with _chosen(device):
        if int(_runtime().cudaHostRegister(memory.data_ptr(), size, 0)) == 0:
            return True
        _forget_error()
    return False


def page_unlock(memory: Tensor, device: torch.device) -> None:
    """Undo `page_lock`. No copy may be running."""
    with _chosen(device):
        _runtime().cudaHostUnregister(memory.data_ptr())


def _chosen(device: torch.device) -> AbstractContextManager[None]:
    # Any thread may take or free memory. A new thread starts on device 0, where CUDA would allocate memory for this process.
    return torch.accelerator.device_index(device.index)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """Clear this thread's last CUDA error, which the next kernel launch would raise."""
    # torch has no binding for it. Each CUDA runtime has its own error, so this uses torch's library.
    kind = "hip" if torch.version.hip else "cuda"
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / f"libc10_{kind}.so"))
    library[f"{kind}GetLastError"]()
