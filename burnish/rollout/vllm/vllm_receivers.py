"""Weights that vLLM's own processes receive themselves, each a whole copy: from memory that all map, or by one broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from burnish.boxes.shards import Shard
from burnish.rollout.staging import pieces
from burnish.rollout.weight_group import FAILURES, OwnProcess


class VllmReceivers:
    """The processes of a vLLM with tensor parallelism. This process gets only shapes."""

    def __init__(self, call: Callable[..., Any], device: torch.device, count: int) -> None:
        """`call` calls a function in each of the `count` processes and returns their results."""
        self.device = device if device.type == "cuda" else torch.device("cpu")
        self.count = count
        self._call = call
        self._joined = False

    def uuids(self) -> list[str]:
        """See `Receivers.uuids`."""
        return [uuid for uuids in self._call(_uuids) for uuid in uuids]

    def map(self, offers: Sequence[Mapping[str, Any]]) -> int | None:
        """See `Receivers.map`."""
        for number, offer in enumerate(offers):
            if all(self._call(_map, dict(offer))):
                return number
            self.unmap()
        return None

    def unmap(self) -> None:
        """See `Receivers.unmap`."""
        with suppress(Exception):  # vLLM has died
            self._call(_unmap)

    def join(self, invitation: Mapping[str, Any], address: str, timeout: float) -> None:
        """See `Receivers.join`."""
        self._joined = True
        self._succeed(self._call(_join, dict(invitation), address, timeout))

    def read(self, rows: Sequence[Sequence[Any]], begin: int, size: int) -> Iterator[Shard]:
        """See `Receivers.read`. The processes keep the pieces until `received` takes them."""
        self._succeed(self._call(_receive, rows, begin, size))
        yield from pieces(torch.empty(size, dtype=torch.uint8, device="meta"), rows, begin)

    def leave(self) -> None:
        """See `Receivers.leave`."""
        if self._joined:
            self._joined = False
            with suppress(Exception):  # vLLM has died
                self._call(_leave)

    def _succeed(self, results: Sequence[str]) -> None:
        for why in filter(None, results):
            raise ValueError(why)


@dataclass
class _Received:
    """What a process of vLLM has received."""

    process: OwnProcess
    tensors: dict[str, Tensor] = field(default_factory=dict)


def received(worker: Any, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Put the received elements into tensors without elements."""
    here = _of(worker).tensors
    return [
        (name, here.pop(name).to(tensor.dtype) if tensor.is_meta else tensor)
        for name, tensor in tensors
    ]


def forget_received(worker: Any) -> None:
    """Forget tensors of a load that failed."""
    _of(worker).tensors.clear()


def _of(worker: Any) -> _Received:
    if not hasattr(worker, "burnish_received"):
        # The sender's device is one process's own, and the others see it.
        process = OwnProcess(worker.device, 1 + worker.rank, peers=True)
        worker.burnish_received = _Received(process)
    found: _Received = worker.burnish_received
    return found


def _uuids(worker: Any) -> list[str]:
    return _of(worker).process.uuids()


def _map(worker: Any, offer: Mapping[str, Any]) -> bool:
    return _of(worker).process.map([offer]) is not None


def _unmap(worker: Any) -> None:
    _of(worker).process.unmap()


def _join(worker: Any, invitation: Mapping[str, Any], address: str, timeout: float) -> str:
    """Join a group; return why this process cannot, or nothing."""
    try:
        _of(worker).process.join(invitation, address, timeout)
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _receive(worker: Any, rows: Sequence[Sequence[Any]], begin: int, size: int) -> str:
    """Receive a wave's pieces; return why this process cannot, or nothing."""
    here = _of(worker)
    try:
        for shard in here.process.read(rows, begin, size):
            spec = shard.spec
            if spec.name not in here.tensors:
                # On its own device: the sender's has no room for every process's copy.
                device = here.process.device if shard.tensor.is_cuda else shard.tensor.device
                here.tensors[spec.name] = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            here.tensors[spec.name][shard.box.slices].copy_(shard.tensor)
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _leave(worker: Any) -> None:
    here = _of(worker)
    here.tensors.clear()
    here.process.leave()
