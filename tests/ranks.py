"""Run a function on several ranks over gloo, and bring back what each returned.

Processes are forked from a server that has imported what takes seconds, so a run of a few ranks costs
tenths of a second. Ranks find each other through the store of this process, as under torchrun's agent.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burnish.distributed.processes import process_group

_PRELOADED = {"burnish", "datasets", "hypothesis", "peft", "pytest", "torch", "transformers"}
# Of these packages, ranks find imported what the test run had imported before the first of them.
PATIENCE_SECONDS = 500.0
"""How long processes may take where nothing else is said: less than pytest gives a test, so that their stacks are seen."""
_STRAGGLER_SECONDS = 15.0
# How long the others may still take after one process has failed.


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
    call = (_source(fn), pickle.dumps(args))
    return run_processes(_in_group, environs, call, timeout, timeout=timeout)


def run_processes(
    fn: Callable[..., Any],
    environs: Sequence[Mapping[str, str]],
    *args: Any,
    timeout: float = PATIENCE_SECONDS,
) -> list[Any]:
    """`fn(*args)` in one process per environment, without a process group; the results in order."""
    call = (_source(fn), pickle.dumps(args))
    processes, pipes = [], []
    for environ in environs:
        pipe, theirs = multiprocessing.Pipe(duplex=False)
        process = forkserver().Process(
            target=_answer, args=(theirs, dict(environ), call, timeout), daemon=False
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(pipe)
    try:
        return _collect(pipes, timeout)
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()


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


@cache
def forkserver() -> Any:
    """What forks processes that have torch. There is one in a test run, so whoever needs such a process takes this."""
    context = multiprocessing.get_context("forkserver")
    names = [name for name in sys.modules if name.partition(".")[0] in _PRELOADED]
    context.set_forkserver_preload([*names, "warmed"])
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # the server is not told where this process finds modules
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
    return context


def _source(fn: Callable[..., Any]) -> tuple[str, str, str]:
    return fn.__module__, sys.modules[fn.__module__].__file__, fn.__qualname__


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            failures |= dict.fromkeys(waiting.values(), "did not end in time")
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, "died without a word"
            (results if ok else failures)[rank] = value
        if failures:
            deadline = min(deadline, time.monotonic() + _STRAGGLER_SECONDS)
    if failures:
        raise RankFailed(failures, results)
    return [results[rank] for rank in range(len(pipes))]


def _answer(
    pipe: Connection,
    environ: dict[str, str],
    call: tuple[tuple[str, str, str], bytes],
    timeout: float,
) -> None:
    """What a process does: find the function, call it, send what came of it."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(timeout * 0.9)
    try:
        answer = pickle.dumps((True, _call(*call)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(answer)


def _in_group(call: tuple[tuple[str, str, str], bytes], timeout: float) -> Any:
    with process_group(torch.device("cpu"), timeout) as layout:
        return _call(*call, layout)


def _call(source: tuple[str, str, str], payload: bytes, *first: Any) -> Any:
    """Call the function, found by its file: pytest's importlib mode makes names that cannot be imported."""
    module, path, qualname = source
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)
    args = pickle.loads(payload)  # noqa: S301 - written by the parent process
    return getattr(sys.modules[module], qualname)(*first, *args)
