"""Run a function on several ranks over gloo, and bring back what each returned.

Ranks are forked from a server that has torch (and whatever heavy libraries the test run had loaded
by then) imported already, so a run of a few ranks costs tenths of a second. They find each other
through the store of this process, as under torchrun's agent.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from burnish.parallel.processes import process_group

_PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "transformers",
    "datasets",
    "burnish.parallel.processes",
)


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; holds the traceback of each failing rank."""

    def __init__(self, tracebacks: dict[int, str]) -> None:
        self.tracebacks = tracebacks
        super().__init__("\n".join(f"rank {r}:\n{text}" for r, text in tracebacks.items()))


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120) -> list[Any]:
    """`fn(layout, *args)` in `world` processes; the results by rank.

    `fn` is a function at the top level of its module; arguments and results are pickled. Raises
    `RankFailed` with the first failing rank's traceback first. `timeout`, in seconds, bounds the run.
    """
    store = dist.TCPStore(
        "127.0.0.1", 0, world, True, timedelta(seconds=timeout), wait_for_workers=False
    )
    source = (fn.__module__, sys.modules[fn.__module__].__file__, fn.__qualname__)
    payload = pickle.dumps(args)
    processes, pipes = [], []
    for rank in range(world):
        pipe, theirs = multiprocessing.Pipe(duplex=False)
        environ = _environ(rank, world, store.port)
        process = _context().Process(
            target=_run_rank, args=(theirs, environ, source, payload, timeout), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(pipe)
    try:
        return _collect(pipes, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in _PRELOAD if name in sys.modules])
    return context


def _environ(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            failures |= dict.fromkeys(waiting.values(), f"did not end within {timeout} s")
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, "died without a word"
            (results if ok else failures)[rank] = value
        if failures:
            deadline = min(deadline, time.monotonic() + 30)
    if failures:
        raise RankFailed(failures)
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    pipe: Connection,
    environ: dict[str, str],
    source: tuple[str, str, str],
    payload: bytes,
    timeout: float,
) -> None:
    """What a rank does: join the group, find the function, run it, send what came of it."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(timeout * 0.9)
    try:
        fn = _load(*source)
        with process_group(torch.device("cpu"), timeout) as layout:
            result = fn(layout, *pickle.loads(payload))  # noqa: S301 - from the parent
        answer = pickle.dumps((True, result))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(answer)


def _load(module: str, path: str, qualname: str) -> Callable[..., Any]:
    """The function, from its file: pytest's importlib mode gives modules names that cannot be imported."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)
    return getattr(sys.modules[module], qualname)
