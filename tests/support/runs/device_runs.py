"""Commands that may use a GPU: each is a process of its own from the start, since a GPU must not be touched before a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from support.ranks.fork_server import TESTS, with_given_path

SECONDS = 500
"""What only a run that hangs takes."""
PROGRAM = """\
import sys
from support.runs.forked_command import signal_at
from burnish.cli.main import main
signal_at(*{at})
sys.exit(main(sys.argv[1:]))
"""


def start_run(
    root: Path,
    name: str,
    device: torch.device,
    argv: Sequence[str],
    at: tuple[str, int, int, float] | None = None,
) -> subprocess.Popen[bytes]:
    """`burnish` with `argv` in `root`, its output in a file of this name; `at` is as in `support.runs.forked_command.signal_at`."""
    program = (
        ["-m", "burnish"] if at is None else ["-c", PROGRAM.format(at=(*at[:2], int(at[2]), at[3]))]
    )
    modules = with_given_path(TESTS.parent, TESTS)
    hidden = {} if device.type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    with (root / f"{name}.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *program, *argv],
            cwd=root,
            env=os.environ | {"PYTHONPATH": modules, "OMP_NUM_THREADS": "1"} | hidden,
            stdout=log,
            stderr=log,
        )


def finish_run(process: subprocess.Popen[bytes], root: Path, name: str, code: int = 0) -> None:
    """Wait for its end. One that hangs shows what it wrote, too."""
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        assert process.poll() == code, (root / f"{name}.txt").read_text()
    finally:
        process.kill()
        process.wait()
