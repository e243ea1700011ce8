"""Host memory of a process, taken from the system in large pieces and kept: for what leaves the device, and for blocks of files.

Taking pages from the system and pinning them costs more than a copy, so that is done once. What is
carved out of a piece is a tensor like any other, and its place is free again when its last view has
gone, whoever held it. Left out: memory that another process sees too (`burnish.checkpoint.staging`). It
is read there while all of this is in use, so neither could ever have the other's place.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from burnish.distributed.device import synchronize
from burnish.distributed.pinning import pin, unpin
from burnish.errors import BurnishError

_ALIGN = 512
_LEAST = 4 << 20


class Arena:
    """Memory on the host beside one device, pinned where that is CUDA.

    It grows when there is no room, by a quarter at least. Pieces that are all free are made one, and give
    way to a larger one, so that a process that needs the same in every step soon has it in one piece, and takes no more.
    """

    def __init__(self, device: torch.device, least: int = _LEAST) -> None:
        """`least`: bytes of the smallest piece."""
        self._device, self._least = device, least
        self._pieces: list[_Piece] = []
        self._returned: deque[tuple[_Piece, int, int]] = deque()

    @property
    def pieces(self) -> int:
        """How many there are."""
        return len(self._pieces)

    @property
    def held(self) -> int:
        """Bytes taken from the system."""
        return sum(piece.size for piece in self._pieces)

    @property
    def used(self) -> int:
        """Bytes that somebody has."""
        self._take_back()
        return sum(piece.used for piece in self._pieces)

    def take(self, size: int) -> Tensor:
        """So many bytes, uint8, not zeroed; others may have them when no view of the tensor is left.

        Raises `BurnishError` where the system has no more.
        """
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        room = -(-size // _ALIGN) * _ALIGN
        self._take_back()
        if sum(not piece.used for piece in self._pieces) > 1:
            self._add(self._close_free())
        for piece in self._pieces:
            start = piece.carve(room)
            if start is not None:
                break
        else:
            free = self._close_free()
            piece = self._add(max(room, free, self.held // 4))
            start = piece.carve(room) or 0
        bytes_ = (ctypes.c_char * size).from_address(piece.address + start)
        # No lock: garbage may be collected, and this called, in the middle of anything above.
        give_back = weakref.finalize(bytes_, self._returned.append, (piece, start, start + room))
        give_back.atexit = False
        return torch.frombuffer(bytes_, dtype=torch.uint8)

    def _take_back(self) -> None:
        while self._returned:
            piece, start, stop = self._returned.popleft()
            piece.mend(start, stop)

    def _close_free(self) -> int:
        """Give back to the system the pieces that are all free; their bytes."""
        free = [piece for piece in self._pieces if not piece.used]
        if free:
            synchronize(self._device)  # copies to and from what was here may still be under way
        self._pieces = [piece for piece in self._pieces if piece.used]
        for piece in free:
            piece.close()
        return sum(piece.size for piece in free)

    def _add(self, size: int) -> _Piece:
        piece = _Piece(max(size, self._least), pinned=self._device.type == "cuda")
        self._pieces.append(piece)
        return piece


def storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of the storage that a tensor is a view of, uint8: another view of it."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


class _Piece:
    """Adjoining bytes, and which of them are free."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.size = size
        self._memory = torch.frombuffer(_pages(size), dtype=torch.uint8)
        self._unpin: Callable[[], object] | None = None
        if pinned and pin(self._memory):
            self._unpin = unpin_at_end = weakref.finalize(self, unpin, self._memory)
            unpin_at_end.atexit = False  # CUDA may have gone by then
        self._gaps = [(0, size)]

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    @property
    def used(self) -> int:
        return self.size - sum(stop - start for start, stop in self._gaps)

    def carve(self, size: int) -> int | None:
        """Where so many bytes begin, in the first gap that has them."""
        for index, (start, stop) in enumerate(self._gaps):
            if stop - start >= size:
                self._gaps[index : index + 1] = (
                    [(start + size, stop)] if stop - start > size else []
                )
                return start
        return None

    def mend(self, start: int, stop: int) -> None:
        """Free these bytes."""
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
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BurnishError(
            "the machine has no memory for what should leave the device",
            have=error,
            want=f"{size / 1e9:.2f} GB more for one process",
            do="set batch.tokens_per_device lower, or do without engine.activation_offload, "
            "engine.optimizer_offload or engine.park; without these, start fewer processes on a machine",
        ) from error
