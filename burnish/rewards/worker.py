"""The process that runs the user's reward functions: `python -m burnish.rewards.worker FD PARENT STACK`.

It imports nothing heavy. It gets calls over the connection FD: those of async functions in bundles, others alone.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from burnish.distributed.parent_watch import exit_without
from burnish.errors import BurnishError
from burnish.extend import REWARDS
from burnish.functions import load_function
from burnish.rewards.signature import (
    STACK_SIGNAL,
    Style,
    call,
    call_async,
    read_signature,
)

NumberedCall = tuple[int, Mapping[str, Any], int]
"""A call: its number, its keyword arguments, and how many rollouts it is about."""


def main(descriptor: int, parent: int, stack: int) -> None:
    """Report signatures, then serve calls until the connection closes or the process `parent` is gone.

    Sends None for an async call that missed its deadline. Exits with ENOMEM after a `MemoryError`: a fresh process has more memory.
    """
    # A program that a reward function starts must not hold the connection open.
    for inherited in (descriptor, stack):
        os.set_inheritable(inherited, False)
    faulthandler.register(STACK_SIGNAL, stack, all_threads=False)
    exit_without(parent)
    # The trainer may close the connection before an answer, and then nobody wants it.
    with (
        suppress(ConnectionError),
        Connection(descriptor) as connection,
        asyncio.Runner() as runner,
    ):
        try:
            named, concurrency, timeout, sys.argv, sys.path = connection.recv()
            functions = [load_function(name, "reward.functions", REWARDS) for name, _ in named]
            signatures = [
                read_signature(name, function, kwargs)
                for (name, kwargs), function in zip(named, functions, strict=True)
            ]
        except BurnishError as error:
            connection.send(error)
            return
        connection.send(signatures)
        while True:
            try:
                index, bundle = connection.recv()
            except EOFError:
                return
            function = functions[index]
            style = signatures[index].style
            if signatures[index].is_async:
                slots = asyncio.Semaphore(concurrency)
                runner.run(_concurrently(function, style, bundle, slots, timeout, connection))
                continue
            for number, arguments, count in bundle:
                try:
                    answers = call(function, style, arguments, count, runner)
                except MemoryError:
                    os._exit(errno.ENOMEM)
                if os.getppid() != parent:
                    os._exit(0)  # the function has forked, and returned in both processes
                connection.send((number, answers))


async def _concurrently(
    function: Callable[..., Any],
    style: Style,
    bundle: Sequence[NumberedCall],
    slots: asyncio.Semaphore,
    timeout: float,
    connection: Connection[Any, Any],
) -> None:
    """Make calls in order; a late one yields to the next, even if it resists cancelling."""

    async def answer(number: int, arguments: Mapping[str, Any], count: int) -> None:
        async with slots:
            task = asyncio.create_task(call_async(function, style, arguments, count))
            done, _ = await asyncio.wait([task], timeout=timeout)
            task.cancel()
            try:
                answers = task.result() if done else None
            except MemoryError:
                os._exit(errno.ENOMEM)
            connection.send((number, answers))

    await asyncio.gather(*(answer(*each) for each in bundle))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
