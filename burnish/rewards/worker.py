"""The process that runs reward functions which are not Burnish's own: `python -m burnish.rewards.worker FD PARENT`.

It imports the functions' modules and nothing heavy, says over the inherited connection FD how they want to be
called, and then answers calls one at a time until the connection closes. The process that started
it kills it when a call misses its deadline. Left out: everything else (`burnish.rewards.workers`).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from multiprocessing.connection import Connection

from burnish.errors import BurnishError
from burnish.rewards.call import call
from burnish.rewards.load import load_function, read_signature


def main(descriptor: int, parent: int) -> None:
    """Serve calls that come over the connection `descriptor` until it closes or the process `parent` is gone."""
    os.set_inheritable(
        descriptor, False
    )  # a program started by a reward function must not hold it open
    threading.Thread(target=_exit_without, args=(parent,), daemon=True).start()
    with Connection(descriptor) as connection, asyncio.Runner() as runner:
        try:
            named = connection.recv()
            functions = [load_function(name) for name, _ in named]
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
                index, arguments, count = connection.recv()
            except EOFError:
                return
            style = signatures[index].style
            connection.send(call(functions[index], style, arguments, count, runner))


def _exit_without(parent: int) -> None:
    """End this process when its parent has died, also in the middle of a call."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
