"""The cost of tracking: steps of the demo's task with all trackers and with none, in turns within one run.

    .venv-trackers/bin/python -m bench.tracking [--json] [--rounds N] [--clock wall|cpu]

"on": TensorBoard, W&B and SwanLab (offline), MLflow (a server on loopback), Trackio (local), rollout files, traces of the
rollouts that are kept longest and of 1 % of all, to files and to a collector on loopback, and log lines at the start of phases.
"off": the console and `metrics.jsonl`, which every run has. A round is ten steps of each side, after one round to warm up. The time
of "on" includes the time in which trackers process everything; in a run, they do this beside the next steps. `--clock cpu` counts
the processor time of the process with all its threads. Further lines show how much more processor time each thread takes with
tracking, and the training thread's calls of observers. These vary less between runs than the steps do. Left out: the report, which
takes at most 2 %, checkpoints and validation.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import yaml

import burnish.runs.run_observers
from bench.machine import Result, command_line, ratio, report
from bench.peers import CLOCKS, Clock
from burnish.api import run_method
from burnish.config.load import load_settings
from burnish.config.schema import TrackingConfig
from burnish.methods.table import METHODS
from burnish.tracking.observers import Observers
from burnish.tracking.rundir import RunDirectory
from burnish.tracking.trackers import BackgroundTracker

DEMO = Path(__file__).parents[1] / "examples" / "demo"
STEPS = 10
GOAL = 0.99
"""Steps of a side in a round; goal for the time without tracking over the time with it."""
OBSERVERS = "observers"
LEAST = 0.0002
"""Name of the training thread's time in observers; smallest difference that is shown, in seconds per step."""
SILENT: dict[str, Any] = {"trackers": [], "rollouts_every": 0, "traces": {"local": False}}
COLLECTOR = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Turns:
    """A run's observers, which switch every `STEPS` steps between those with tracking and those without."""

    clock: Clock
    seconds: Mapping[str, list[float]]
    threads: Mapping[str, list[dict[str, float]]]

    def __init__(self, directory: RunDirectory, settings: TrackingConfig, **given: Any) -> None:
        silent = TrackingConfig.model_validate({**settings.model_dump(), **SILENT})
        off = RunDirectory(directory.root / "off")
        off.root.mkdir(exist_ok=True)
        self._sides = {
            "on": Observers(directory, settings, **given),
            "off": Observers(off, silent, **given),
        }
        self._name, self._left, self._began = "on", STEPS, self.clock()
        self._called = 0.0
        self._used = used_by_thread()

    def _call(self, method: Callable[..., None], *given: Any) -> None:
        begun = time.thread_time()
        method(*given)
        self._called += time.thread_time() - begun

    def rollouts_scored(self, *given: Any) -> None:
        self._call(self._sides[self._name].rollouts_scored, *given)

    def step_finished(self, step: int, values: Mapping[str, float]) -> None:
        side = self._sides[self._name]
        self._call(side.step_finished, step, values)
        self._left -= 1
        if not self._left:
            for each in vars(side).values():
                wait_for(each)
            self.seconds[self._name].append((self.clock() - self._began) / STEPS)
            used = used_by_thread()
            more = {name: used[name] - self._used.get(name, 0.0) for name in used}
            self.threads[self._name].append(more | {OBSERVERS: self._called})
            self._called = 0.0
            self._used = used
            self._name = "off" if self._name == "on" else "on"
            logging.getLogger("burnish").setLevel("DEBUG" if self._name == "on" else "INFO")
            self._left, self._began = STEPS, self.clock()

    def checkpoint_committed(self, place: str) -> None:
        self._sides["on"].checkpoint_committed(place)

    def report(self, state: Any) -> None:
        self._sides["on"].report(state)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        for side in self._sides.values():
            side.close()


def used_by_thread() -> dict[str, float]:
    """Return the seconds of processor time that each thread has used, by name. Leave out the main thread and torch's, which train."""
    training = Path("/proc/self/comm").read_text().strip()
    names = {str(each.native_id): each.name for each in threading.enumerate()}
    found: dict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            found[names.get(task.name, (task / "comm").read_text().strip())] += seconds
    return {k: v for k, v in found.items() if k not in (training, names[str(os.getpid())])}


def wait_for(held: Any) -> None:
    """Wait until trackers in the background have processed everything."""
    if isinstance(held, list):
        for each in held:
            wait_for(each)
    elif isinstance(held, BackgroundTracker):
        held.sync()
        while held._waiting.total():
            time.sleep(0.001)


@contextmanager
def services(directory: Path) -> Iterator[str]:
    """Set variables for the trackers, and start servers on loopback. Yield the collector's address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    store = ["--backend-store-uri", f"sqlite:///{directory}/mlflow.db", "--workers", "1"]
    store += ["--artifacts-destination", str(directory / "artifacts")]
    server = [sys.executable, "-m", "mlflow", "server", *store, "--port", port]
    url = f"http://127.0.0.1:{port}"
    quiet = subprocess.DEVNULL
    os.environ |= {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "MLFLOW_TRACKING_URI": url}
    os.environ["TRACKIO_DIR"] = str(directory / "trackio")
    program = [sys.executable, "-c", COLLECTOR]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(program, stdout=pipe, text=True) as collector,
        subprocess.Popen(server, cwd=directory, stdout=quiet, stderr=quiet) as mlflow,
    ):
        assert collector.stdout is not None
        endpoint = f"http://127.0.0.1:{collector.stdout.readline().strip()}"
        try:
            for _ in range(600):
                with suppress(OSError):
                    urllib.request.urlopen(f"{url}/health").close()
                    break
                time.sleep(0.5)
            yield endpoint
        finally:
            mlflow.terminate()
            collector.terminate()


def settings_of(endpoint: str, steps: int) -> dict[str, Any]:
    """Return the demo's settings for reinforcement learning, on the model that its fine-tuning begins with."""
    demo: dict[str, Any] = yaml.safe_load((DEMO / "rl.yaml").read_text())
    model = yaml.safe_load((DEMO / "sft.yaml").read_text())["model"]
    return demo | {
        "name": "tracked",
        "steps": steps,
        "model": model,
        "evaluation": {"every": 0},
        "checkpoint": {"save_every": 0},
        "tracking": {
            "trackers": ["tensorboard", "wandb", "mlflow", "trackio", "swanlab"],
            "traces": {"endpoint": endpoint, "sample_rate": 0.01},
            "report": False,
            "progress": False,
        },
    }


def middle(rows: list[dict[str, float]], name: str) -> float:
    return median(row.get(name, 0.0) for row in rows)


def by_thread(found: Mapping[str, list[dict[str, float]]], step: float) -> list[Result]:
    """Return the additional processor time per step with tracking, of each thread and of all."""
    sides = {side: found[side][1:] for side in found}
    cost = {
        name: (middle(sides["on"], name) - middle(sides["off"], name)) / STEPS
        for name in {name for rows in sides.values() for row in rows for name in row}
    }
    shown = {name: cost[name] for name in sorted(cost, key=lambda n: -cost[n])}
    shown = {"all": sum(cost.values())} | {n: v for n, v in shown.items() if abs(v) > LEAST}
    return [
        Result(
            f"tracking/processor time: {n}", v, None, None, "s per step", step / (step + v), GOAL
        )
        for n, v in shown.items()
    ]


def main() -> None:
    arguments = command_line(__doc__, rounds=5, clock="wall").parse_args()
    found: dict[str, list[float]] = {"on": [], "off": []}
    Turns.clock = staticmethod(CLOCKS[arguments.clock])
    Turns.seconds = found
    Turns.threads = {"on": [], "off": []}
    burnish.runs.run_observers.Observers = Turns  # type: ignore[attr-defined, assignment]
    sys.path.insert(0, str(DEMO))
    with tempfile.TemporaryDirectory() as directory, services(Path(directory)) as endpoint:
        os.chdir(directory)
        Path("runs/demo").mkdir(parents=True)
        from task import write_data, write_tokenizer

        write_tokenizer(Path("runs/demo/tokenizer"))
        write_data(Path("runs/demo"))
        steps = 2 * STEPS * (arguments.rounds + 1)
        run_method(METHODS["rl"], load_settings(settings_of(endpoint, steps), {}))
    on = found["on"][1:]
    off = found["off"][1:]
    name = "tracking/a step of the demo with all trackers"
    result = Result(name, median(on), median(off), None, "s per step", ratio(off, on), GOAL)
    report([result, *by_thread(Turns.threads, median(off))], arguments.json)


if __name__ == "__main__":
    main()
