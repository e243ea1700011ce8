"""One cell of the crash matrix: a moment, a fault and a layout; what happened, and whether all is as it has to be.

Run as a program it tries the whole matrix and prints a table (`make faults`).
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkpoints_for_tests import BIG_SHAPES, contents_of, fill_and_compare, make_state
from distributed import RankFailed, run_ranks
from failpoints import FAULTS, MOMENTS, FaultStorage
from faultfs import crash_states
from killed_runs import KINDS, killed
from power_loss import SCENES, check
from training_files import done, make_files, outcome

from burnish.checkpoint.committed import committed
from burnish.checkpoint.directory import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.verify import verify
from burnish.errors import BurnishError
from burnish.parallel.layout import Layout

LAYOUTS = {
    "1 process": (1, False),
    "2 processes": (2, False),
    "1 + writer": (1, True),
    "2 + writers": (2, True),
}
"""By name: processes, and whether they save in the background."""
HANG_SECONDS = 6.0


@dataclass(frozen=True)
class Cell:
    """What is tried."""

    moment: str
    fault: str
    layout: str

    def __str__(self):
        return f"{self.fault} {self.moment}, {self.layout}"


def cells() -> Iterator[Cell]:
    """All that make sense."""
    for layout, (world, background) in LAYOUTS.items():
        for fault in FAULTS:
            if (fault == "kill another" and world == 1) or (
                fault == "kill parent" and not background
            ):
                continue
            if fault == "kill all" and world == 1:
                continue
            for moment in MOMENTS:
                yield Cell(moment, fault, layout)


def _save_three(layout, root, moment, fault, background):
    root = Path(root)
    (root.parent / f"rank-{layout.rank}").write_text(str(os.getpid()))
    storage = FaultStorage(moment, fault, root.parent, armed=layout.rank == 0)
    patience = HANG_SECONDS if fault == "hang" else 30.0
    with Checkpoints(
        root,
        layout,
        retention=Retention(1),
        background_timeout=patience if background else None,
        storage=storage,
    ) as checkpoints:
        for step in (1, 2, 3):
            contents = contents_of(*make_state(step, BIG_SHAPES), layout)
            error = None
            if background:
                checkpoints.begin_save(step, contents)
                error = checkpoints.finished(wait=True).error
            else:
                try:
                    checkpoints.save(step, contents)
                except BurnishError as failure:
                    error = failure
                    if "is committed" in str(failure):
                        error = None
            if error is None and layout.is_main:
                (root.parent / "acked").write_text(str(step))


def try_cell(cell: Cell, directory: Path) -> bool:
    """Run it and check what is left; whether the fault came at all. Raises `AssertionError` when something was lost."""
    world, background = LAYOUTS[cell.layout]
    directory.mkdir()
    root = directory / "checkpoints"
    seconds = 4 * HANG_SECONDS if cell.fault == "hang" else 90
    ended: object = None
    try:
        run_ranks(
            _save_three, world, str(root), cell.moment, cell.fault, background,
            timeout=HANG_SECONDS if cell.fault == "hang" and not background else seconds,
        )  # fmt: skip
    except RankFailed as failed:
        ended = failed
    assert (directory / "acked").exists(), f"{cell}: not even the first save was made: {ended}"
    acked = int((directory / "acked").read_text())

    def load(step, source):
        fill_and_compare(source, *make_state(step.step, BIG_SHAPES), Layout())

    with Checkpoints(root, Layout(), retention=Retention(1)) as checkpoints:
        resumed = checkpoints.resume(load)
    assert resumed is not None, f"{cell}: nothing is left, step {acked} was saved"
    assert resumed.skipped == (), f"{cell}: {resumed.skipped}"
    assert acked <= resumed.step.step <= acked + 1, f"{cell}: {acked}, {resumed.step.step}"
    if cell.fault in ("ENOSPC", "EIO"):
        assert acked == 3, f"{cell}: training did not go on"
    assert not [path.name for path in root.iterdir() if "inflight" in path.name], str(cell)
    assert not any(list(verify(step.path)) for step in committed(root)), str(cell)
    return (directory / "struck").exists()


def try_power_loss(
    scene: str, directory: Path, rng: random.Random, extra: int
) -> tuple[int, list[str]]:
    """Lose power in a scene in every way; how many ways, and what went wrong."""
    directory.mkdir()
    history = SCENES[scene](directory / "disk")
    tried, wrong = 0, []
    for moment, nodes in crash_states(history, rng, extra):
        tried += 1
        try:
            check(history, moment, nodes, directory / "left", scene)
        except Exception as error:
            wrong.append(f"power loss, {scene}, moment {moment}: {error}")
    return tried, wrong


def main() -> int:
    """Try everything; 1 when anything was lost."""
    arguments = argparse.ArgumentParser(description=main.__doc__)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--extra", type=int, default=16, help="random losses of power a moment")
    arguments.add_argument("--kills", type=int, default=50, help="kills of each kind of run")
    arguments.add_argument("--faults", nargs="*", default=FAULTS, choices=FAULTS)
    arguments.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    chosen = arguments.parse_args()
    logging.disable()  # of what is set aside, which is on purpose
    began, wrong = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        wrong += _matrix(Path(name), chosen.faults, chosen.layouts)
        print(f"\n{'power loss':<44}{'ways':>8}{'lost':>8}")
        for scene in SCENES:
            rng = random.Random(f"{chosen.seed} {scene}")
            tried, bad = try_power_loss(
                scene, Path(name) / scene.replace(" ", "-"), rng, chosen.extra
            )
            print(f"{scene:<44}{tried:>8}{len(bad):>8}", flush=True)
            wrong += bad
        if chosen.kills:
            wrong += _kill_runs(Path(name) / "runs", chosen.kills)
    print(f"\n{len(wrong)} committed steps lost or others loaded, {time.monotonic() - began:.0f} s")
    print(*wrong, sep="\n")
    return int(bool(wrong))


def _kill_runs(directory: Path, kills: int) -> list[str]:
    """Kill training runs that save in the background; those that come to another end than one left in peace."""
    directory.mkdir()
    work, wrong = make_files(directory), []
    print(f"\n{'killed runs':<44}{'kills':>8}{'':>4}outcome")
    for kind in KINDS:
        for world in (1, 2):
            peace = outcome(done(work, *KINDS[kind], f"name=peace_{kind}_{world}", world=world))
            same = outcome(killed(work, kind, world, kills, f"{kind}_{world}")) == peace
            what = f"{kind}, {world} process{'es' * (world > 1)}"
            print(f"{what:<44}{kills:>8}{'':>4}{'the same' if same else 'ANOTHER'}", flush=True)
            wrong += [] if same else [f"{what}: another outcome"]
    return wrong


def _matrix(directory: Path, faults: list[str], layouts: list[str]) -> list[str]:
    """Print a row per moment and layout and a column per fault: ok, LOST, or - where it does not come."""
    wanted = {cell for cell in cells() if cell.fault in faults and cell.layout in layouts}
    wrong = []
    print(f"{'':<44}" + "".join(f"{fault:>14}" for fault in faults))
    for layout in layouts:
        print(f"-- {layout}")
        for moment in MOMENTS:
            row = []
            for fault in faults:
                cell = Cell(moment, fault, layout)
                text = "-"
                if cell in wanted:
                    try:
                        place = Path(tempfile.mkdtemp(dir=directory)) / "cell"
                        text = "ok" if try_cell(cell, place) else "-"
                    except Exception as error:
                        wrong.append(f"{cell}: {error}")
                        text = "LOST"
                row.append(text)
            print(f"{moment:<44}" + "".join(f"{text:>14}" for text in row), flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
