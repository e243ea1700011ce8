"""Run a function on several ranks over gloo, and bring back what each returned.

Processes are forked from a server that has imported what takes seconds, so a run of a few ranks costs
tenths of a second. Ranks find each other through the store of this process, as under torchrun's agent.
"""

from __future__ import annotations

import faulthandler
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from burnish.distributed.processes import process_group
from support.ranks.fork_server import Call, Forked

PATIENCE_SECONDS = 500.0
"""How long processes may take where nothing else is said: less than pytest gives a test, so that their stacks are seen."""
# How long the others may still take after one process has failed.
_STRAGGLER_SECONDS = 15.0


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time."""

    def __init__(self, failures: dict[int, str], results: dict[int, Any]) -> None:
        self.failures = failures
        """By rank, in the order of their ends: the traceback, or how it ended."""
        self.results = results
        """By rank, what the others returned."""
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = PATIENCE_SECONDS
) -> list[Any]:
    """`fn(layout, *args)` in `world` processes that form one process group; the results by rank.

    `fn` is a function at the top level of its module; arguments and results are pickled. Raises
    `RankFailed` with the traceback of every rank that failed. `timeout`, in seconds, bounds the run.
    """
    patience = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", 0, world, True, patience, wait_for_workers=False)
    environs = [torchrun_environ(rank, world, store.port) for rank in range(world)]
    return run_processes(_in_group, environs, Call.of(fn, *args), timeout, timeout=timeout)


def run_processes(
    fn: Callable[..., Any],
    environs: Sequence[Mapping[str, str]],
    *args: Any,
    timeout: float = PATIENCE_SECONDS,
) -> list[Any]:
    """`fn(*args)` in one process per environment, without a process group; the results in order."""
    processes = [
        Forked(_answer, Call.of(fn, *args), timeout, environ=environ) for environ in environs
    ]
    try:
        return _collect(processes, timeout)
    finally:
        for process in processes:
            process.kill()


def torchrun_environ(rank: int, world: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """What torchrun tells a rank on one machine, its agent serving the store at the port."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _collect(processes: list[Forked], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {process: rank for rank, process in enumerate(processes)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            failures |= dict.fromkeys(waiting.values(), "did not end in time")
            break
        for process in ready:
            rank = waiting.pop(process)
            try:
                ok, value = process.recv()
            except EOFError:
                ok, value = False, "died without a word"
            (results if ok else failures)[rank] = value
        if failures:
            deadline = min(deadline, time.monotonic() + _STRAGGLER_SECONDS)
    if failures:
        raise RankFailed(failures, results)
    return [results[rank] for rank in range(len(processes))]


def _answer(pipe: Connection, call: Call, timeout: float) -> None:
    """What a process does: find the function, call it, send what came of it."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(timeout * 0.9)
    try:
        answer = pickle.dumps((True, call()))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(answer)


def _in_group(call: Call, timeout: float) -> Any:
    with process_group(torch.device("cpu"), timeout) as layout:
        return call(layout)
