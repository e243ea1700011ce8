"""A block in memory, between the ranks' tensors and a file.

It is made of pieces: those of tensors that lie somewhere as they lie in the file, and a buffer for
all the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

DIRECT_BYTES = 64 << 10
"""Smaller pieces are copied into the buffer: a system call costs more."""


class BlockMemory:
    """One block in memory: a part of a buffer, in which tensors that lie elsewhere take the place of its bytes."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._direct: list[tuple[int, Tensor]] = []

    def part(self, start: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer's bytes from `start` on as a tensor."""
        count = torch.Size(sizes).numel() * dtype.itemsize
        return self._buffer[start : start + count].view(dtype).view(sizes)

    def put(self, start: int, tensor: Tensor) -> None:
        """Have the elements of a contiguous tensor at `start`, where they lie."""
        self._direct.append((start, tensor))

    def pieces(self) -> Iterator[memoryview]:
        """The block's bytes from the first to the last."""
        at = 0
        for start, tensor in sorted(self._direct, key=lambda each: each[0]):
            if start > at:
                yield as_bytes(self._buffer[at:start])
            yield as_bytes(tensor)
            at = start + tensor.nbytes
        if at < self._buffer.numel():
            yield as_bytes(self._buffer[at:])


def buffers(sizes: Iterable[int], memory: Tensor) -> list[BlockMemory]:
    """Blocks of these sizes in a memory that has room for them, each at a multiple of 64 bytes."""
    found, start = [], 0
    for size in sizes:
        found.append(BlockMemory(memory[start : start + size]))
        start += -(-size // 64) * 64
    return found


def is_plain(tensor: Tensor) -> bool:
    """Whether its elements lie in this machine's memory as they would in a file, and are worth a system call."""
    on_cpu = tensor.device.type == "cpu"
    return on_cpu and tensor.is_contiguous() and tensor.nbytes >= DIRECT_BYTES


def as_bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
