"""Parts that all benchmarks share: the command line, a description of the machine, interleaved rounds, printed results."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from bench.peers import CLOCKS


@dataclass(frozen=True)
class Result:
    """One line of a benchmark."""

    name: str
    """Name of the figure."""
    ours: float
    """Our figure, in `unit`."""
    peer: float | None
    """The peer's figure, in `unit`."""
    limit: float | None
    """The machine's own limit for the same work, in `unit`."""
    unit: str
    """Unit of the three figures."""
    ratio: float
    """The peer's time over ours, or our figure beside the limit; larger is better."""
    goal: float
    """The goal is met if ratio ≥ goal."""


def command_line(
    documentation: str | None,
    *,
    rounds: int | None = None,
    threads: int | None = None,
    clock: str | None = None,
) -> argparse.ArgumentParser:
    """Return a parser with `--json`, and with each of `--rounds`, `--threads` and `--clock` for which a default is given."""
    parser = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    for name, default in (("--rounds", rounds), ("--threads", threads)):
        if default is not None:
            parser.add_argument(name, type=int, default=default)
    if clock is not None:
        parser.add_argument("--clock", choices=CLOCKS, default=clock)
    return parser


def machine() -> dict[str, object]:
    """Return processor, device, threads and versions."""
    accelerator = torch.accelerator.is_available()
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name()
        if accelerator and torch.cuda.is_available()
        else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def interleaved(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each side in each round. Sides take turns; one round before is to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            start = clock()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:
                seconds[name].append(clock() - start)
    return seconds


def ratio(peer: Sequence[float], ours: Sequence[float]) -> float:
    """Return the median over rounds of the peer's time over ours."""
    return median(theirs / mine for theirs, mine in zip(peer, ours, strict=True))


def report(results: Sequence[Result], as_json: bool) -> None:
    """Print a line for people per result; with `as_json` one object as the last line."""
    for result in results:
        parts = [f"ours {result.ours:.4g}"]
        parts += [f"peer {result.peer:.4g}"] if result.peer is not None else []
        parts += [f"limit {result.limit:.4g}"] if result.limit is not None else []
        met = "met" if result.ratio >= result.goal else "not met"
        print(
            f"{result.name}: {', '.join(parts)} {result.unit}; "
            f"ratio {result.ratio:.2f}, goal {result.goal:.2f} {met}"
        )
    if as_json:
        print(json.dumps({"machine": machine(), "results": [asdict(r) for r in results]}))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
