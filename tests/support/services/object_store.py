"""An object store on loopback: a module that runs as a process of its own, behind a proxy that can break it.

What is stored lies in that process's memory. It ends when its standard input is closed, which the end
of the test's process does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from support.ranks.fork_server import TESTS, with_given_path
from support.services.fault_proxy import FaultProxy


@contextmanager
def behind_proxy(module: str) -> Iterator[FaultProxy]:
    """A proxy before the store that the program `module` serves, both running inside the block."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module],
        env=os.environ | {"PYTHONPATH": with_given_path(TESTS, TESTS.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = int(process.stdout.readline())
        with FaultProxy("127.0.0.1", port) as proxy:
            yield proxy
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def serve(port: int) -> None:
    """What the program does once its store listens at the port: tell it, and end when nobody asks any more."""
    print(port, flush=True)
    sys.stdin.read()
    os._exit(0)
