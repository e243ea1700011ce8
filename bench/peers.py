"""Peers: other trainers, each with its own environment and process, which take turns with ours.

A peer is a module of this folder that runs under the peer's Python. So it may import only the peer, the
standard library, and modules of this folder that import neither Burnish nor another peer.
Its process lives as long as the benchmark: imports and set-up happen once, before anything is timed.
A turn is a line of JSON to its stdin, the question, and one from its stdout, the answer. While one side
works, the other waits in a read, so each has the whole machine in its turn. Other output of the peer goes
to its log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Seconds of wall-clock time, or of processor time that this process has used."""
ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venv-peers"
PACKAGES = {
    "trl": ("torch==2.13.0", "trl==1.16.0", "transformers==5.19.0", "datasets", "accelerate"),
    "verl": ("torch==2.13.0", "verl==0.9.1"),
}
"""Packages to install for each peer; `bench/NAME-constraints.txt` pins the rest."""
_LOG_TAIL = 3000


def peer_python(name: str) -> Path:
    """Return our own interpreter if it can import the peer, else that of the peer's environment, which is made if missing."""
    if find_spec(name) is not None:
        return Path(sys.executable)
    directory = ENVIRONMENTS / name
    python = directory / "bin" / "python"
    ready = directory / ".installed"
    if not ready.exists():
        print(f"making {directory.relative_to(ROOT)} (once, some minutes)", file=sys.stderr)
        venv.create(directory, with_pip=True)
        pins = ROOT / "bench" / f"{name}-constraints.txt"
        install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(pins)]
        subprocess.run([*install, PACKAGES[name][0]], check=True)
        subprocess.run([*install, *PACKAGES[name]], check=True)
        ready.touch()
    return python


class Peer:
    """A peer's process, which answers one question at a time. Entering it as a context manager waits for its set-up."""

    def __init__(
        self, name: str | None, module: str, settings: dict[str, Any], threads: int
    ) -> None:
        """Start `module` under the Python of peer `name`, or our own; it gets `settings` as its first message."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed on exit)
        self._scratch = tempfile.TemporaryDirectory()  # for files that peers leave behind
        environment = os.environ | {
            "TMPDIR": self._scratch.name,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [str(peer_python(name)) if name else sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.send(settings)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send one question and wait for its answer. Raises `RuntimeError` with the end of the log if the peer died."""
        self.send(question)
        return self.receive()

    def send(self, question: dict[str, Any]) -> None:
        """Send one question."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `receive` reports it
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Return the answer to the oldest open question. Raises `RuntimeError` with the end of the log if the peer died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"the peer ended early:\n{self._log.read()[-_LOG_TAIL:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        try:
            self.receive()
        except RuntimeError:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the process's stdin, at which it ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
        self._scratch.cleanup()


class Turns:
    """The peer's side of the turns. Make it before anything else prints: it redirects all other output to stderr."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def next(self) -> dict[str, Any]:
        """Return the next question. Raises `SystemExit` at the end."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        question: dict[str, Any] = json.loads(line)
        return question

    def answer(self, **values: object) -> None:
        """Answer the latest question."""
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()
