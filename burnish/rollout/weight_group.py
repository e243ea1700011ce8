"""Broadcast weights to the processes of a server: by NCCL between CUDA devices, by gloo through host memory.

A group has one rank of training, which sends, and all processes of one server that hold a part of its model. So a process
that dies or hangs concerns its server alone. Messages over HTTP say what a broadcast holds, as they do for memory that both
processes map (`burnish.rollout.staging`).

    sender: {offers, group: ID, joins, nccl}
    server: {mapped: N, group: {id, …}}      an offer's number, whose buffers are broadcast; an id that is new is an invitation
    sender: {why}                            only after an invitation: why it could not join, or nothing
    server: {mapped, group: {id} or null}    only after an invitation: null if one of the two could not join
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, BinaryIO, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from burnish.boxes.shards import Shard
from burnish.distributed.device import synchronize
from burnish.rollout import messages
from burnish.rollout.staging import MappedStaging, first_mapped, pieces, uuid_of

# Most seconds for a group to connect.
_CONNECT_SECONDS = 30.0
# Seconds between looks at a broadcast, and at the store for a sender that is gone.
_PAUSE_SECONDS = 0.0005
_LOOK_SECONDS = 0.1
_GONE = "gone"
_ID_BYTES = 16

FAILURES = (OSError, *messages.NONSENSE)
"""What joining and reading raise. torch's own errors are `RuntimeError`."""


class Broadcaster(Protocol):
    """Processes that get what rank 0 sends."""

    def broadcast(self, buffer: Tensor) -> Callable[[], bool]:
        """Begin to broadcast rank 0's bytes. Return a function that tells whether they are through, or raises `RuntimeError`."""

    def abort(self) -> None:
        """End the group, from any thread, without the others."""


class _GlooGroup:
    """Goes through host memory, over the network interface with an address."""

    def __init__(
        self, store: Any, rank: int, size: int, address: str, connect: float, timeout: float
    ) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=connect)
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        self._group._set_default_timeout(timedelta(seconds=timeout))
        self._works: list[Any] = []

    def broadcast(self, buffer: Tensor) -> Callable[[], bool]:
        work = self._group.broadcast(buffer, 0)
        self._works = [each for each in self._works if not each.is_completed()] + [work]

        def is_through() -> bool:
            if not work.is_completed():
                return False
            work.wait()  # raises its error
            return True

        return is_through

    def abort(self) -> None:
        self._group.abort()
        rest = [self._group, self._works]
        is_idle = all(work.is_completed() for work in self._works)
        del self._group
        self._works = []
        if is_idle:
            rest.clear()
        else:
            # torch's destructor waits for broadcasts that nobody receives, as long as their time-out. Python has to wait for the
            # thread when it exits: it would end a daemon's by an exception that C++ does not let through.
            threading.Thread(target=rest.clear, daemon=False).start()


class GroupMember:
    """This process's part in a group."""

    def __init__(
        self,
        invitation: Mapping[str, Any],
        rank: int,
        device: torch.device,
        host: str,
        own_address: str,
        timeout: float,
    ) -> None:
        """Join as `rank`, 0 to send, with memory of `device`.

        `host` has the invitation's store, and `own_address` is an interface's. Broadcasts end within `timeout` seconds. Raises `FAILURES`.
        """
        self.id = str(invitation["id"])
        self.kind = str(invitation["kind"])
        """NCCL or gloo."""
        self._device = device
        self._timeout = timeout
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._group: Broadcaster | None = None
        self._has_left = False
        self._leaving = threading.Lock()
        self._limit: threading.Timer | None = None
        connect = min(_CONNECT_SECONDS, timeout / 2)
        store = TCPStore(
            host,
            int(invitation["port"]),
            is_master=False,
            timeout=timedelta(seconds=connect),
            wait_for_workers=False,
        )
        self._store = PrefixStore(self.id, store)
        size = int(invitation["size"])
        try:
            if self.kind == "gloo":
                self._group = _GlooGroup(self._store, rank, size, own_address, connect, timeout)
                self._prove(rank, connect)
            else:
                self._join_nccl(rank, size, connect)
        except BaseException:
            self.leave()
            raise

    def _join_nccl(self, rank: int, size: int, connect: float) -> None:
        from burnish.distributed.nccl import Communicator, Nccl

        nccl = Nccl()
        if rank == 0:
            self._store.set("nccl", nccl.new_id().hex())
        unique = bytes.fromhex(self._store.get("nccl").decode())
        failures = list[Exception]()

        def join() -> None:
            try:
                with torch.cuda.device(self._device):
                    group = Communicator(nccl, unique, rank, size, self._device)
                    self._group = group
                    if self._has_left:
                        group.abort()
                    else:
                        self._prove(rank, connect)
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)

        # NCCL waits for others without a limit.
        work = threading.Thread(target=join, daemon=True)
        work.start()
        work.join(connect)
        if work.is_alive():
            raise TimeoutError(f"NCCL has not connected within {connect:g} s")
        if failures:
            raise failures[0]

    def _prove(self, rank: int, connect: float) -> None:
        """Broadcast the id, which also makes NCCL connect."""
        wanted = torch.frombuffer(bytearray.fromhex(self.id), dtype=torch.uint8)
        proof = wanted.to(self._device) if rank == 0 else torch.zeros_like(wanted).to(self._device)
        self._receive(proof, connect)
        if proof.tolist() != wanted.tolist():
            raise ValueError("another group has answered")

    def send(self, buffer: Tensor) -> None:
        """Begin to broadcast bytes, which must stay as they are until all have been read. Raises `FAILURES`.

        The group ends if nobody calls `acknowledge` in time, even if this thread waits for the device.
        """
        if not len(buffer):
            return
        if self._limit is None:
            self._begin_limit()
        self._open_group().broadcast(buffer)

    def acknowledge(self, unread: int = 0) -> None:
        """Take note that others have read a broadcast, and that they have not read so many yet."""
        limit, self._limit = self._limit, None
        if limit is not None:
            limit.cancel()
        if unread:
            self._begin_limit()

    def _begin_limit(self) -> None:
        self._limit = threading.Timer(self._timeout, self.leave)
        self._limit.daemon = True
        self._limit.start()

    def read(self, rows: Sequence[Sequence[Any]], begin: int, size: int) -> Iterator[Shard]:
        """Receive a broadcast and yield its pieces, views that are valid until the next piece. Raises `FAILURES`."""
        if len(self._buffer) < size:
            self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            self._receive(self._buffer[:size], self._timeout)
        yield from pieces(self._buffer, rows, begin)
        synchronize(self._device)

    def _receive(self, buffer: Tensor, timeout: float) -> None:
        is_through = self._open_group().broadcast(buffer)
        now = time.monotonic()
        deadline = now + timeout
        look = now + _LOOK_SECONDS
        while not is_through():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"no weights within {timeout:g} s")
            if now > look:
                look = now + _LOOK_SECONDS
                if self._store.check([_GONE]):
                    raise ValueError("the sender is gone")
            time.sleep(_PAUSE_SECONDS)

    def _open_group(self) -> Broadcaster:
        if self._group is None:
            raise ValueError("the group has ended")
        return self._group

    def leave(self) -> None:
        """End the group, from any thread."""
        self._has_left = True
        with self._leaving:  # the limit's thread may call it too, and a group ends once
            group, self._group = self._group, None
        self.acknowledge()
        if group is not None:
            group.abort()


class Receivers(Protocol):
    """The processes that hold a generator's model."""

    device: torch.device
    """The kind of memory that weights arrive in."""
    count: int

    def uuids(self) -> list[str]:
        """Return the names of their CUDA devices."""

    def map(self, offers: Sequence[Mapping[str, Any]]) -> int | None:
        """Map the first of a sender's offers that all processes can map. Return its number. Raises `NONSENSE`."""

    def unmap(self) -> None:
        """Unmap the memory. Never raises."""

    def join(self, invitation: Mapping[str, Any], address: str, timeout: float) -> None:
        """Join a group as ranks 1 and up. `address` is this machine's. Raises `FAILURES`."""

    def read(self, rows: Sequence[Sequence[Any]], begin: int, size: int) -> Iterator[Shard]:
        """Yield the pieces of a wave, from mapped memory if there is some, else from a broadcast. Raises `FAILURES`.

        They may be without elements (on the meta device) if other processes have those. At the end, all processes have read them.
        """

    def leave(self) -> None:
        """End the group."""


class OwnProcess:
    """Receives in this process, as `rank` of groups."""

    count = 1

    def __init__(self, device: torch.device, rank: int = 1, *, peers: bool = False) -> None:
        """With `peers` it maps memory of other devices too."""
        self.device = device if device.type == "cuda" else torch.device("cpu")
        self._rank = rank
        self._peers = peers
        self._mapped: MappedStaging | None = None
        self._member: GroupMember | None = None

    def uuids(self) -> list[str]:
        """See `Receivers.uuids`."""
        return [uuid_of(self.device)]

    def map(self, offers: Sequence[Mapping[str, Any]]) -> int | None:
        """See `Receivers.map`."""
        self.unmap()
        mapped = first_mapped(offers, self.device, peers=self._peers)
        if mapped is None:
            return None
        number, memory = mapped
        self._mapped = MappedStaging(memory)
        return number

    def unmap(self) -> None:
        """See `Receivers.unmap`."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def join(self, invitation: Mapping[str, Any], address: str, timeout: float) -> None:
        """See `Receivers.join`."""
        self._member = GroupMember(invitation, self._rank, self.device, address, address, timeout)

    def read(self, rows: Sequence[Sequence[Any]], begin: int, size: int) -> Iterator[Shard]:
        """See `Receivers.read`."""
        source = self._mapped or self._member
        if source is None:
            raise ValueError("the group has ended")
        yield from source.read(rows, begin, size)

    def leave(self) -> None:
        """See `Receivers.leave`."""
        if self._member is not None:
            self._member.leave()
            self._member = None


class GroupHost:
    """A server's part: it invites a sender, and opens the store in which all meet."""

    def __init__(self, receivers: Receivers, timeout: float) -> None:
        self._receivers = receivers
        self._timeout = timeout
        self._id = ""
        self._store: Any = None

    def prefers(self, offer: Mapping[str, Any]) -> bool:
        """Return whether mapped memory is better than a group: memory of the kind that the receivers need."""
        return ("device" in offer) == self._on_cuda

    @property
    def _on_cuda(self) -> bool:
        return self._receivers.device.type == "cuda"

    def invite(self, fields: Mapping[str, Any], address: str) -> tuple[int, dict[str, Any]]:
        """Return the number of the offer whose buffers are to be broadcast, and an invitation to the new or old group.

        `fields` are the sender's message, and `address` is the one at which it has found this machine. Raises `FAILURES`.
        """
        fitting = [
            n for n, offer in enumerate(fields["offers"]) if ("device" in offer) == self._on_cuda
        ]
        if not fitting:
            raise ValueError("training and generator do not both have weights on CUDA devices")
        if self._on_cuda:
            self._require_nccl(fields["offers"][fitting[0]]["device"]["uuid"], fields["nccl"])
        if not self._id or fields["group"] != self._id:
            self.leave()
            self._meet(address)
        invitation = {
            "id": self._id,
            "kind": "NCCL" if self._on_cuda else "gloo",
            "port": self._store.port,
            "size": 1 + self._receivers.count,
        }
        return fitting[0], invitation

    def _require_nccl(self, uuid: str, theirs: Mapping[str, Any] | None) -> None:
        from burnish.distributed.nccl import Nccl

        if uuid in self._receivers.uuids():
            raise ValueError("NCCL does not connect two processes on one device")
        ours = Nccl().facts()
        if theirs != ours:
            raise ValueError(f"NCCL needs equal versions and settings: {theirs} and {ours}")

    def _meet(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=min(_CONNECT_SECONDS, self._timeout)),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._id = secrets.token_hex(_ID_BYTES)

    def join(self, invitation: Mapping[str, Any], address: str, body: BinaryIO) -> str:
        """Join, and read whether the sender has joined. Return why one of the two has not, or nothing. Raises `NONSENSE`."""
        why = ""
        try:
            self._receivers.join(invitation, address, self._timeout)
        except FAILURES as error:
            why = f"{type(error).__name__}: {error}"
        message = messages.read_message(body)
        if message is None:
            raise ValueError("the sender is gone")
        why = why or str(message.fields["why"])
        if why:
            self.leave()
        return why

    def give_up(self) -> None:
        """Have all receivers stop waiting, from any thread: the sender is gone."""
        store = self._store  # another thread may end the group
        if store is not None:
            PrefixStore(self._id, store).set(_GONE, "")

    @contextmanager
    def ended_by_failure(self) -> Iterator[None]:
        """End the group if the block raises."""
        try:
            yield
        except Exception:
            self.leave()
            raise

    def leave(self) -> None:
        """End the group."""
        self._id = ""
        self._receivers.leave()
        self._store = None


def nccl_facts(device: torch.device | None) -> dict[str, Any] | None:
    """Return what has to be equal in both processes, or None without NCCL."""
    if device is None or device.type != "cuda":
        return None
    from burnish.distributed.nccl import Nccl

    try:
        return Nccl().facts()
    except (OSError, RuntimeError, AttributeError):
        return None
