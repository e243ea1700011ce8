"""Checkpoints beside the machine's own limits and beside other libraries: speed, memory, bytes read.

    python -m bench.checkpoint [--json] [--sizes 0.1 0.5 1] [--processes 1 2 4] [--rounds 3]
                               [--cases save load block memory reshard plan] [--without verl]

Sizes are 10^9 bytes of fp32 weights and AdamW's two slots, cut by rows over the processes. All sides
take turns in each round, in the same processes (verl in its own, under its own Python). A figure
is the median over rounds of one side's time over the other's in the same round. The slowest rank's time
counts. Files are in a temporary directory, below --directory if given, and all sides sync them. The limits:

    save     each rank writes its bytes to one preallocated file in 4 MiB pieces, then fsync
    load     each rank reads as many bytes with preadv, 4 MiB at a time, into memory that it holds; files are in the page cache
    block    each rank copies its tensors to memory that it keeps
    memory   64 MiB and a wave of 16 MiB to save, 32 MiB to load, beside the tensors; peers are measured too
    reshard  the bytes that are needed (saved by rows; loaded as uneven rows, and as columns)
    plan     ten seconds for the plan of each of 1,000 ranks for 1,000 tensors, at any size and number of processes
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.checkpoint_plan import plan
from bench.machine import Result, command_line, ratio, report
from bench.peers import Peer

CASES = ("memory", "save", "load", "reshard", "block", "plan")
PLANNED_RANKS = 1000
PLANNED_TENSORS = 1000
PLAN_SECONDS = 10.0
PEERS = {
    "save": ("dcp", "dcp_hf", "torch", "safetensors"),
    "load": ("dcp", "torch", "safetensors"),
}
SLOW = ("dcp_hf",)
MIB = 1 << 20
BOUNDS = {"save": (64 + 16) * MIB, "load": 32 * MIB}
"""Limits of memory, in bytes beside the tensors."""

Team = list[Peer]


def ask_all(team: Team, question: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask all ranks the same at once. Return the answers by rank."""
    for peer in team:
        peer.send(question)
    return [peer.receive() for peer in team]


def slowest(team: Team, question: dict[str, Any]) -> float:
    return max(float(answer["seconds"]) for answer in ask_all(team, question))


@contextmanager
def started(name: str | None, module: str, settings: dict[str, Any], world: int) -> Iterator[Team]:
    """Start a process per rank. Its first answer says that it is set up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = settings["threads"]
    team = [
        Peer(name, module, settings | {"rank": rank, "world": world, "port": port}, threads)
        for rank in range(world)
    ]
    try:
        yield team
    finally:
        for peer in team:
            peer.close()


class Setting:
    """One size at one number of processes."""

    def __init__(self, label: str, ours: Team, verl: Team | None, rounds: int) -> None:
        self.label = label
        self.ours = ours
        self.verl = verl
        self.rounds = rounds

    def rounds_of(self, sides: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
        """Return the seconds of each side in each round, after one to warm up. Slow sides run in the last round only."""
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(self.rounds + 1):
            for side, run in sides.items():
                if side in SLOW and number < self.rounds:
                    continue
                found = run()
                if number:
                    seconds[side].append(found)
        return seconds

    def in_turns(self, kind: str, limit: str, peers: Sequence[str], goal: float) -> list[Result]:
        """Measure one kind of work on all sides, beside its limit and each peer."""
        timed = {"do": "timed", "kind": kind}
        sides: dict[str, Callable[[], float]] = {
            side: partial(slowest, self.ours, timed | {"side": side})
            for side in (limit, "ours", *peers)
        }
        verl = self.verl
        if verl is not None and kind != "block":
            sides["verl"] = lambda: slowest(verl, {"do": kind})
        seconds = self.rounds_of(sides)
        mine = median(seconds["ours"])
        bound = median(seconds[limit])
        name = f"checkpoint/{kind}/{self.label}"
        over = ratio(seconds[limit], seconds["ours"])
        results = [Result(f"{name}/limit", mine, None, bound, "s", over, goal)]
        for side in sides:
            if side not in (limit, "ours"):
                over = ratio(seconds[side], seconds["ours"][-len(seconds[side]) :])
                peer = median(seconds[side])
                results.append(Result(f"{name}/{side}", mine, peer, bound, "s", over, 1.0))
        return results

    def save(self) -> list[Result]:
        return self.in_turns("save", "raw", PEERS["save"], 0.95)

    def load(self) -> list[Result]:
        return self.in_turns("load", "raw", PEERS["load"], 0.85)

    def block(self) -> list[Result]:
        return self.in_turns("block", "copy", ("dcp",), 1 / 1.1)

    def memory(self) -> list[Result]:
        results = []
        for kind, bound in BOUNDS.items():
            name = f"checkpoint/memory-{kind}/{self.label}"
            most = {
                side: max(answer["bytes"] for answer in self._ask_memory(kind, side))
                for side in ("ours", *PEERS[kind])
            }
            mine = max(most.pop("ours"), 1)
            figures = (mine / MIB, None, bound / MIB, "MiB")
            results.append(Result(f"{name}/limit", *figures, bound / mine, 1.0))
            for side, theirs in most.items():
                figures = (mine / MIB, theirs / MIB, bound / MIB, "MiB")
                results.append(Result(f"{name}/{side}", *figures, theirs / mine, 1.0))
        return results

    def _ask_memory(self, kind: str, side: str) -> list[dict[str, Any]]:
        return ask_all(self.ours, {"do": "memory", "kind": kind, "side": side})

    def reshard(self) -> list[Result]:
        results = []
        for dim, (cut, goal) in enumerate((("rows", 1.1), ("columns", 2.0))):
            found = {}
            for side in ("ours", "dcp"):
                answers = ask_all(self.ours, {"do": "read", "side": side, "dim": dim})
                read, wanted = (sum(each[key] for each in answers) for key in ("read", "wanted"))
                found[side] = read / wanted
                if not dim:
                    break  # DCP cannot describe uneven rows
            name = f"checkpoint/reshard-{cut}/{self.label}"
            mine = found["ours"]
            peer = found.get("dcp")
            results.append(Result(name, mine, peer, 1.0, "bytes per byte", 1 / mine, 1 / goal))
        return results


def measure(arguments: argparse.Namespace, size: float, world: int) -> list[Result]:
    """Measure all cases at one size and number of processes."""
    cases = [case for case in CASES if case in arguments.cases and case != "plan"]
    if not cases:
        return []
    needs_saved = {"load", "reshard"} & set(cases)
    if needs_saved and "save" not in cases:
        cases.insert(0, "save")
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory))
        threads = max(1, arguments.threads // world)
        common = {"gigabytes": size, "directory": directory, "threads": threads}
        ours = stack.enter_context(started(None, "bench.checkpoint_ranks", common, world))
        verl = None
        if "verl" not in arguments.without and {"save", "load"} & set(cases):
            verl = stack.enter_context(started("verl", "bench.checkpoint_verl", common, world))
        for peer in [*ours, *(verl or ())]:
            peer.receive()  # the process is set up
        label = f"{size:g}gb/{world}-processes"
        setting = Setting(label, ours, verl, arguments.rounds)
        results: list[Result] = []
        for case in cases:
            print(f"  {label}: {case}", file=sys.stderr, flush=True)
            results += getattr(setting, case)()
        return results


def measure_plan(rounds: int) -> list[Result]:
    """Measure time and memory of one of very many ranks that plan a save."""
    plan(4, 4)
    found = [plan(PLANNED_RANKS, PLANNED_TENSORS) for _ in range(rounds)]
    seconds = median(each[0] for each in found)
    most = max(each[1] for each in found)
    print(f"  plan: {most / MIB:.0f} MiB at the peak", file=sys.stderr, flush=True)
    name = f"checkpoint/plan/{PLANNED_RANKS}-ranks-{PLANNED_TENSORS}-tensors"
    return [Result(name, seconds, None, PLAN_SECONDS, "s", PLAN_SECONDS / seconds, 1.0)]


def main() -> None:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--sizes", nargs="+", type=float, default=[0.1, 0.5, 1.0])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--without", nargs="*", choices=["verl"], default=[])
    parser.add_argument("--threads", type=int, default=2, help="over all processes of a side")
    parser.add_argument("--directory", type=Path, help="where files are written")
    arguments = parser.parse_args()
    results = [
        result
        for size in arguments.sizes
        for world in arguments.processes
        for result in measure(arguments, size, world)
    ]
    if "plan" in arguments.cases:
        results += measure_plan(arguments.rounds)
    report(results, arguments.json)


if __name__ == "__main__":
    main()
