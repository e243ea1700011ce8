"""Weights by broadcast: what arrives is what was sent, a process that dies or hangs concerns its server alone, and nobody waits for ever."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contracts.generator import assert_same, make_requests
from support.models.servers import (
    SAMPLING,
    TOKEN,
    VOCABULARY,
    Reader,
    alone,
    feeding,
    own,
    served,
    serving,
    staged,
)
from support.models.tiny import tiny_model
from support.nightly import by_day
from support.ranks.fork_server import Forked

from burnish.boxes.shards import Publication
from burnish.distributed.layout import Layout
from burnish.distributed.nccl import Communicator, Nccl
from burnish.errors import BurnishError
from burnish.models.names import model_shards
from burnish.rollout.client import ServedGenerator, Server
from burnish.rollout.weight_group import GroupHost, GroupMember, OwnProcess, _GlooGroup

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server maps the sender's memory, as on another machine."""
    monkeypatch.setattr(
        "burnish.rollout.weight_group.first_mapped", lambda offers, device, peers: None
    )
    monkeypatch.setattr("burnish.rollout.client.is_here", lambda connection: False)


def numbers(reader: Reader) -> list[float]:
    assert all(len(set(tensor.tolist())) == 1 for _, _, tensor in reader.got)
    return [float(tensor[0]) for _, _, tensor in reader.got]


def sent(count: int, version: int) -> list[float]:
    return [1000.0 * version + number for number in range(count)]


def test_each_version_arrives_whole_and_in_order_by_one_group() -> None:
    """The receiver is slow, so a buffer that is written too early shows."""
    reader = Reader(lambda number: time.sleep(0.002))
    with serving(reader) as server:
        generator = feeding(server, staged(12, 0))
        members = set()
        for version in (1, 2, 3):
            generator.load_weights(Publication(staged(12, version)), version)
            assert numbers(reader) == sent(12, version)
            assert server.about()["version"] == version
            members.add(server._member)
        assert len(members) == 1
        assert server._way == "gloo"
        generator.close()
        assert server._member is None


@pytest.mark.nightly
def test_completions_are_those_of_a_generator_inside() -> None:
    model = tiny_model()
    requests = make_requests()
    with serving(own(model)) as one, serving(own(model)) as two:
        generator = served([one, two], model)
        generator.load_weights(Publication(model_shards(model)), 1)
        assert_same(generator.generate(requests, SAMPLING), alone(requests))
        sums = [dict(server.checksums()) for server in (one, two)]
    assert sums[0] == sums[1] == {shard.spec: shard.checksum() for shard in model_shards(model)}
    assert one._way == two._way == "gloo"


@pytest.mark.parametrize("side", by_day(["sender", "receiver"], ["sender"]))
def test_a_group_that_does_not_connect_leaves_http_and_is_named_once(
    side: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError("no route")

    attempts = []
    plain_invite = GroupHost.invite

    def invite(host: GroupHost, *given: Any) -> Any:
        attempts.append(host)
        return plain_invite(host, *given)

    monkeypatch.setattr(GroupHost, "invite", invite)
    if side == "sender":
        monkeypatch.setattr("burnish.rollout.client.GroupMember", refuse)
    else:
        monkeypatch.setattr(OwnProcess, "join", refuse)
    # The other side waits for this one.
    monkeypatch.setattr("burnish.rollout.weight_group._CONNECT_SECONDS", 0.3)
    reader = Reader()
    with serving(reader) as server:
        generator = feeding(server, staged(12, 0))
        for version in (1, 2):
            generator.load_weights(Publication(staged(12, version)), version)
            assert numbers(reader) == sent(12, version)
        assert generator._lost == {}
        assert server._member is None
    [warning] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert server.url in warning.getMessage()
    assert len(attempts) == 1


def test_a_sender_that_goes_while_it_joins_leaves_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(BaseException):
        pass

    def go(*given: Any) -> None:
        raise Gone

    hosts: list[GroupHost] = []
    begin = GroupHost.__init__

    def noted(host: GroupHost, *given: Any) -> None:
        hosts.append(host)
        begin(host, *given)

    monkeypatch.setattr(GroupHost, "__init__", noted)
    monkeypatch.setattr("burnish.rollout.client.GroupMember", go)
    monkeypatch.setattr("burnish.rollout.weight_group._CONNECT_SECONDS", 0.3)
    with serving(Reader()) as server:
        generator = feeding(server, staged(12, 0))
        with pytest.raises(Gone):
            generator.load_weights(Publication(staged(12, 1)), 1)
        deadline = time.monotonic() + 10
        while hosts[0]._id:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.about()["version"] is None


def serve_until_killed(pipe: Connection, how: int) -> None:
    """Serve, and die or stand still in the middle of the weights."""

    def at(number: int) -> None:
        if number == 5:
            os.kill(os.getpid(), how)

    import burnish.rollout.weight_group as module

    module.first_mapped = lambda offers, device, peers: None
    with serving(Reader(at)) as server:
        pipe.send(server.url)
        threading.Event().wait(60)


@pytest.mark.parametrize("how", by_day([signal.SIGKILL, signal.SIGSTOP], [signal.SIGKILL]))
def test_a_receiver_that_dies_or_hangs_is_lost_and_others_get_all(how: int) -> None:
    reader = Reader()
    with ExitStack() as stack:
        ending = Forked(serve_until_killed, how)
        stack.callback(ending.kill)
        first = Server(ending.recv(), TOKEN, 0.6, VOCABULARY)
        second = stack.enter_context(serving(reader))
        specs = [shard.spec for shard in staged(12, 0)]
        generator = ServedGenerator([first, second], specs, Layout())
        began = time.monotonic()
        generator.load_weights(Publication(staged(12, 1)), 1)
        assert time.monotonic() - began < 10
        assert [*generator._lost] == [first]
        assert first._member is None
        assert numbers(reader) == sent(12, 1)
        kept = second._member
        generator.load_weights(Publication(staged(12, 2)), 2)
        assert numbers(reader) == sent(12, 2)
        assert second._member is kept is not None


def test_a_server_that_comes_back_joins_anew() -> None:
    """A piece that the generator refuses ends the group; a replacement at the same address gets a new one."""
    refuses = [True]

    def at(number: int) -> None:
        if number == 5 and refuses:
            refuses.clear()
            raise BurnishError("no room for w5")

    reader = Reader(at)
    with serving(reader) as server:
        generator = ServedGenerator(
            [server],
            [shard.spec for shard in staged(12, 0)],
            Layout(),
            revive=lambda lost, others: {url: (url, TOKEN) for url in lost},
        )
        generator.load_weights(Publication(staged(12, 1)), 1)
        assert "w5" in generator._lost[server]
        assert server._member is None
        assert server.about()["version"] is None
        generator.load_weights(Publication(staged(12, 2)), 2)
        [again] = generator._servers
        assert again._way == "gloo"
        assert again._member is not None
        assert numbers(reader) == sent(12, 2)
        assert again.about()["version"] == 2


@pytest.mark.nightly
def test_two_senders_take_turns() -> None:
    """A server has one group, that of its last sender."""
    reader = Reader()
    with serving(reader) as server:
        other = Server(server.url, TOKEN, 30.0, VOCABULARY)
        generators = [feeding(each, staged(12, 0)) for each in (server, other)]
        for version in (1, 2, 3, 4):
            generators[version % 2].load_weights(Publication(staged(12, version)), version)
            assert numbers(reader) == sent(12, version)
        assert server._way == other._way == "gloo"


def send_and_wait(pipe: Connection, url: str) -> None:
    """Send weights, and stop in the middle of the next ones, before a broadcast that the server waits for."""
    server = Server(url, TOKEN, 60.0, VOCABULARY)
    generator = feeding(server, staged(12, 0))
    generator.load_weights(Publication(staged(12, 1)), 1)
    sends = 0
    plain_send = GroupMember.send

    def send(member: GroupMember, buffer: torch.Tensor) -> None:
        nonlocal sends
        sends += 1
        if sends == 4:
            pipe.send(None)
            time.sleep(60)
        plain_send(member, buffer)

    GroupMember.send = send  # type: ignore[method-assign]
    generator.load_weights(Publication(staged(12, 2)), 2)


@pytest.mark.parametrize("noticed", by_day([True, False], [False]))
def test_a_sender_that_is_killed_leaves_no_version_and_the_next_one_joins(
    noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the group does not notice its death, as between devices of one machine."""
    plain_broadcast = _GlooGroup.broadcast

    def broadcast(group: _GlooGroup, buffer: torch.Tensor) -> Any:
        is_through = plain_broadcast(group, buffer)

        def noticed_by_nobody() -> bool:
            with suppress(RuntimeError):
                return is_through()
            return False

        return noticed_by_nobody

    if not noticed:
        monkeypatch.setattr(_GlooGroup, "broadcast", broadcast)
    reader = Reader()
    with serving(reader) as server:
        sender = Forked(send_and_wait, server.url)
        try:
            sender.recv()
            assert server.about()["version"] is None
        finally:
            sender.kill()
        generator = feeding(server, staged(12, 0))
        began = time.monotonic()
        generator.load_weights(Publication(staged(12, 3)), 3)
        assert time.monotonic() - began < 10  # the server did not wait for its own time-out
        assert server.about()["version"] == 3
        assert numbers(reader) == sent(12, 3)


class Deaf:
    """A group in which nothing ever arrives, as between devices when the other process is killed."""

    def __init__(self) -> None:
        self.aborts = 0

    def broadcast(self, buffer: torch.Tensor) -> Any:
        return lambda: False

    def abort(self) -> None:
        self.aborts += 1


def member_of(group: Deaf, store: Any, timeout: float) -> GroupMember:
    member = GroupMember.__new__(GroupMember)
    vars(member).update(
        id="", kind="", _device=CPU, _timeout=timeout, _buffer=torch.empty(0, dtype=torch.uint8),
        _group=group, _has_left=False, _limit=None, _store=store, _leaving=threading.Lock(),
    )  # fmt: skip
    return member


def test_a_receiver_waits_neither_for_ever_nor_for_a_sender_that_is_gone() -> None:
    known = SimpleNamespace(check=lambda keys: False)
    with pytest.raises(TimeoutError):
        next(member_of(Deaf(), known, 0.05).read([], 0, 1))
    known.check = lambda keys: True
    began = time.monotonic()
    with pytest.raises(ValueError, match="gone"):
        next(member_of(Deaf(), known, 60.0).read([], 0, 1))
    assert time.monotonic() - began < 10


def test_a_sender_that_gets_no_acknowledgement_ends_the_group_though_its_thread_is_stuck() -> None:
    deaf = Deaf()
    member = member_of(deaf, None, 0.1)
    member.send(torch.zeros(1, dtype=torch.uint8))
    member.acknowledge()
    time.sleep(0.2)
    assert not deaf.aborts
    member.send(torch.zeros(1, dtype=torch.uint8))
    member.send(torch.zeros(1, dtype=torch.uint8))
    member.acknowledge(1)
    deadline = time.monotonic() + 10
    while not deaf.aborts:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    member.leave()
    assert deaf.aborts == 1
    with pytest.raises(ValueError, match="ended"):
        member.send(torch.zeros(1, dtype=torch.uint8))


def test_two_threads_that_leave_end_the_group_once() -> None:
    """Each thread is slow between its look at the group and its change."""
    deaf = Deaf()
    member = member_of(deaf, None, 60.0)
    names = ("_group", "_limit")
    values = {name: vars(member).pop(name) for name in names}

    def slow(name: str) -> property:
        def read(_: GroupMember) -> Any:
            value = values[name]
            time.sleep(0.1)
            return value

        return property(read, lambda _, value: values.update({name: value}))

    member.__class__ = type("Slow", (GroupMember,), {name: slow(name) for name in names})
    member._limit = threading.Timer(60.0, member.leave)
    with ThreadPoolExecutor(2) as pool:
        for left in [pool.submit(member.leave) for _ in range(2)]:
            left.result()
    assert deaf.aborts == 1
    assert values == {"_group": None, "_limit": None}


class TestWhoJoins:
    """A server on CUDA invites only a sender that NCCL can connect with it."""

    OFFERS = ({"device": {"uuid": "GPU-1"}}, {})

    @pytest.fixture
    def host(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[GroupHost]:
        monkeypatch.setattr(Nccl, "__init__", lambda nccl: None)
        monkeypatch.setattr(Nccl, "facts", lambda nccl: {"NCCL": 22703})
        receivers: Any = OwnProcess(torch.device("cuda", 0))
        receivers.uuids = lambda: ["GPU-0"]
        host = GroupHost(receivers, 5.0)
        yield host
        host.leave()

    def fields(self, **changes: Any) -> dict[str, Any]:
        return {"offers": self.OFFERS, "group": "", "nccl": {"NCCL": 22703}, **changes}

    def test_a_device_of_its_own_and_the_same_nccl(self, host: GroupHost) -> None:
        number, invitation = host.invite(self.fields(), "127.0.0.1")
        assert (number, invitation["kind"], invitation["size"]) == (0, "NCCL", 2)
        _, again = host.invite(self.fields(group=invitation["id"]), "127.0.0.1")
        assert again == invitation
        _, other = host.invite(self.fields(group="forgotten"), "127.0.0.1")
        assert other["id"] != invitation["id"]

    @pytest.mark.parametrize(
        "changes",
        [
            {"offers": [{"device": {"uuid": "GPU-0"}}, {}]},
            {"offers": [{}]},
            {"nccl": {"NCCL": 22605}},
            {"nccl": {"NCCL": 22703, "NCCL_CUMEM_ENABLE": "0"}},
            {"nccl": None},
        ],
        ids=["same device", "sender on CPU", "other version", "other settings", "no NCCL"],
    )
    def test_others_are_not_invited(self, host: GroupHost, changes: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"NCCL|CUDA"):
            host.invite(self.fields(**changes), "127.0.0.1")

    def test_memory_that_is_mapped_is_preferred_where_its_own_process_needs_it(
        self, host: GroupHost
    ) -> None:
        assert [host.prefers(offer) for offer in self.OFFERS] == [True, False]
        on_host = GroupHost(OwnProcess(CPU), 5.0)
        assert [on_host.prefers(offer) for offer in self.OFFERS] == [False, True]


class Library:
    """NCCL's functions for one process, in host memory. It notes each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.results: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == "ncclGetErrorString":
                return b"remote process exited"
            self.calls.append((name, arguments))
            if name == "ncclGetVersion":
                arguments[0]._obj.value = 22703
            if name == "ncclGetUniqueId":
                ctypes.memset(arguments[0], 7, 128)
            return self.results.get(name, 0)

        self.__dict__[name] = call
        return call


def test_nccl_is_called_as_its_header_says(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=99, wait_stream=lambda other: None)
    event = SimpleNamespace(record=lambda stream: None, query=lambda: True)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: stream)
    monkeypatch.setattr("torch.cuda.Event", lambda: event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    monkeypatch.setattr("torch.cuda.device", lambda device: ExitStack())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    library = Library()
    nccl = Nccl(library)
    assert nccl.facts() == {"NCCL": 22703, "NCCL_CUMEM_ENABLE": "0"}
    unique = nccl.new_id()
    assert unique == bytes([7]) * 128
    communicator = Communicator(nccl, unique, 0, 3, CPU)
    name, (_, size, given, rank) = library.calls[-1]
    assert (name, size, bytes(given), rank) == ("ncclCommInitRank", 3, unique, 0)
    buffer = torch.zeros(5, dtype=torch.uint8)
    is_through = communicator.broadcast(buffer)
    name, (source, target, count, kind, root, _, on) = library.calls[-1]
    assert (name, source, target) == ("ncclBroadcast", buffer.data_ptr(), buffer.data_ptr())
    assert (count, kind, root, on) == (5, 1, 0, 99)
    assert is_through()
    library.results["ncclCommGetAsyncError"] = 6
    with pytest.raises(RuntimeError, match="remote process exited"):
        is_through()
    communicator.abort()
    communicator.abort()
    assert [name for name, _ in library.calls].count("ncclCommAbort") == 1
    with pytest.raises(RuntimeError, match="ended"):
        communicator.broadcast(buffer)
