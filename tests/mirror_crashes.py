"""Machines that die while they copy to a mirror, and what an empty machine finds there."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from aftermath import Verdict
from checkpoints_for_tests import BIG_SHAPES, contents_of, fill_and_compare, make_state
from distributed import forkserver

from burnish.checkpoint.committed import committed
from burnish.checkpoint.directory import Checkpoints
from burnish.checkpoint.mirror import Mirror, Sync
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.verify import verify
from burnish.errors import BurnishError
from burnish.files.remote import Remote
from burnish.parallel.layout import Layout

NEW, OLD = "step-00000002", "step-00000001"
MOMENTS = {
    "upload, before the first object": lambda call, name: call == "put" and NEW in name,
    "upload, mid-object": lambda call, name: call == "sent" and NEW in name,
    "upload, data without its manifest": lambda call, name: call == "put" and name == f"{NEW}/manifest.json",
    "upload, data without COMMIT": lambda call, name: call == "put" and name == f"{NEW}/COMMIT",
    "upload, COMMIT not read back": lambda call, name: call == "read" and name == f"{NEW}/COMMIT",
    "mirror, before the old step's COMMIT goes": lambda call, name: call == "remove" and OLD in name,
    "mirror, the old step's COMMIT is gone": lambda call, name: call == "remove below" and OLD in name,
}  # fmt: skip
"""Dangerous moments of bringing a mirror in line when it has step 1, lacks step 2 and keeps one: before which call."""


class DeadlyRemote(Remote):
    """A machine that is switched off at a moment."""

    moment = ""

    def below(self, name):
        below = DeadlyRemote(self.url.below(name), self.patience)
        below.moment = self.moment
        return below

    def note(self, call, name):
        path = f"{self.url.below(name)}".rpartition("checkpoints/")[2]
        if self.moment and MOMENTS[self.moment](call, path):
            os.kill(os.getpid(), signal.SIGKILL)

    def put(self, name, data):
        self.note("put", name)
        super().put(name, data)

    def put_file(self, name, source, advance=None):
        self.note("put", name)
        super().put_file(name, source, lambda count: self.note("sent", name))

    def read(self, name, limit):
        self.note("read", name)
        return super().read(name, limit)

    def remove(self, name):
        self.note("remove", name)
        super().remove(name)

    def remove_below(self, name):
        self.note("remove below", name)
        super().remove_below(name)


def mirror_at(directory: Path, remote: Remote, keep: int = 1) -> Mirror:
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    remote.put("environment.json", json.dumps({"start": "this"}).encode())
    return Mirror(directory, remote, Retention(keep), "this")


def sync(mirror: Mirror) -> None:
    Sync(mirror, lambda count: None).run()


def save(mirror: Mirror, step: int, shapes=None) -> None:
    with Checkpoints(mirror.root, Layout(), retention=Retention(3)) as checkpoints:
        checkpoints.save(step, contents_of(*make_state(step, shapes)))


def die_at(url: str, directory: str, moment: str) -> None:
    """Steps 1 and 2, the first of them on the mirror; then the second goes up."""
    remote = DeadlyRemote(url)
    mirror = mirror_at(Path(directory), remote)
    save(mirror, 1, BIG_SHAPES)
    sync(mirror)
    save(mirror, 2, BIG_SHAPES)
    remote.moment = moment
    sync(mirror)


def copy_forever(url: str, directory: str) -> None:
    """Save a step, copy it, write down that it is on the mirror, and so on."""
    mirror = mirror_at(Path(directory), Remote(url), keep=2)
    begun = max((step.step for step in committed(mirror.root)), default=0)
    for step in range(begun + 1, 10_000):
        save(mirror, step)
        sync(mirror)
        (mirror.directory / "acked").write_text(str(step))


def aftermath(url: str, empty: Path, acked: int, newest: int, shapes=None) -> Verdict:
    """An empty machine resumes: what was acknowledged or is newer, whole, bit for bit."""

    def load(step, source):
        fill_and_compare(source, *make_state(step.step, shapes), Layout())

    mirror = mirror_at(empty, Remote(url))
    with Checkpoints(mirror.root, Layout()) as checkpoints:
        checkpoints.mirror_to(mirror)
        try:
            resumed = checkpoints.resume(load)
        except AssertionError as error:
            return Verdict(uncommitted=1, wrong=f"other numbers are loaded: {error}")
        except BurnishError as error:
            return Verdict(lost=1, wrong=str(error))
    found = 0 if resumed is None else resumed.step.step
    if found < acked:
        return Verdict(lost=acked - found, wrong=f"step {acked} was mirrored, {found} is found")
    steps = mirror.steps()
    half = [*(resumed.skipped if resumed else ())]
    half += [
        str(error)
        for step in committed(steps.root, steps)
        for error in verify(step.path, mirror.steps())
    ]
    if found > newest or half:
        return Verdict(uncommitted=1, wrong=f"step {found}; {'; '.join(half)}")
    return Verdict()


def started(function: Callable[[str, str], None], url: str, directory: Path) -> BaseProcess:
    """A function of this module in a process of its own, forked from one that has torch."""
    process = forkserver().Process(target=function, args=(url, str(directory)), daemon=True)
    process.start()
    return process


def try_moment(url: str, moment: str, directory: Path) -> Verdict:
    """Die at a moment; then look from an empty machine, and from the one that comes back."""
    process = started(partial(die_at, moment=moment), url, directory / "one")
    process.join(120)
    if process.exitcode != -signal.SIGKILL:
        return Verdict(struck=False, wrong=f"ended with {process.exitcode}")
    found = aftermath(url, directory / "empty", 1, 2, BIG_SHAPES)
    if not found.is_good:
        return found
    mirror = mirror_at(directory / "one", Remote(url))
    sync(mirror)
    steps = mirror.steps()
    left = {file.name.partition("/")[0] for file in steps.remote.files()}
    return Verdict(wrong="" if left == {NEW} else f"left on the mirror: {sorted(left)}")


def try_kills(url: str, directory: Path, rng: random.Random, kills: int) -> Iterator[Verdict]:
    """Kill a machine that copies one step after the other at random moments, again and again."""
    run = directory / "run"
    for number in range(kills):
        before = _acked(run)
        process = started(copy_forever, url, run)
        deadline = time.monotonic() + 60
        while _acked(run) == before and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        newest = max(step.step for step in committed(run / "checkpoints"))
        yield aftermath(url, directory / f"empty-{number}", _acked(run), newest)


def _acked(run: Path) -> int:
    try:
        return int((run / "acked").read_text() or 0)
    except FileNotFoundError:
        return 0
