"""Ranks that fail, die, hang or are impersonated; with threads where that will do, else processes."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import stat
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks.ports import free_port
from support.ranks.processes import RankFailed, run_processes, run_ranks, torchrun_environ

from burnish.distributed import failure_watch as watch
from burnish.distributed.failure_watch import FailureWatch
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.errors import BurnishError, StoppedError

LONG = 60
"""Seconds: what nobody waits for unless a death went unnoticed."""


@pytest.fixture
def pair():
    store = dist.HashStore()
    watches = [FailureWatch(Layout(rank, 2, rank, 2), "", store) for rank in range(2)]
    yield store, *watches
    for each in reversed(watches):
        each.leave()


def test_all_is_well(pair):
    _, first, second = pair
    second.leave()
    first.leave()
    assert first.failure(0) is None
    assert second.failure(0) is None


@pytest.mark.parametrize("failing", [0, 1])
def test_a_reason_reaches_the_others_and_not_oneself(pair, failing):
    watches = pair[1:]
    watches[failing].report(BurnishError("out of paper"))
    failure = watches[1 - failing].failure(5)
    assert (failure.rank, failure.pid, failure.reason) == (failing, os.getpid(), "out of paper")
    error = failure.error(7, "train.step (line 3)")
    assert str(error).startswith(
        f"rank {failing} (host {socket.gethostname()}, pid {os.getpid()}) "
    )
    assert "rank 7 was in train.step (line 3)\n  have: out of paper" in str(error)
    assert watches[failing].failure(0) is None


def test_only_the_first_failure_is_told():
    store = dist.HashStore()
    watches = [FailureWatch(Layout(rank, 3, rank, 3), "", store) for rank in range(3)]
    watches[2].report(BurnishError("the cause"))
    assert watches[1].failure(5).rank == 2
    watches[1].report(BurnishError("a consequence"))
    assert watches[0].failure(5).rank == 2
    for each in reversed(watches):
        each.leave()


def test_a_connection_that_closes_without_a_word_is_a_death(pair):
    _, first, second = pair
    second._socket.shutdown(socket.SHUT_RDWR)
    failure = first.failure(5)
    assert (failure.rank, failure.reason) == (1, "")
    assert "rank 1 " in str(failure.error(0, "nothing"))


@pytest.mark.parametrize(
    "sent",
    [
        b'{"token": "guess", "rank": 0, "host": "h", "pid": 1}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"",
    ],
)
def test_strangers_are_not_heard(pair, sent):
    _, first, second = pair
    with socket.create_connection((first._contact["address"], first._contact["port"])) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    assert first.failure(0.1) is None
    second.report(BurnishError("heard"))
    assert first.failure(5).reason == "heard"


def test_a_relay_out_of_reach_is_an_error_that_names_it():
    store = dist.HashStore()
    port = free_port()
    store.set(
        "watch", f'{{"address": "127.0.0.1", "port": {port}, "host": "h", "pid": 1, "token": "t"}}'
    )
    with pytest.raises(BurnishError, match=rf"rank 1 .*rank 0\n.*{port}"):
        FailureWatch(Layout(1, 2, 1, 2), "", store)


def _all_reduce_until(layout, step, act):
    ones = torch.ones(4)
    for i in range(10**9):
        if layout.rank == 1 and i == step:
            act()
        dist.all_reduce(ones)


def _killed(layout):
    _all_reduce_until(layout, 50, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _raises(layout):
    def act():
        raise KeyError("no such column")

    _all_reduce_until(layout, 50, act)


def _refused(layout):
    def act():
        raise BurnishError("the data are empty", do="add some")

    _all_reduce_until(layout, 50, act)


def _failures(fn, world):
    """By rank. `run_ranks` gives the others seconds to end after the first."""
    with pytest.raises(RankFailed) as raised:
        run_ranks(fn, world)
    return raised.value.failures


def test_a_killed_rank_is_named_by_all_others_within_seconds():
    failures = _failures(_killed, 3)
    for rank in (0, 2):
        assert f"BurnishError: rank 1 (host {socket.gethostname()}, pid " in failures[rank]
        assert (
            f" rank {rank} was in tests.distributed.test_failure_watch._all_reduce"
            in failures[rank]
        )


def test_rank_0_is_noticed_as_well():
    failures = _failures(_rank_0_killed, 3)
    for rank in (1, 2):
        assert "BurnishError: rank 0 (host" in failures[rank]
        assert f" rank {rank} was in" in failures[rank]


def _rank_0_killed(layout):
    if layout.rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("fn", "cause"),
    [
        (_raises, "have: KeyError: 'no such column'"),
        (_refused, "have: the data are empty\n  do:   add some"),
    ],
)
def test_the_error_of_a_rank_is_told_to_the_others(fn, cause):
    failures = _failures(fn, 3)
    for rank in (0, 2):
        assert "BurnishError: rank 1 (host" in failures[rank]
        assert f" rank {rank} was in" in failures[rank]
        assert cause in failures[rank]
    assert "BurnishError: rank 1" not in failures[1]


def _shorten_grace(stderr_path):
    os.dup2(os.open(stderr_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    watch._GRACE_SECONDS = 1.0


def _close_pipes():
    for fd in range(3, 1024):
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.close(fd)


def _child_holds_the_connection(layout, stderr_path):
    _shorten_grace(stderr_path)
    if layout.rank == 1 and os.fork() == 0:
        _close_pipes()  # through which run_ranks would wait for this child
        time.sleep(2 * LONG)
        os._exit(0)
    if layout.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG)


@pytest.mark.nightly
def test_forked_children_do_not_keep_a_dead_rank_alive(tmp_path):
    """The other rank is not in a collective and does not stop by itself: its process is ended."""
    with pytest.raises(RankFailed) as raised:
        run_ranks(_child_holds_the_connection, 2, tmp_path / "stderr")
    assert raised.value.failures[0] == "died without a word"
    printed = (tmp_path / "stderr").read_text()
    assert "burnish: rank 1 (host" in printed
    assert (
        " rank 0 was in tests.distributed.test_failure_watch._child_holds_the_connection" in printed
    )
    assert "most recent call first" in printed


def test_a_dropped_connection_to_the_relay_is_made_again():
    dropped = struct.pack("ii", 1, 0)  # SO_LINGER, so that close resets the connection
    with socket.create_server(("localhost", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(LONG)
        made = pool.submit(watch.introduced, listener.getsockname()[:2], {"rank": 7})
        first, _ = listener.accept()
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, dropped)
        first.close()
        listener.accept()[0].close()
        third, _ = listener.accept()
        with third, third.makefile() as lines:
            assert json.loads(lines.readline()) == {"rank": 7}
            third.sendall(b'\n{"done": true}\n')
            with made.result(LONG) as connection, connection.makefile() as told:
                assert json.loads(told.readline()) == {"done": True}


def _more_ranks_than_descriptors():
    warned = threading.Semaphore(0)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.release()
    logging.getLogger(watch.__name__).addHandler(handler)
    store = dist.HashStore()
    first = FailureWatch(Layout(0, 3, 0, 3), "", store)
    while not first._relay._ranks:
        time.sleep(0.01)
    contact = json.loads(store.get("watch"))
    address = (contact["address"], contact["port"])
    line = socket.socket(socket.getaddrinfo(*address)[0][0])
    highest = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
    holes = []
    with suppress(OSError):
        while True:
            holes.append(os.open("/dev/null", os.O_RDONLY))
    line.connect(address)
    assert warned.acquire(timeout=LONG)
    assert first._relay.is_alive()
    again = warned.acquire(timeout=0.3)  # a relay that spins warns thousands of times a second
    for hole in holes:
        os.close(hole)
    me = {"token": contact["token"], "rank": 1, "host": "here", "pid": 1}
    line.sendall(json.dumps(me).encode() + b"\n" + b'{"reason": "heard", "lines": []}\n')
    reason = first.failure(LONG).reason
    return again, reason


def test_a_relay_without_descriptors_waits_until_there_are_some():
    assert run_processes(_more_ranks_than_descriptors, [{}]) == [(False, "heard")]


def test_an_orderly_stop_is_not_a_failure(pair):
    _, first, second = pair
    stopped = StoppedError("asked to", signal_number=15)
    with pytest.raises(StoppedError), second.naming_failures():
        raise stopped
    second.leave()
    assert first.failure(0.3) is None


def _hangs_after_its_own_error(layout, stderr_path):
    _shorten_grace(stderr_path)
    with (
        suppress(ValueError),
        FailureWatch(Layout(0, 2, 0, 2), "", dist.HashStore()).naming_failures(),
    ):
        raise ValueError("boom")
    time.sleep(LONG)  # as the end of a group does whose peers are in a collective


def test_a_rank_that_hangs_after_its_own_error_is_ended(tmp_path):
    with pytest.raises(RankFailed, match="died without a word"):
        run_ranks(_hangs_after_its_own_error, 1, tmp_path / "stderr")
    said = (tmp_path / "stderr").read_text()
    assert "have: ValueError: boom" in said
    assert "Traceback" in said
    assert "in _hangs_after_its_own_error" in said


def _meets_too_few(stderr_path):
    _shorten_grace(stderr_path)
    if os.environ["RANK"] == "2":
        signal.alarm(1)  # which kills it where it waits
    with process_group(torch.device("cpu"), 60):
        pass


def test_a_rank_that_is_killed_while_others_are_awaited_ends_the_run(tmp_path):
    """Rank 1 never comes. Without a launcher, rank 0 would wait for it until the time-out."""
    store = dist.TCPStore("127.0.0.1", 0, 3, True, timedelta(seconds=60), wait_for_workers=False)
    environs = [torchrun_environ(rank, 3, store.port) for rank in (0, 2)]
    with pytest.raises(RankFailed) as raised:
        run_processes(_meets_too_few, environs, tmp_path / "stderr")
    assert raised.value.failures == dict.fromkeys((0, 1), "died without a word")
    assert "burnish: rank 2 (host" in (tmp_path / "stderr").read_text()
