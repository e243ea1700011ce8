"""Machines that die while they copy to a mirror, services that fail or hang, and what an empty machine finds there."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock

from burnish.checkpoint.destinations.mirror import Mirror, Sync
from burnish.checkpoint.destinations.run_mirror import RunMirror
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.steps import verify
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.remote import Remote, RetryPolicy
from support.checkpoints.states import (
    BIG_SHAPES,
    committed,
    contents_of,
    fill_and_compare,
    make_state,
)
from support.faults.verdict import Verdict
from support.ranks.fork_server import Forked

NEW, OLD = "step-00000002", "step-00000001"
MOMENTS = {
    "upload, before the first object": lambda done, name: done == "written" and NEW in name,
    "upload, mid-object": lambda done, name: done == "sent" and NEW in name,
    "upload, data without its manifest": lambda done, name: done == "written" and name == f"{NEW}/manifest.json",
    "upload, data without COMMIT": lambda done, name: done == "written" and name == f"{NEW}/COMMIT",
    "upload, COMMIT not read back": lambda done, name: done == "read" and name == f"{NEW}/COMMIT",
    "mirror, before the old step's COMMIT goes": lambda done, name: done == "removed" and name == f"{OLD}/COMMIT",
    "mirror, the old step's COMMIT is gone": lambda done, name: done == "removed" and name == OLD,
}  # fmt: skip
"""Dangerous moments of bringing a mirror in line when it has step 1, lacks step 2 and keeps one: before which call."""
FAULTS = ("kill", "EIO", "ENOSPC", "hang")
"""What happens: the machine is switched off; the service fails twice; it has no room as long as that process lives; it
does not answer once."""
PATIENCE = RetryPolicy(tries=4, seconds=60, first_pause=0.01, longest_pause=0.1, silence=3)
_TIMES = {"EIO": 2, "ENOSPC": 1 << 30, "hang": 1}


@dataclass
class Trouble:
    """One fault of the service, at one moment."""

    moment: str = ""
    fault: str = "kill"
    matches: Callable[[str, str], bool] | None = None
    came: int = 0
    lock: Lock = field(default_factory=Lock)

    def meet(self, done: str, name: str) -> None:
        """Have it come, if this is the moment."""
        matches = self.matches or MOMENTS.get(self.moment)
        if matches is None or not matches(done, name):
            return
        with self.lock:
            self.came += 1
            if self.came > _TIMES.get(self.fault, 1):
                return
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang":
            time.sleep(1000)  # its thread is left behind
        raise OSError(getattr(errno, self.fault), "made to fail")


class FaultyRemote(Remote):
    """A service that meets trouble, where it is tried again as any fault of a service is."""

    def __init__(self, url, policy=None, trouble=None):
        super().__init__(url, policy)
        self.trouble = trouble or Trouble()

    def below(self, name):
        return FaultyRemote(self.url.below(name), self.policy, self.trouble)

    def _meet(self, done, name):
        self.trouble.meet(done, f"{self.url.below(name)}".rpartition("checkpoints/")[2])

    def _retry(self, name, done, call):
        def attempt(*where):
            self._meet(done, name)
            return call(*where)

        return super()._retry(name, done, attempt)

    def put_file(self, name, source, advance=None):
        super().put_file(name, source, lambda count: self._meet("sent", name))


def mirror_at(directory: Path, remote: Remote, keep: int = 1) -> Mirror:
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    remote.put("environment.json", json.dumps({"start": "this"}).encode())
    return Mirror(directory, remote, Retention(keep), "this")


def sync(mirror: Mirror) -> None:
    Sync(mirror).run()


def save(mirror: Mirror, step: int, shapes=None) -> None:
    with Checkpoints(mirror.root, Layout(), retention=Retention(3)) as checkpoints:
        checkpoints.save(step, contents_of(*make_state(step, shapes)))


def meet_trouble(pipe: Connection, url: str, directory: Path, moment: str, fault: str) -> None:
    """Steps 1 and 2, the first of them on the mirror; then the second goes up. Leaves how that ended, where it ended."""
    remote = FaultyRemote(url, PATIENCE)
    mirror = mirror_at(directory, remote)
    save(mirror, 1, BIG_SHAPES)
    sync(mirror)
    save(mirror, 2, BIG_SHAPES)
    remote.trouble.moment, remote.trouble.fault = moment, fault
    try:
        sync(mirror)
        ended = "done"
    except BurnishError as error:
        ended = str(error)
    (mirror.directory / "ended").write_text(ended if remote.trouble.came else "")


def copy_forever(pipe: Connection, url: str, directory: Path) -> None:
    """Save a step, copy it, write down that it is on the mirror, and so on."""
    mirror = mirror_at(directory, Remote(url), keep=2)
    begun = max((step.step for step in committed(mirror.root)), default=0)
    for step in range(begun + 1, 10_000):
        save(mirror, step)
        sync(mirror)
        (mirror.directory / "acked").write_text(str(step))


def found_elsewhere(url: str, empty: Path, acked: int, newest: int, shapes=None) -> Verdict:
    """An empty machine resumes: what was acknowledged or is newer, whole, bit for bit."""

    def load(step, source):
        fill_and_compare(source, *make_state(step.step, shapes), Layout())

    mirror = mirror_at(empty, Remote(url))
    with Checkpoints(mirror.root, Layout()) as checkpoints:
        checkpoints.mirror_to(RunMirror(mirror, Layout()))
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


def try_moment(url: str, moment: str, directory: Path, fault: str = "kill") -> Verdict:
    """Let a fault come at a moment; then look from an empty machine, and from the one that tries again."""
    process = Forked(meet_trouble, url, directory / "one", moment, fault)
    try:
        code = process.wait(120)
    except TimeoutError as error:
        process.kill()
        return Verdict(struck=False, wrong=str(error))
    killed = code == -signal.SIGKILL
    ended = "killed" if killed else _read(directory / "one/ended")
    if killed != (fault == "kill") or not ended:
        return Verdict(struck=False, wrong=f"ended with {code}: {ended}")
    if fault != "kill" and (ended == "done") == (fault == "ENOSPC"):
        return Verdict(wrong=f"{fault} is not waited out, or not told: {ended}")
    found = found_elsewhere(url, directory / "empty", 2 if ended == "done" else 1, 2, BIG_SHAPES)
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
        process = Forked(copy_forever, url, run)
        deadline = time.monotonic() + 60
        while _acked(run) == before and process.is_running() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        newest = max(step.step for step in committed(run / "checkpoints"))
        yield found_elsewhere(url, directory / f"empty-{number}", _acked(run), newest)


def _acked(run: Path) -> int:
    return int(_read(run / "acked") or 0)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
