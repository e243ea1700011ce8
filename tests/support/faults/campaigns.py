"""All that the suite tries a sample of, in full (`make faults`): crashes, loss of power, flipped bits, hostile files, killed runs.

Prints one table, a row per dangerous moment and campaign and a column per fault, and ends with 1
when anything committed was lost, anything else was loaded, or anything hostile was not refused.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TextIO

from burnish.tracking.progress import Progress
from support.checkpoints.states import BIG_SHAPES, SHAPES
from support.faults import bit_flips, crashes, mirror_crashes
from support.faults.failpoints import FAULTS, MOMENTS, STAGING
from support.faults.killed_runs import (
    KINDS,
    REWARD_RUNS,
    RUNS,
    generators_killed,
    judges_killed,
    killed,
)
from support.faults.power_loss import SCENES, check, named_moments
from support.faults.recorded_disk import crash_states
from support.faults.verdict import Verdict
from support.fuzz import checkpoint_files
from support.runs.training_files import done, make_files, outcome

POWER = "power loss"
CAMPAIGNS = (
    "crashes",
    "power",
    "flips",
    "fuzz",
    "runs",
    "rewards",
    "generators",
    "mirror",
)
_SLOW_SECONDS = 1.0
_MEMORY = 256 << 20
_ORDER = [*list(MOMENTS)[:2], STAGING, *list(MOMENTS)[2:]]


@dataclass
class Tally:
    """What came of the campaigns, by moment and fault."""

    runs: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    uncommitted: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    words: list[str] = field(default_factory=list)

    def add(self, moment: str, fault: str, what: object, verdict: Verdict) -> None:
        """Count a run; one in which the fault did not come proves nothing, and is as wrong as any."""
        if verdict.struck:
            self.runs[moment, fault] += 1
        else:
            self.missed[moment] += 1
        self.lost[moment] += verdict.lost
        self.uncommitted[moment] += verdict.uncommitted
        if not (verdict.struck and verdict.is_good):
            self.wrong[moment] += 1
            said = "" if verdict.struck else "the fault did not come; "
            self.words.append(f"{what}: {said}{verdict.wrong}")

    def rows(self) -> Iterator[str]:
        """The table, a line each; a moment of which nothing was tried has no verdict."""
        faults = (*FAULTS, POWER)
        yield _row("", *faults, "missed", "lost", "uncommitted", "verdict")
        for moment in _ORDER:
            counts = [self.runs[moment, fault] for fault in faults]
            verdict = "WRONG" if self.wrong[moment] else "ok" if any(counts) else "-"
            rest = (self.missed[moment], self.lost[moment], self.uncommitted[moment], verdict)
            yield _row(moment, *(count or "-" for count in counts), *rest)
        sums = [sum(self.runs[moment, fault] for moment in _ORDER) for fault in faults]
        rest = (self.missed, self.lost, self.uncommitted, self.wrong)
        yield _row("all", *sums, *(each.total() for each in rest))


def _row(name: str, *cells: object) -> str:
    return f"{name:<42}" + "".join(f"{cell!s:>14}" for cell in cells)


def crash(tally: Tally, chosen: argparse.Namespace, directory: Path, progress: Progress) -> None:
    """The whole matrix, several cells at a time: they wait for each other's processes more than they work."""
    cells = [cell for cell in crashes.cells() if cell.fault in chosen.faults]
    with (
        progress.phase("crashes", len(cells)) as bar,
        ThreadPoolExecutor(chosen.jobs) as threads,
    ):
        attempts = {
            threads.submit(crashes.try_cell, cell, directory / f"cell-{number}"): cell
            for number, cell in enumerate(cells)
        }
        for attempt in as_completed(attempts):
            cell = attempts[attempt]
            try:
                verdict = attempt.result()
            except Exception as error:  # a campaign goes on, and says so at its end
                verdict = Verdict(wrong=f"{type(error).__name__}: {error}")
            tally.add(cell.moment, cell.fault, cell, verdict)
            bar.advance()


def lose_power(
    tally: Tally, chosen: argparse.Namespace, directory: Path, progress: Progress
) -> None:
    """Every scene, at every moment, with any part of what was not synced."""
    for scene, record in SCENES.items():
        history = record(directory / scene.replace(" ", "-"))
        names = named_moments(history)
        states = list(crash_states(history, random.Random(f"{chosen.seed} {scene}"), chosen.extra))
        with progress.phase(f"power, {scene}", len(states)) as bar:
            for moment, nodes in states:
                what = f"power loss, {scene}, operation {moment}"
                try:
                    verdict = check(history, moment, nodes, directory / "left", scene)
                except Exception as error:  # as above
                    verdict = Verdict(wrong=f"{type(error).__name__}: {error}")
                tally.add(names[moment], POWER, what, verdict)
                bar.advance()


def in_parts(
    work: Any, arguments: Iterable[tuple[Any, ...]], workers: Executor, bar: Any
) -> list[str]:
    """`work(*arguments)` for each in the workers; all complaints."""
    found = []
    for part in as_completed([workers.submit(work, *each) for each in arguments]):
        done_, words = part.result()
        found += words
        bar.advance(done_)
    return found


def flip_some(
    directory: str, seed: str, count: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, list[str]]:
    """So many flips in a step of one's own."""
    step = bit_flips.make_step(Path(tempfile.mkdtemp(dir=directory)), shapes)
    chosen = itertools.islice(bit_flips.flips(step, random.Random(seed)), count)
    return count, [each for flip in chosen for each in bit_flips.check_flip(step, flip)]


def fuzz_some(directory: str, target: str, seed: str, count: int) -> tuple[int, list[str]]:
    """So many hostile inputs, within a second and a quarter of a gigabyte each."""
    limit_memory()
    gc.freeze()  # what was loaded before is not walked over on the clock
    found, rng = [], random.Random(seed)
    for _ in range(count):
        state = rng.getstate()
        reading = checkpoint_files.reading(target, rng, Path(directory))
        slow = f"took {reading.seconds:.1f} s " if reading.seconds > _SLOW_SECONDS else ""
        if slow or reading.wrong:
            found.append(f"{target}, {hash(state)}: {slow}{reading.wrong}")
    return count, found


def limit_memory() -> None:
    """From here on this process gets so much more memory, and `MemoryError` beyond it."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        held = pages * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY, held + _MEMORY))


def _workers(chosen: argparse.Namespace) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(chosen.jobs, mp_context=get_context("forkserver"))


def _split(count: int, most: int) -> Iterator[tuple[int, int]]:
    """A number and a size for each part of a count."""
    for number, start in enumerate(range(0, count, most)):
        yield number, min(most, count - start)


def flip(chosen: argparse.Namespace, directory: Path, progress: Progress) -> list[str]:
    """Single bits over a step, one in twenty of them over one whose files have several blocks."""
    with _workers(chosen) as workers, progress.phase("flipped bits", chosen.flips) as bar:
        parts = [
            (str(directory), f"{chosen.seed} {number}", size, SHAPES if number % 20 else BIG_SHAPES)
            for number, size in _split(chosen.flips, 500)
        ]
        return in_parts(flip_some, parts, workers, bar)


def fuzz(chosen: argparse.Namespace, directory: Path, progress: Progress) -> list[str]:
    """Hostile files of every kind; of the large ones a thousandth part."""
    small = chosen.inputs // (len(checkpoint_files.TARGETS) - len(checkpoint_files.LARGE))
    shares = dict.fromkeys(checkpoint_files.TARGETS, small) | dict.fromkeys(
        checkpoint_files.LARGE, small // 1000
    )
    total = sum(shares.values())
    with _workers(chosen) as workers, progress.phase("hostile files", total) as bar:
        parts = []
        for target, share in shares.items():
            for number, size in _split(share, 50 if target in checkpoint_files.LARGE else 5000):
                own = Path(tempfile.mkdtemp(dir=directory))
                parts.append((str(own), target, f"{chosen.seed} {target} {number}", size))
        return in_parts(fuzz_some, parts, workers, bar)


def kill_runs(chosen: argparse.Namespace, directory: Path, progress: Progress) -> list[str]:
    """Training runs that save in the background, killed at random; those that come to another end than one left in peace."""
    directory.mkdir()
    work, wrong = make_files(directory), []
    with progress.phase("killed runs", chosen.kills * len(RUNS)) as bar:
        for kind, world in RUNS:
            peace = outcome(done(work, *KINDS[kind], f"name=peace_{kind}_{world}", world=world))
            run = killed(work, kind, world, chosen.kills, f"{kind}_{world}", bar.advance)
            same = outcome(run) == peace
            what = f"{kind} on {world}, killed {chosen.kills} times"
            print(f"{what}: {'the same outcome' if same else 'ANOTHER OUTCOME'}", flush=True)
            wrong += [] if same else [what]
    return wrong


def kill_rewards(chosen: argparse.Namespace, directory: Path, progress: Progress) -> list[str]:
    """Reward processes killed in the middle of calls; kinds of runs that come to another end than one left in peace."""
    directory.mkdir()
    work, wrong = make_files(directory), []
    with progress.phase("killed rewards", chosen.kills * len(REWARD_RUNS)) as bar:
        for kind, world in REWARD_RUNS:
            others = judges_killed(work, kind, world, chosen.kills, bar.advance)
            wrong += [f"rewards of {kind} on {world}: {others} runs"] if others else []
    return wrong


def kill_generators(chosen: argparse.Namespace, directory: Path, progress: Progress) -> list[str]:
    """Generating processes beside one rank and two, killed at random; those that come to another end."""
    directory.mkdir()
    work, wrong = make_files(directory), []
    with progress.phase("killed generators", chosen.kills * 2) as bar:
        for world in (1, 2):
            others = generators_killed(work, world, chosen.kills, bar.advance)
            wrong += [f"generators beside {world}: {others} runs"] if others else []
    return wrong


def copy_to_mirrors(chosen: argparse.Namespace, directory: Path, progress: Progress) -> list[str]:
    """Faults of the machine and of the service at every moment of copying, and kills at random, before an empty machine goes on."""
    wrong = []
    tries = list(itertools.product(mirror_crashes.MOMENTS, mirror_crashes.FAULTS))
    with progress.phase("mirror", len(tries) + chosen.kills) as bar:
        for index, (moment, fault) in enumerate(tries):
            place = directory / f"mirror-{index}"
            verdict = mirror_crashes.try_moment(f"file://{place}/far", moment, place, fault)
            if not (verdict.struck and verdict.is_good):
                wrong.append(f"mirror, {fault} {moment}: {verdict}")
            bar.advance()
        place, rng = directory / "mirror-kills", random.Random(f"{chosen.seed} mirror")
        for verdict in mirror_crashes.try_kills(f"file://{place}/far", place, rng, chosen.kills):
            wrong += [] if verdict.is_good else [f"mirror, killed at random: {verdict}"]
            bar.advance()
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Try everything; 1 when anything is not as it has to be."""
    arguments = argparse.ArgumentParser(description=main.__doc__)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time")
    arguments.add_argument("--only", nargs="*", default=CAMPAIGNS, choices=CAMPAIGNS)
    arguments.add_argument("--faults", nargs="*", default=FAULTS, choices=FAULTS)
    arguments.add_argument("--extra", type=int, default=16, help="random losses of power a moment")
    arguments.add_argument("--flips", type=int, default=10_000)
    arguments.add_argument("--inputs", type=int, default=1_000_000, help="hostile files")
    arguments.add_argument("--kills", type=int, default=50, help="of each kind of run")
    chosen = arguments.parse_args(argv)
    logging.disable()  # of what is set aside, which is on purpose
    with tempfile.TemporaryDirectory() as name, _quiet(Path(name) / "stderr") as screen:
        return _campaigns(chosen, Path(name), Progress(True, stream=screen))


@contextmanager
def _quiet(log: Path) -> Iterator[TextIO]:
    """Let processes that hang on purpose print their stacks to a file; yields standard error as it was."""
    with log.open("w") as file, os.fdopen(os.dup(2), "w") as screen:
        os.dup2(file.fileno(), 2)
        try:
            yield screen
        finally:
            os.dup2(screen.fileno(), 2)


def _campaigns(chosen: argparse.Namespace, directory: Path, progress: Progress) -> int:
    begun, tally = time.monotonic(), Tally()
    try:
        if "crashes" in chosen.only:
            crash(tally, chosen, directory, progress)
        if "power" in chosen.only:
            lose_power(tally, chosen, directory, progress)
    finally:
        if tally.runs or tally.missed:
            print(*tally.rows(), sep="\n", flush=True)
    wrong = tally.words
    others = {
        "flips": (flip, f"{chosen.flips:,} flipped bits"),
        "fuzz": (fuzz, f"{chosen.inputs:,} hostile files"),
        "mirror": (
            copy_to_mirrors,
            f"{len(mirror_crashes.MOMENTS)} moments of copying to a mirror, {len(mirror_crashes.FAULTS)} faults, and {chosen.kills} kills",
        ),
        "runs": (
            kill_runs,
            f"{chosen.kills} kills each of SFT and RL on 1 and 2 processes, of RL that draws ahead, and in a Megatron pipeline",
        ),
        "rewards": (
            kill_rewards,
            f"{chosen.kills} kills each of reward processes of RL on 1 and 2 processes, and of RL that draws ahead with a critic",
        ),
        "generators": (
            kill_generators,
            f"{chosen.kills} kills each of the generating processes beside 1 and 2 ranks",
        ),
    }
    for name, (campaign, what) in others.items():
        if name in chosen.only:
            own = name in ("runs", "rewards", "generators")
            found = campaign(chosen, directory / name if own else directory, progress)
            print(f"{what}: {len(found)} not as they have to be", flush=True)
            wrong += found
    print(f"{len(wrong)} wrong, {time.monotonic() - begun:.0f} s")
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
