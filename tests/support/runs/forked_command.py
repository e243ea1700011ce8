"""For `training_files.Command`: what the forked process does, which is to be the command."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from huggingface_hub import constants

from burnish.distributed import device
from support.faults import audit


def run(
    pipe: Connection,
    argv: Sequence[str],
    root: str,
    log: str,
    environ: Mapping[str, str],
    at: tuple[str, int, int, float] | None,
    audited: tuple[str, str] | None,
) -> None:
    """Be the command, in its directory, with its output in a file; `environ` has what differs from that of the tests."""
    os.chdir(root)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path[:0] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    if "HF_HOME" in environ:
        importlib.reload(constants)  # as if huggingface_hub were imported only now
    device._MATMUL_SIZES = (8,)  # a run measures its processor, which no run of a test is about
    faulthandler.enable()
    if at:
        signal_at(*at)
    if audited:
        audit.install(*audited)
    from burnish.cli.main import main

    code = 1
    try:
        code = main(argv)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def signal_at(place: str, nth: int, number: int, seconds: float) -> None:
    """Send this process a signal when it calls the place for the nth time, or some seconds later."""
    module, _, path = place.partition(":")
    *parents, name = path.split(".")
    holder: Any = importlib.import_module(module)
    for parent in parents:
        holder = getattr(holder, parent)
    called, calls = getattr(holder, name), [0]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth and seconds:
            threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
        elif calls[0] == nth:
            os.kill(os.getpid(), number)
        return called(*args, **kwargs)

    setattr(holder, name, wrapper)
