"""The time until `burnish view` shows runs and rollouts, and the time and memory of its index.

Makes 200,000 rollouts of 500 tokens in 200 steps and a run of 3,000 steps, starts the command and sends it requests over HTTP.
With `--steps 10000`, links to the rollout files make 10,000 steps of the 200: 10 million rollouts.

    python -m bench.view [--rounds 5] [--steps 200] [--directory DIR] [--json]
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode, urlsplit

from bench.machine import Result, command_line, report
from bench.view_runs import make_run
from burnish.tracking.rollouts import rollouts_path
from burnish.view.index import NEWEST_STEPS

_TICKS = os.sysconf("SC_CLK_TCK")
_STEPS = 200
_PROMPTS = 125
_SAMPLES = 8
_TOKENS = 500
_QUERIES: dict[str, dict[str, Any]] = {
    "page by reward": {"sort": "-reward"},
    "page of one source and a reward": {"source": "source-2", "min_reward": 1.05},
    "page of one prompt's answers": {"prompt": 77, "sort": "step"},
    "page of a rare length and reward": {"min_length": 650, "max_reward": 0.005},
}


class Viewer:
    """A running `burnish view`."""

    def __init__(self, process: subprocess.Popen[str], begun: float) -> None:
        assert process.stdout is not None
        self.process = process
        self.begun = begun
        self._port = urlsplit(process.stdout.readline().strip()).port or 0

    def get(self, path: str, **values: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("GET", f"/api/{path}?{urlencode(values)}")
        reply = connection.getresponse()
        body = reply.read()
        connection.close()
        if reply.status != 200:
            raise RuntimeError(body.decode())
        return json.loads(body)

    def used(self) -> float:
        """Return the processor time that the process has used, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def megabytes(self) -> float:
        """Return the process's peak memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1e3


@contextmanager
def viewer(root: Path) -> Iterator[Viewer]:
    """Start the command; stop it at the end."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "burnish", "view", str(root), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield Viewer(process, begun)
        process.send_signal(signal.SIGINT)


def main() -> None:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--directory", type=Path, help="keeps the runs for another time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.directory or Path(folder)
        make(root, arguments.steps)
        report(measured(root, arguments.steps, arguments.rounds), arguments.json)


def make(root: Path, steps: int) -> None:
    """Make the runs that do not exist."""
    if not (root / "long").exists():
        make_run(root / "long", steps=3000)
    if not (root / "rollouts").exists():
        sizes = {"prompts": _PROMPTS, "samples": _SAMPLES, "tokens": _TOKENS}
        make_run(root / "rollouts", steps=_STEPS, **sizes)
    for step in range(_STEPS + 1, steps + 1):
        for rest in (False, True):
            path = rollouts_path(root / "rollouts" / "rollouts", step, rest=rest)
            if not path.exists():
                path.hardlink_to(rollouts_path(path.parent, step % _STEPS + 1, rest=rest))


def measured(root: Path, steps: int, rounds: int) -> list[Result]:
    """Start the viewer, and time its answers before and after it has indexed the newest steps."""
    run = "rollouts"
    rows = steps * _PROMPTS * _SAMPLES
    indexed = min(steps, NEWEST_STEPS) * _PROMPTS * _SAMPLES
    firsts: dict[str, list[tuple[float, float]]] = {}

    def first(name: str, found: Viewer, begun: float, used: float) -> None:
        took = time.perf_counter() - begun, found.used() - used
        firsts.setdefault(name, []).append(took)

    for _ in range(rounds):
        with viewer(root) as found:
            found.get("runs")
            first("list of runs, from the command on", found, found.begun, 0.0)
            begun = time.perf_counter()
            used = found.used()
            found.get("metrics", run="long", names="reward/mean,actor/entropy")
            first("curves of 3,000 steps", found, begun, used)
            begun = time.perf_counter()
            used = found.used()
            found.get("rollouts", run=run)
            first("first page of rollouts, without an index", found, begun, used)
    with viewer(root) as found:
        begun = time.perf_counter()
        used = found.used()
        while found.get("facets", run=run)["indexed"] < 1:
            time.sleep(1.0)
        first(f"index of {indexed:,} rollouts", found, begun, used)
        for _ in range(rounds):
            for name, values in _QUERIES.items():
                begun = time.perf_counter()
                used = found.used()
                found.get("rollouts", run=run, **values)
                first(name, found, begun, used)
        used = found.used()
        cursor = ""
        while cursor is not None:
            cursor = found.get("rollouts", run=run, text="is nowhere", cursor=cursor)["next"]
        searched = rows / max(found.used() - used, 1 / _TICKS)
        memory = found.megabytes()
    files = sum(path.stat().st_size for path in (root / run / "rollouts").glob("*.gz")) / 1e6
    results = []
    for name, each in firsts.items():
        wall, processor = (median(values) for values in zip(*each, strict=True))
        results.append(_result(name, wall, None if "index of" in name else 1.0))
        results.append(_result(f"{name}: processor time", processor, None))
    return [
        *results,
        _result("rollouts searched for a text in a second of processor time", searched, None, ""),
        _result("memory", memory, None, "MB"),
        _result("files", files, None, "MB"),
    ]


def _result(name: str, value: float, goal: float | None, unit: str = "s") -> Result:
    return Result(name, value, None, goal, unit, goal / value if goal else 1.0, 1.0)


if __name__ == "__main__":
    main()
