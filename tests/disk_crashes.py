"""Two machines that share no disk and die while their portions of a step come to the mirror, and who goes on then."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

import mirror_crashes
from aftermath import Verdict
from checkpoints_for_tests import contents_of, fill_and_compare, make_state
from fork_server import Forked
from mirror_crashes import FaultyRemote, mirror_at
from ranks import run_ranks

from burnish.checkpoint.destinations.mirror import Mirror, Sync
from burnish.checkpoint.destinations.run_mirror import RunMirror
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.distributed.collectives import agree
from burnish.distributed.layout import Layout
from burnish.files.remote import Remote

STEP = "step-00000002"
COMMIT, MANIFEST, WORDS = f"{STEP}/COMMIT", f"{STEP}/manifest.json", f"portions/{STEP}"
PORTION = "portion"
ON_EACH = {
    "before its first file": lambda done, name: done == "written" and name.startswith(STEP),
    "in the middle of a file": lambda done, name: done == "sent" and name.startswith(STEP),
    "all sent, before it says so": lambda done, name: done == "written" and name.startswith(WORDS),
    "it has said so": lambda done, name: done == "looked at" and name == COMMIT,
    "all sealed, before its portion goes": lambda done, name: done == "removed" and name == PORTION,
}
ON_THE_FIRST = {
    "all have said so, before the manifest": lambda done, name: done == "written" and name == MANIFEST,
    "before COMMIT": lambda done, name: done == "written" and name == COMMIT,
    "COMMIT not read back": lambda done, name: done == "read" and name == COMMIT,
    "sealed, before the words go": lambda done, name: done == "removed" and name.startswith(WORDS),
}  # fmt: skip
MOMENTS = {
    **{(0, moment): matches for moment, matches in (ON_EACH | ON_THE_FIRST).items()},
    **{(1, moment): matches for moment, matches in ON_EACH.items()},
}
"""Dangerous moments, by the disk whose process dies at them and their name: before which call."""
SEALED = ("all sealed, before its portion goes", "sealed, before the words go")
"""At these the step is committed."""


@dataclass(frozen=True)
class DiskAssignment:
    """Where the machines' disks lie, which of them each rank has, and where they meet."""

    directory: Path
    url: str
    of_rank: tuple[int, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    """What ranks find the service of the mirror by."""

    def disk(self, rank: int) -> int | None:
        """Which disk a rank leads."""
        disks = list(dict.fromkeys(self.of_rank))
        return (
            disks.index(self.of_rank[rank])
            if self.of_rank.index(self.of_rank[rank]) == rank
            else None
        )

    def run(self, rank: int) -> Path:
        """The run's directory as a rank sees it."""
        return self.directory / f"disk-{self.of_rank[rank]}" / "run"

    def mirror(self, rank: int) -> Mirror:
        return Mirror(self.run(rank), Remote(self.url), None, "this")

    def open(self, layout: Layout, **settings) -> Checkpoints:
        os.environ.update(self.environ)
        settings = {"retention": Retention(1, mirror=self.url), **settings}
        return Checkpoints(self.run(layout.rank) / "checkpoints", layout, **settings)


def look(seconds: float) -> bool:
    """Wait for the other disks, and look often."""
    time.sleep(min(seconds, 0.02))
    return False


def save(layout, disks: DiskAssignment, step=1, shapes=None):
    """Save a step with the state of its number, and be the process that brings this disk's portion of it to the mirror."""
    with disks.open(layout) as checkpoints:
        checkpoints.save(step, contents_of(*make_state(step, shapes), layout))
        disk = disks.disk(layout.rank)
        if disk is not None:
            mirror = replace(disks.mirror(layout.rank), disk=disk)
            Sync(mirror).run(pause=look)
        with agree(layout):
            pass


def save_portions(layout, disks: DiskAssignment, step=1, shapes=None):
    """Save a step that the mirror is not told of."""
    with disks.open(layout) as checkpoints:
        checkpoints.save(step, contents_of(*make_state(step, shapes), layout))


def go_on(layout, disks: DiskAssignment, shapes=None):
    """What a start does: resume, then save the next step; the one that was resumed."""

    def compare(step, source):
        fill_and_compare(source, *make_state(step.step, shapes), layout, dim=1)

    with disks.open(layout) as checkpoints:
        checkpoints.mirror_to(RunMirror(disks.mirror(layout.rank), layout))
        resumed = checkpoints.resume(compare)
    found = 0 if resumed is None else resumed.step.step
    save(layout, disks, found + 1, shapes)
    return found


def prepare(directory: Path) -> None:
    """Two disks and their mirror in `directory`: step 1 is committed, of step 2 each disk has its portion."""
    disks = DiskAssignment(directory, f"file://{directory}/far", (0, 1))
    mirror_at(disks.run(0), Remote(disks.url))
    run_ranks(save, 2, disks, 1)
    run_ranks(save_portions, 2, disks, 2)


class Dying(Sync):
    """One that meets trouble before it removes a portion as well."""

    def _remove(self, step):
        self._mirror.remote.trouble.meet("removed", PORTION)
        super()._remove(step)


def bring(pipe: Connection, url: str, directory: Path, disk: int, moment: str) -> None:
    """Be the process of a disk until the mirror has all; with a moment, be killed then."""
    remote = FaultyRemote(url)
    if moment:
        remote.trouble.matches = MOMENTS[disk, moment]
    mirror = Mirror(directory, remote, None, "this", disk)
    Dying(mirror).run(pause=look)


def try_moment(
    prepared: Path, directory: Path, disk: int, moment: str, *, goes_on: bool
) -> Verdict:
    """Kill the machine of a disk at a moment, and then the other's; look from an empty machine, and go on with two if `goes_on`."""
    shutil.copytree(prepared, directory, dirs_exist_ok=True)
    disks = DiskAssignment(directory, f"file://{directory}/far", (0, 1))
    processes = [
        Forked(bring, disks.url, disks.run(each), each, moment if each == disk else "")
        for each in range(2)
    ]
    try:
        struck = processes[disk].wait(250) == -signal.SIGKILL
    except TimeoutError:
        struck = False
    for process in processes:
        process.kill()
    acked = 2 if moment in SEALED else 1
    newest = 2 if acked == 2 or moment == "COMMIT not read back" else 1
    found = mirror_crashes.aftermath(disks.url, directory / "empty", acked, newest)
    if not (struck and found.is_good and goes_on):
        return Verdict(struck, found.lost, found.uncommitted, found.wrong)
    resumed = run_ranks(go_on, 2, DiskAssignment(directory / "new", disks.url, (0, 1)))
    steps = disks.mirror(0).steps()
    names = {file.name.partition("/")[0] for file in steps.remote.files()}
    wanted = {f"step-{step:08d}" for step in range(1, resumed[0] + 2)}
    return Verdict(wrong="" if names == wanted else f"on the mirror: {sorted(names)}")
