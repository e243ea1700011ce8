"""A GRPO step beside other programs that take the cores, on one process and on two as under torchrun.

    python -m bench.busy [--json] [--rounds N] [--busy N ...]

A busy program is an endless loop. Its share of the cores is fair, and ours too: `fair` is how much longer one thread per core
takes, each with work of its own, so that none waits for another. The first ratio is that time over the one of our step, both beside busy
programs; 1 is what a step would take if threads never waited for each other in vain. `plain` is our step with libgomp's own
waiting (`GOMP_SPINCOUNT`), which shows what a step alone loses, and how long it takes beside busy programs. Sides take turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.checkpoint import Team, slowest, started
from bench.grpo import write_world
from bench.machine import Result, command_line, ratio, report

MODULE = "bench.busy_ranks"
CORES = len(os.sched_getaffinity(0))
PLAIN = {"GOMP_SPINCOUNT": "300000"}
"""libgomp's own waiting, set by hand, which Burnish leaves as it is."""
MOST_OF_FAIR = 1.5
MOST_LOST = 0.05


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run endless loops."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def in_turns(sides: dict[str, Team], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side in each round, after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, team in sides.items():
            found = slowest(team, {})
            if number:
                seconds[name].append(found)
    return seconds


def measure(rounds: int, programs: list[int]) -> list[Result]:
    """Measure all sides alone, and all but `plain` beside each number of programs."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = write_world(directory, "5m").model_dump(mode="json")

        def team(world: int, **settings: Any) -> Team:
            given = {"threads": max(1, CORES // world), **settings}
            made = stack.enter_context(started(None, MODULE, given, world))
            for rank in made:
                rank.receive()
            return made

        sides = {"one process": team(1, config=config), "two ranks": team(2, config=config)}
        sides["fair"] = team(CORES, threads=1)
        os.environ.update(PLAIN)
        plain = {"plain": team(1, config=config)}
        alone = in_turns(sides | plain, rounds)
        results = [
            Result(
                "busy/alone",
                median(alone["one process"]),
                median(alone["plain"]),
                None,
                "s",
                ratio(alone["plain"], alone["one process"]),
                1 - MOST_LOST,
            )
        ]
        for count in programs:
            with busy(count):
                beside = in_turns(sides, rounds)
            slower = median(beside["fair"]) / median(alone["fair"])
            for name in ("one process", "two ranks"):
                ours = median(beside[name])
                limit = slower * median(alone[name])
                results.append(
                    Result(
                        f"busy/{name} beside {count}, {slower:.2f} times is fair",
                        ours,
                        None,
                        limit,
                        "s",
                        limit / ours,
                        1 / MOST_OF_FAIR,
                    )
                )
    return results


def main() -> None:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--busy", nargs="+", type=int, default=[1, 3])
    arguments = parser.parse_args()
    report(measure(arguments.rounds, arguments.busy), arguments.json)


if __name__ == "__main__":
    main()
