"""Pass weights to a generator on this machine through memory that both processes map. Only their places go over the socket.

Two buffers take turns: the sender fills one while the receiver reads the other. Host memory is a file without a name, which the
receiver opens by the sender's process id. So the system frees it however the processes end. If the receiver uses the sender's CUDA
device, or one that reads its memory, it is memory of this device (CUDA IPC).
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burnish.boxes.box import Box
from burnish.boxes.plan import ALIGN
from burnish.boxes.shards import Shard, TensorSpec
from burnish.distributed.device import synchronize
from burnish.rollout import messages

log = logging.getLogger("burnish")

# Most and least bytes of a buffer, and into how many buffers a small model is divided, so that both sides work at once.
_MOST_BYTES = 256 << 20
_LEAST_BYTES = 1 << 16
_DIVISIONS = 8
_FILE = "burnish-weights"
# Bytes before the buffers, for the number that shows a receiver that it reads the sender's memory.
_HEAD_BYTES = 4096
_PROOF_BYTES = 16


def is_here(connection: socket.socket) -> bool:
    """Return whether a connection may lead to this machine: both ends have one address."""
    return bool(connection.getsockname()[0] == connection.getpeername()[0])


class Staging:
    """Two buffers of a sender, which any number of receivers read."""

    def __init__(self, weight_bytes: int, device: torch.device) -> None:
        """Make buffers for a model of so many bytes. Raises `OSError` or `RuntimeError` if it cannot."""
        size = min(_MOST_BYTES, max(_LEAST_BYTES, weight_bytes // _DIVISIONS))
        self._size = -(-size // ALIGN) * ALIGN
        self.device = device
        """Where the buffers are."""
        on_host = device.type == "cpu"
        file = os.memfd_create(_FILE)
        self.close: Callable[[], object] = weakref.finalize(self, os.close, file)
        """Free the memory, once no receiver maps it."""
        length = _HEAD_BYTES + on_host * 2 * self._size
        os.ftruncate(file, length)
        memory = _mapped_file(os.getpid(), file, length)
        proof = torch.frombuffer(bytearray(secrets.token_bytes(_PROOF_BYTES)), dtype=torch.uint8)
        memory[:_PROOF_BYTES] = proof
        self.offer: dict[str, Any] = {"process": os.getpid(), "file": file, "bytes": length}
        """What a receiver needs to map the memory."""
        self.offer["proof"] = proof.tolist()
        if not on_host:
            memory = torch.empty(_HEAD_BYTES + 2 * self._size, dtype=torch.uint8, device=device)
            memory[:_PROOF_BYTES] = proof
            synchronize(device)
            self.offer["device"] = _device_memory(memory)
        self._memory = memory[_HEAD_BYTES:]
        self.handed_over = self._memory[:0]
        """The bytes of the buffer that `turn` has last told of."""
        self._turn = 0
        self._used = 0
        self._rows: list[list[Any]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been written to the current buffer."""
        return not self._rows

    def parts(self, piece: Shard) -> Iterator[Shard]:
        """Yield parts of a piece that each fit into a buffer."""
        for box in _halved(piece.box, self._size // piece.spec.dtype.itemsize):
            yield Shard(piece.spec, box, piece.part(box))

    def has_room(self, part: Shard) -> bool:
        """Return whether the current buffer has room for a part."""
        return self._used + part.box.elements * part.spec.dtype.itemsize <= self._size

    def write(self, part: Shard) -> None:
        """Copy a part into the current buffer."""
        spec = part.spec
        place = self._turn * self._size + self._used
        _view(self._memory, place, spec.dtype, part.box).copy_(part.tensor)
        self._used += -(-part.box.elements * spec.dtype.itemsize // ALIGN) * ALIGN
        dtype = str(spec.dtype).removeprefix("torch.")
        self._rows.append([spec.name, spec.shape, dtype, part.box.offsets, part.box.sizes, place])

    def turn(self) -> messages.Parts:
        """Return a message with the places of what the current buffer holds, and turn to the other one."""
        if self._memory.device.type != "cpu":
            # Not the whole device: a broadcast to a process that has died would never end.
            torch.accelerator.current_stream(self._memory.device).synchronize()
        begin = self._turn * self._size
        self.handed_over = self._memory[begin : begin + self._used]
        message = messages.encode({"wave": self._rows, "span": [begin, self._used]})
        self._rows = []
        self._used = 0
        self._turn = 1 - self._turn
        return message


def make_stagings(specs: Sequence[TensorSpec], device: torch.device | None) -> list[Staging]:
    """Return memory to offer for the weights of an engine on `device`: that of a CUDA device, then that of the host.

    Warns of memory that this process cannot make. Not for systems without `memfd_create`.
    """
    weight_bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
    stagings = list[Staging]()
    places = [device] if device is not None and device.type == "cuda" else []
    for place in [*places, torch.device("cpu")] if hasattr(os, "memfd_create") else ():
        try:
            stagings.append(Staging(weight_bytes, place))
        except (OSError, RuntimeError) as error:
            log.warning("no memory of %s to pass weights through: %s", place.type, error)
    return stagings


class MappedStaging:
    """A sender's buffers in a process of the receiver."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def read(self, rows: Sequence[Sequence[Any]], begin: int, size: int) -> Iterator[Shard]:
        """Yield the pieces of a wave, views that are valid until the next piece. Raises `NONSENSE`."""
        yield from pieces(self._memory[begin : begin + size], rows, begin)
        synchronize(self._memory.device)

    def close(self) -> None:
        """Unmap the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8)


def pieces(memory: Tensor, rows: Sequence[Sequence[Any]], begin: int) -> Iterator[Shard]:
    """Yield the pieces of a wave whose bytes from `begin` on lie in `memory`, as views. Raises `NONSENSE`."""
    for name, shape, dtype_name, offsets, sizes, place in rows:
        dtype = getattr(torch, dtype_name)
        box = Box(tuple(offsets), tuple(sizes))
        spec = TensorSpec(name, tuple(shape), dtype)
        yield Shard(spec, box, _view(memory, place - begin, dtype, box))


def first_mapped(
    offers: Sequence[Mapping[str, Any]], device: torch.device, *, peers: bool = False
) -> tuple[int, Tensor] | None:
    """Return the index and memory of the first offer that this process can map.

    It takes host memory of this machine, and memory of `device`. With `peers`, it also takes memory of devices that this process sees and
    `device` reads. Raises `NONSENSE`.
    """
    for number, offer in enumerate(offers):
        memory = _mapped(offer, device, peers)
        if memory is not None:
            return number, memory
    return None


def _mapped(offer: Mapping[str, Any], device: torch.device, peers: bool) -> Tensor | None:
    process, file, length = (int(offer[name]) for name in ("process", "file", "bytes"))
    path = f"/proc/{process}/fd/{file}"
    try:
        # Another machine or container may have such a process and file.
        if not os.readlink(path).startswith(f"/memfd:{_FILE}") or os.stat(path).st_size != length:
            return None
        memory = _mapped_file(process, file, length)
        if memory[:_PROOF_BYTES].tolist() != offer["proof"]:
            return None
        if "device" in offer:
            index = _index_to_map(offer["device"]["uuid"], device, peers)
            if index is None:
                return None
            memory = _mapped_device(offer["device"], index)
            # By way of `device`, as weights go: the memory may be another device's.
            if memory[:_PROOF_BYTES].to(device).tolist() != offer["proof"]:
                return None
        return memory[_HEAD_BYTES:]
    except (OSError, RuntimeError):
        return None


def _mapped_file(process: int, file: int, length: int) -> Tensor:
    path = f"/proc/{process}/fd/{file}"
    return torch.from_file(path, shared=True, size=length, dtype=torch.uint8)


def _device_memory(memory: Tensor) -> dict[str, Any]:
    """Return the handle of CUDA memory, as `torch.multiprocessing` sends it, and its device."""
    storage: Any = memory.untyped_storage()
    _, *parts = storage._share_cuda_()
    handle = [part.hex() if isinstance(part, bytes) else part for part in parts]
    return {"uuid": uuid_of(memory.device), "handle": handle}


def _index_to_map(uuid: str, device: torch.device, peers: bool) -> int | None:
    if device.type != "cuda":
        return None
    own = torch.cuda.current_device() if device.index is None else device.index
    uuids = [uuid_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    reads = partial(torch.cuda.can_device_access_peer, own)
    return index_of(uuid, uuids, own, reads if peers else lambda index: False)


def index_of(uuid: str, uuids: Sequence[str], own: int, reads: Callable[[int], bool]) -> int | None:
    """Return the index of the device with a name, if it is `own` or one whose memory that device `reads`."""
    if uuid not in uuids:
        return None
    index = uuids.index(uuid)
    return index if index == own or reads(index) else None


def _mapped_device(offer: Mapping[str, Any], index: int) -> Tensor:
    """Map memory of the device with an index in this process, where the sender may count otherwise."""
    handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in offer["handle"]]
    storage = torch.UntypedStorage._new_shared_cuda(index, *handle)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def uuid_of(device: torch.device) -> str:
    """Return the name of a CUDA device."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _view(memory: Tensor, place: int, dtype: torch.dtype, box: Box) -> Tensor:
    size = box.elements * dtype.itemsize
    return memory[place : place + size].view(dtype).view(box.sizes)


def _halved(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `most` elements."""
    if box.elements <= most:
        yield box
        return
    dim = next(number for number, size in enumerate(box.sizes) if size > 1)
    middle = box.sizes[dim] // 2
    for begin, size in ((0, middle), (middle, box.sizes[dim] - middle)):
        offsets = list(box.offsets)
        sizes = list(box.sizes)
        offsets[dim] += begin
        sizes[dim] = size
        yield from _halved(Box(tuple(offsets), tuple(sizes)), most)
