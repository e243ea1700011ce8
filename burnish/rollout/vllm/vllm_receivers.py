"""Weights that vLLM's own processes receive themselves, each a whole copy by one broadcast (`burnish.rollout.weight_group`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from burnish.boxes.shards import Shard
from burnish.rollout.staging import pieces, uuid_of
from burnish.rollout.weight_group import FAILURES, GroupMember


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
        return list(self._call(_uuid))

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

    member: GroupMember | None = None
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
        worker.burnish_received = _Received()
    found: _Received = worker.burnish_received
    return found


def _uuid(worker: Any) -> str:
    return uuid_of(worker.device)


def _join(worker: Any, invitation: Mapping[str, Any], address: str, timeout: float) -> str:
    """Join a group; return why this process cannot, or nothing."""
    _leave(worker)
    device = worker.device if worker.device.type == "cuda" else torch.device("cpu")
    try:
        _of(worker).member = GroupMember(
            invitation, 1 + worker.rank, device, address, address, timeout
        )
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _receive(worker: Any, rows: Sequence[Sequence[Any]], begin: int, size: int) -> str:
    """Receive a broadcast's pieces; return why this process cannot, or nothing."""
    here = _of(worker)
    try:
        if here.member is None:
            raise ValueError("the group has ended")
        for shard in here.member.read(rows, begin, size):
            spec = shard.spec
            if spec.name not in here.tensors:
                room = torch.empty(spec.shape, dtype=spec.dtype, device=shard.tensor.device)
                here.tensors[spec.name] = room
            here.tensors[spec.name][shard.box.slices].copy_(shard.tensor)
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _leave(worker: Any) -> None:
    here = _of(worker)
    here.tensors.clear()
    if here.member is not None:
        here.member.leave()
        here.member = None
