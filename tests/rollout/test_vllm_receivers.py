"""Weights to all processes of one generator: each maps the sender's memory, or all take another way. Processes stand for vLLM's."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models.servers import (
    TOKEN,
    VOCABULARY,
    feeding,
    mappings,
    serving,
    staged,
)
from support.nightly import by_day
from support.ranks.fork_server import Forked
from support.ranks.waiting import until_stopped

from burnish.boxes.shards import Publication, Shard
from burnish.distributed.layout import Layout
from burnish.rollout.client import ServedGenerator, Server
from burnish.rollout.staging import Staging
from burnish.rollout.vllm.vllm_receivers import VllmReceivers, forget_received, received
from burnish.rollout.weight_group import OwnProcess

CPU = torch.device("cpu")
# The number of the descriptor of calls in a worker.
CALLS = 40
COUNT = 12


def work(pipe: Connection, rank: int) -> None:
    """Answer calls as a process of vLLM does."""
    calls = Connection(CALLS)
    worker = SimpleNamespace(rank=rank, device=CPU)
    while True:
        function, arguments = pickle.loads(calls.recv_bytes())  # noqa: S301 - written by a test
        try:
            answer = function(worker, *arguments)
        except Exception as error:
            answer = RuntimeError(repr(error))
        calls.send_bytes(pickle.dumps(answer))


class Workers:
    """A generator whose weights only its processes have."""

    def __init__(self, count: int) -> None:
        self._calls: list[Connection] = []
        self.processes: list[Forked] = []
        for rank in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                process = Forked(work, rank, descriptors={CALLS: theirs.fileno()})
            self._calls.append(Connection(ours.detach()))
            self.processes.append(process)
        self.receivers = VllmReceivers(self.call, CPU, count)
        self.got: list[list[tuple[str, set[float]]]] = []
        """What each process has got last."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in each process. As vLLM does, end all if one has died."""
        try:
            for calls in self._calls:
                calls.send_bytes(pickle.dumps((function, arguments)))
            encoded = [calls.recv_bytes() for calls in self._calls]
        except (OSError, EOFError):
            self.close()
            raise RuntimeError("a process has died") from None
        answers = [pickle.loads(each) for each in encoded]  # noqa: S301 - written by a test
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def load_weights(self, weights: Publication, version: int) -> None:
        self.call(forget_received)
        self.got = [[] for _ in self.processes]
        for shard in weights.changing:
            for number, got in enumerate(self.call(take, shard.spec.name, shard.tensor)):
                self.got[number].append(got)

    def close(self) -> None:
        for process in self.processes:
            process.kill()


def take(worker: Any, name: str, tensor: torch.Tensor) -> tuple[str, set[float]]:
    [(name, tensor)] = received(worker, [(name, tensor)])
    return name, set(tensor.tolist())


def before_a_piece(worker: Any, rank: int, do: Callable[[int], None]) -> None:
    """Have one process do something before it reads a piece, given the piece's number."""
    plain_read = OwnProcess.read
    count = 0

    def read(process: OwnProcess, *wave: Any) -> Iterator[Any]:
        nonlocal count
        for piece in plain_read(process, *wave):
            count += 1
            do(count)
            yield piece

    if worker.rank == rank:
        OwnProcess.read = read  # type: ignore[method-assign]


def dawdle(number: int) -> None:
    time.sleep(0.005)


def die(number: int) -> None:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)


def hang(number: int) -> None:
    if number == 5:
        os.kill(os.getpid(), signal.SIGSTOP)


def fail(number: int) -> None:
    if number == 5:
        raise ValueError("no room for w5")


def cannot_map(worker: Any, rank: int, file: int) -> None:
    """Have one process map a file of the sender no more, or none if it is 0."""
    plain_map = OwnProcess.map

    def map_others(process: OwnProcess, offers: Any) -> int | None:
        if any(offer["file"] == (file or offer["file"]) for offer in offers):
            process.unmap()
            return None
        return plain_map(process, offers)

    if worker.rank == rank:
        OwnProcess.map = map_others  # type: ignore[method-assign]


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2)
    yield made
    made.close()


def sent(version: int) -> list[list[tuple[str, set[float]]]]:
    return [[(f"w{n}", {1000.0 * version + n}) for n in range(COUNT)]] * 2


def inode_of(generator: ServedGenerator) -> int:
    [staging] = generator._stagings or []
    return os.fstat(staging.offer["file"]).st_ino


def mapped_by(workers: Workers, generator: ServedGenerator) -> list[int]:
    inode = inode_of(generator)
    return [mappings(inode, process.pid) for process in workers.processes]


@pytest.mark.parametrize("slow", by_day([0, 1], [1]))
def test_each_process_reads_each_version_whole_from_the_senders_memory(
    workers: Workers, slow: int
) -> None:
    """One is slow, so a buffer that is written before all have read it shows."""
    workers.call(before_a_piece, slow, dawdle)
    with serving(workers) as server:
        generator = feeding(server, staged(COUNT, 0))
        for version in (1, 2, 3):
            generator.load_weights(Publication(staged(COUNT, version)), version)
            assert workers.got == sent(version)
            assert server.about()["version"] == version
            assert server._way == "shared memory (cpu)"
            assert mapped_by(workers, generator) == [0, 0]
        generator.close()


def test_the_first_memory_that_all_can_map_is_taken_by_all(workers: Workers) -> None:
    stagings = [Staging(1, CPU) for _ in range(3)]
    offers = [staging.offer for staging in stagings]
    inodes = [os.fstat(offer["file"]).st_ino for offer in offers]
    pids = [process.pid for process in workers.processes]
    workers.call(cannot_map, 1, offers[0]["file"])
    assert workers.receivers.map(offers) == 1
    assert [[mappings(inode, pid) for inode in inodes] for pid in pids] == [[0, 1, 0]] * 2
    workers.receivers.unmap()
    assert workers.receivers.map(offers[:1]) is None
    assert not any(mappings(inode, pid) for inode in inodes for pid in pids)


@pytest.mark.parametrize("rank", by_day([0, 1], [1]))
def test_all_are_sent_a_broadcast_if_one_cannot_map(workers: Workers, rank: int) -> None:
    workers.call(cannot_map, rank, 0)
    with serving(workers) as server:
        generator = feeding(server, staged(COUNT, 0))
        for version in (1, 2):
            generator.load_weights(Publication(staged(COUNT, version)), version)
            assert workers.got == sent(version)
            assert (server._way, generator._lost) == ("gloo", {})
            assert mapped_by(workers, generator) == [0, 0]
        generator.close()


@pytest.mark.parametrize("how", by_day([die, hang, fail], [die, fail]))
def test_a_process_that_ends_in_the_middle_loses_its_generator_alone(
    how: Callable[[int], None],
) -> None:
    """There is no version, and all unmap the memory. One that only fails takes the next weights."""
    with ExitStack() as stack:
        ending, others = (Workers(2) for _ in range(2))
        stack.callback(others.close)
        first = stack.enter_context(serving(ending))
        stack.callback(ending.close)  # before its server ends, which waits for a process that hangs
        second = stack.enter_context(serving(others))
        ending.call(before_a_piece, 1, how)
        first.timeout = 2.0 if how is hang else 30.0
        specs = [shard.spec for shard in staged(COUNT, 0)]
        url, replacement = first.url, lambda lost, others: {url: (url, TOKEN) for url in lost}
        generator = ServedGenerator([first, second], specs, Layout(), revive=replacement)
        generator.load_weights(Publication(staged(COUNT, 1)), 1)
        assert [*generator._lost] == [first]
        assert others.got == sent(1)
        first.timeout = 30.0
        if how is hang:
            until_stopped(ending.processes[1].pid)
            ending.processes[1].send(signal.SIGCONT)
        else:
            assert Server(url, TOKEN, 30.0, VOCABULARY).about()["version"] is None
            assert mapped_by(others, generator) == [0, 0]
        if how is fail:
            assert mapped_by(ending, generator) == [0, 0]
        if how is not die:
            generator.load_weights(Publication(staged(COUNT, 2)), 2)
            assert ending.got == others.got == sent(2)
            assert {server._way for server in generator._servers} == {"shared memory (cpu)"}


def send_and_wait(pipe: Connection, url: str) -> None:
    """Send weights, and stop in the middle of the next ones."""
    generator = feeding(Server(url, TOKEN, 60.0, VOCABULARY), staged(COUNT, 0))
    generator.load_weights(Publication(staged(COUNT, 1)), 1)
    plain_write = Staging.write

    def write(staging: Staging, part: Shard) -> None:
        if part.spec.name == "w8":
            pipe.send(inode_of(generator))
            time.sleep(60)
        plain_write(staging, part)

    Staging.write = write  # type: ignore[method-assign]
    generator.load_weights(Publication(staged(COUNT, 2)), 2)


def test_a_sender_that_is_killed_leaves_neither_a_version_nor_memory(workers: Workers) -> None:
    pids = [process.pid for process in workers.processes]
    with serving(workers) as server:
        sender = Forked(send_and_wait, server.url)
        try:
            inode = sender.recv()
            assert server.about()["version"] is None
        finally:
            sender.kill()
        deadline = time.monotonic() + 20
        while any(mappings(inode, pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.about()["version"] is None
        got = workers.got[0]
        assert workers.got == [got, got]
        assert got == sent(2)[0][: len(got)]
        assert 0 < len(got) < COUNT
        generator = feeding(server, staged(COUNT, 0))
        generator.load_weights(Publication(staged(COUNT, 3)), 3)
        assert server.about()["version"] == 3
        assert workers.got == sent(3)
