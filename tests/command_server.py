"""A process that has the library imported and forks one that runs a `burnish` command for every connection.

The client sends one line of JSON and reads two lines: the process's id, and its exit code. The server
is given a socket that listens already, so who connects while it still imports is served afterwards. It
ends when its standard input is closed, which the end of the test run does.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import socket
import socketserver
import sys
import threading
from typing import Any

import audit
from huggingface_hub import constants

from burnish.distributed import device
from burnish.view import report

PRELOAD = (
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "datasets.io.json",
    "peft",
    "transformers.models.qwen3.modeling_qwen3",
    "burnish.checkpoint.destinations.run_mirror",
    "burnish.checkpoint.subprocess",
    "burnish.cli.main",
    "burnish.cli.run",
    "burnish.engines.megatron.megatron_engine",
    "burnish.models.lora.experts",
    "burnish.train.rl",
    "burnish.train.sft",
    "burnish.train.evaluate",
    "burnish.tracking.console",
    "burnish.view.report",
    "burnish.tracking.rollouts",
    "warmed",
)


class Handler(socketserver.StreamRequestHandler):
    """Runs in a fork of its own, which is the parent of the command's process and waits for it."""

    def handle(self) -> None:
        request = json.loads(self.rfile.readline())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if pid == 0:
            self.connection.close()
            code = 1
            try:
                code = run(request)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        self.wfile.write(f"{pid}\n".encode())
        self.wfile.flush()
        _, status = os.waitpid(pid, 0)
        self.wfile.write(f"{os.waitstatus_to_exitcode(status)}\n".encode())


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """One fork per connection, as many at a time as are asked for."""

    max_children = 1000
    block_on_close = False


def run(request: dict[str, Any]) -> int:
    """Be the command, in its directory, with its output in a file."""
    os.chdir(request["root"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["environ"])
    sys.path[:0] = filter(None, request["environ"].get("PYTHONPATH", "").split(os.pathsep))
    if "HF_HOME" in request["environ"]:
        importlib.reload(constants)  # as if huggingface_hub were imported only now
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    if request["at"]:
        signal_at(*request["at"])
    if request["audit"]:
        audit.install(*request["audit"])
    from burnish.cli.main import main

    return main(request["argv"])


def signal_at(place: str, nth: int, number: int) -> None:
    """Send this process a signal when it calls the place for the nth time."""
    module, _, path = place.partition(":")
    *parents, name = path.split(".")
    holder: Any = importlib.import_module(module)
    for parent in parents:
        holder = getattr(holder, parent)
    called, calls = getattr(holder, name), [0]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            os.kill(os.getpid(), number)
        return called(*args, **kwargs)

    setattr(holder, name, wrapper)


def serve(listening: socket.socket) -> None:
    """Import, and serve who connects, until standard input is closed."""
    for name in PRELOAD:
        importlib.import_module(name)
    report._page()  # reads it, once
    device._MEASURE_SECONDS = 0.0  # a run measures its processor, which no run of a test is about
    with Server(listening.getsockname(), Handler, bind_and_activate=False) as server:
        server.socket.close()
        server.socket = listening

        def watch() -> None:
            sys.stdin.read()
            os._exit(0)

        threading.Thread(target=watch, daemon=True).start()
        server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
