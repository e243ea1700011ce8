"""Run commands of Burnish one after the other, in a process of their own that may have a pretended device."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.ranks.fork_server import TESTS


def start(
    root: Path,
    name: str,
    commands: Mapping[str, Sequence[str]],
    site: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that runs all `commands` in `root`, each with its output in a file; on the device installed in `site`, if any."""
    path = os.pathsep.join(map(str, [TESTS, TESTS.parent, *([site] if site else [])]))
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    own = {"PYTHONPATH": path, **alone, **(environ or {})}
    asked = root / f"{name}.json"
    asked.write_text(json.dumps(dict(commands)))
    program = [sys.executable, "-m", "support.pretend.commands", asked.name]
    with (root / f"{name}.txt").open("ab") as log:
        return subprocess.Popen(program, cwd=root, env=os.environ | own, stdout=log, stderr=log)


def output(root: Path, command: str) -> str:
    """What a command has written."""
    return (root / f"{command}.output").read_text()


def exit_code(root: Path, command: str) -> int | None:
    """A command's exit code; None if its process ended before it."""
    path = root / f"{command}.code"
    return int(path.read_text()) if path.exists() else None


def _run(asked: Path) -> None:
    from burnish.cli.main import main

    for name, argv in json.loads(asked.read_text()).items():
        with (
            Path(f"{name}.output").open("w") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            code = main(argv)
        Path(f"{name}.code").write_text(str(code))


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
