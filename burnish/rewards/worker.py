"""The process that runs the user's reward functions: `python -m burnish.rewards.worker FD PARENT`.

It imports the functions' modules and nothing heavy, reports their signatures over the inherited connection FD, and makes calls
until the connection closes. Calls of one async function come together and wait beside each other; others come alone. Async calls
are cancelled here at their deadline. For any other late call the parent kills this process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from burnish.errors import BurnishError
from burnish.functions import load_function
from burnish.rewards.call import Answer, call, call_async
from burnish.rewards.load import BUILTINS, Style, read_signature

Asked = tuple[int, Mapping[str, Any], int]
"""A call: its ticket, its keyword arguments, and how many rollouts it is about."""

Said = list[Answer] | Literal["begun", "late"]
"""What is said of a ticket: of an async function's call that it has begun, and maybe that it missed its deadline; of any its answers."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How calls are made."""

    concurrency: int
    """Calls of an async function under way at one time."""
    timeout: float
    """Deadline of each call in seconds, from when it begins."""


def main(descriptor: int, parent: int) -> None:
    """Serve calls that come over the connection `descriptor` until it closes or the process `parent` is gone."""
    os.set_inheritable(
        descriptor, False
    )  # a program started by a reward function must not hold it open
    threading.Thread(target=_exit_without, args=(parent,), daemon=True).start()
    with Connection(descriptor) as connection, asyncio.Runner() as runner:
        try:
            named, pace = connection.recv()
            functions = [load_function(name, "reward.functions", BUILTINS) for name, _ in named]
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
                index, asked = connection.recv()
            except (EOFError, ConnectionError):
                return
            function, style = functions[index], signatures[index].style
            if signatures[index].is_async:
                runner.run(_beside_each_other(function, style, asked, pace, connection))
                continue
            for ticket, arguments, count in asked:
                connection.send((ticket, call(function, style, arguments, count, runner)))


async def _beside_each_other(
    function: Callable[..., Any],
    style: Style,
    asked: Sequence[Asked],
    pace: Pace,
    connection: Connection[Any, Any],
) -> None:
    """Run calls beside each other; a late one gives its place to the next, even if it resists cancelling."""
    places = asyncio.Semaphore(pace.concurrency)

    async def answer(ticket: int, arguments: Mapping[str, Any], count: int) -> None:
        async with places:
            connection.send((ticket, "begun"))
            task = asyncio.create_task(call_async(function, style, arguments, count))
            done, _ = await asyncio.wait([task], timeout=pace.timeout)
            task.cancel()
            connection.send((ticket, task.result() if done else "late"))

    await asyncio.gather(*(answer(*each) for each in asked))


def _exit_without(parent: int) -> None:
    """End this process when its parent has died, also in the middle of a call."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
