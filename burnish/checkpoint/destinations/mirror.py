"""Sync a mirror with a run's directory: upload what is missing, remove what its retention drops.

Each sync compares both sides and remembers nothing, so a machine that dies leaves only work for the next. It runs in a process of
its own (`burnish.checkpoint.destinations.uploader`). No torch here.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from burnish.checkpoint.destinations.mirrored import write_mirrored
from burnish.checkpoint.destinations.remote_steps import RemoteSteps
from burnish.checkpoint.destinations.upload import Moved, upload
from burnish.checkpoint.manifest import Commit
from burnish.checkpoint.retention import Facts, Retention, completed, read_pins
from burnish.checkpoint.steps import open_step, read_commit, step_paths
from burnish.errors import BurnishError, CorruptError, IncompatibleError, MissingError
from burnish.files.durable import naming_failures
from burnish.files.remote import Remote
from burnish.files.storage import LocalStorage, Source
from burnish.tracking.rundir import CHECKPOINTS

ENVIRONMENT = "environment.json"
"""The file that says which run a mirror belongs to, and which start of it has it."""
ENVIRONMENT_LIMIT = 1 << 20
"""Most bytes that it may have."""

_KEPT = ("rollouts", "tensorboard")
_CHANGING = ("config.yaml", "metrics.jsonl", "report.html", f"{CHECKPOINTS}/pins.json")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mirror:
    """What is mirrored, and where to."""

    directory: Path
    """The run's directory."""
    remote: Remote
    """Its copy."""
    retention: Retention | None
    """Which steps stay on the mirror; None: all."""
    start: str
    """Names this start of the run; while the mirror names another, nothing is changed there."""
    disk: int | None = None
    """Which of several disks that meet there `directory` lies on; None where it is the only one."""

    @property
    def root(self) -> Path:
        """The local steps."""
        return self.directory / CHECKPOINTS

    def steps(self) -> RemoteSteps:
        """The steps on the mirror."""
        return RemoteSteps(self.remote.below(CHECKPOINTS))

    def check(self) -> None:
        """Raise `IncompatibleError` when another start of the run, or another run, has taken the mirror."""
        try:
            text = self.remote.read(ENVIRONMENT, ENVIRONMENT_LIMIT)
            found = json.loads(text).get("start")
        except (MissingError, ValueError, AttributeError) as error:
            found = str(error)
        if found != self.start:
            raise IncompatibleError(
                f"this run no longer has {self.remote} to itself",
                have=f"start {found}",
                want=f"start {self.start}",
                do="see which other run was started with this mirror",
            )


@dataclass(frozen=True, slots=True)
class Seen:
    """What one process has seen or put on a mirror, and need not ask for again.

    Seals of local steps are read each time all the same: they decide what may be removed here.
    """

    commits: dict[int, Commit] = field(default_factory=dict)
    """The seals of its steps that are not here."""
    facts: dict[int, Facts] = field(default_factory=dict)
    """What retention asks of those that are not here."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size and time of the run's small files when they were sent."""

    def forget(self, kept: Container[int]) -> None:
        """Drop the steps that are gone from there."""
        for known in (self.commits, self.facts):
            for step in [step for step in known if step not in kept]:
                del known[step]


class Sync:
    """One comparison of both sides; `run` acts on it. Raises `BurnishError`.

    `seen` is what earlier syncs of this process know.
    """

    def __init__(self, mirror: Mirror, moved: Moved, seen: Seen | None = None) -> None:
        self._mirror = mirror
        self._seen = seen or Seen()
        self._moved = moved
        self._storage = LocalStorage()
        self._there = mirror.steps()
        mirror.check()
        self._paths = step_paths(mirror.root, self._storage)
        self._local = _commits(self._paths, self._storage)
        self._remote = self._find_remote()
        self._facts: dict[int, Facts] = {}
        self._pins: dict[int, str] | None = None
        if mirror.retention is not None:
            self._facts = self._find_facts(mirror.retention)
            self._pins = _pins(mirror.root, self._storage)
        self._unwanted = self._outlived(self._facts)
        self.unseen: set[int] = set()
        """After `run` or `retain`: steps that outlived their use on the mirror, and that another disk has yet to see there."""

    def missing(self) -> list[int]:
        """The committed steps that the mirror wants and has not, newest first."""
        return [
            step
            for step, commit in sorted(self._local.items(), reverse=True)
            if self._remote.get(step) != commit and step not in self._unwanted
        ]

    def size(self) -> int:
        """Bytes to be moved: each is sent and read back."""
        return 2 * sum(self._local[step].total_bytes for step in self.missing())

    def run(self) -> list[int]:
        """Send the run's small files, then steps, then apply the mirror's retention; return the steps sent.

        Files go first, so a step is never there without its metrics. A step that is damaged or removed meanwhile holds back no other;
        damage is raised at the end.
        """
        sent, failed = [], None
        send_outputs(self._mirror.directory, self._mirror.remote, self._seen.files)
        self._note()
        for step in self.missing():
            try:
                if self._send(step):
                    sent.append(step)
                    self._note()
            except CorruptError as error:
                failed = failed or error
        self.retain()
        if failed is not None:
            raise failed
        return sent

    def _send(self, step: int) -> bool:
        """Whether it was there to be sent."""
        path = self._paths[step]
        try:
            with naming_failures(f"{path} cannot be read"):
                opened = open_step(path, self._storage)
                upload(opened, self._there, self._mirror.check, self._moved)
        except BurnishError:
            if path.exists():
                raise
            _log.warning("%s is not on the mirror: it went from here meanwhile", path)
            return False
        # Where another step of this number was, its removal may have hung and still come: the next sync will tell.
        if self._remote.pop(step, None) is None:
            self._remote[step] = self._local[step]
        return True

    def _find_remote(self) -> dict[int, Commit]:
        """The seals on the mirror; of steps that are not here, only the unknown are read."""
        paths, known = step_paths(self._there.root, self._there), self._seen.commits
        self._seen.forget(paths.keys() - self._local.keys())
        found = _commits({s: path for s, path in paths.items() if s not in known}, self._there)
        known |= {step: commit for step, commit in found.items() if step not in self._local}
        return known | found

    def _find_facts(self, retention: Retention) -> dict[int, Facts]:
        """What retention asks, of the steps of both sides."""
        paths = step_paths(self._there.root, self._there)
        found = [retention.fact(path, self._storage) for path in self._paths.values()]
        known = self._seen.facts
        for step in paths.keys() - self._local.keys() - known.keys():
            fact = retention.fact(paths[step], self._there)
            if fact is not None:
                known[step] = fact
        both = known | {each.step: each for each in found if each is not None}
        return {each.step: each for each in completed(both.values())}

    def _outlived(self, steps: Iterable[int]) -> set[int]:
        """Which of these the mirror's retention would not keep, if these were all."""
        if self._mirror.retention is None or self._pins is None:
            return set()
        facts = [self._facts[step] for step in steps if step in self._facts]
        return set(self._mirror.retention.outlived(facts, self._pins))

    def _note(self) -> None:
        """Write down which local steps need not be kept for the mirror's sake."""
        settled = {
            step: commit.uuid
            for step, commit in self._local.items()
            if self._remote.get(step) == commit or step in self._unwanted
        }
        with naming_failures(f"{self._mirror.root} cannot be written"):
            write_mirrored(self._mirror.root, str(self._mirror.remote), settled, self._storage)

    def retain(self) -> None:
        """Remove what the mirror's retention drops and what was never finished, but nothing that another disk may be using."""
        there = self._there
        there.refresh()
        alone, outlived = self._mirror.disk is None, self._outlived(self._remote)
        told = set[str]() if alone else there.told()
        self.unseen = {step for step in outlived if self._remote[step].uuid in told}
        gone = outlived - self.unseen
        for path in [path for step, path in step_paths(there.root, there).items() if step in gone]:
            self._mirror.check()
            there.remove(path)
        if alone:
            clear_unfinished(self._mirror, there)


def clear_unfinished(mirror: Mirror, there: RemoteSteps) -> None:
    """Remove what earlier starts sent and did not seal, while nobody sends.

    A seal that a listing lacks is asked for: stores may list late.
    """
    for path in there.unfinished():
        mirror.check()
        if not there.is_sealed(path):
            there.remove(path)


def _commits(paths: Mapping[int, PurePath], source: Source) -> dict[int, Commit]:
    """The seals of these steps; those that cannot be read are named in the log."""
    found = {}
    for step, path in paths.items():
        try:
            found[step] = read_commit(path, source)
        except (CorruptError, IncompatibleError) as error:
            _log.warning("not mirrored, for it cannot be read: %s", error)
    return found


def _pins(root: Path, storage: Source) -> dict[int, str] | None:
    """The pinned steps; None when they cannot be read, and all count as pinned."""
    try:
        return read_pins(root, storage)
    except CorruptError as error:
        _log.warning("nothing is removed from the mirror: %s", error)
        return None


def send_outputs(directory: Path, remote: Remote, sent: dict[str, tuple[int, int]]) -> None:
    """Copy the run's files beside its steps: configuration, metrics, report, rollouts, events, pins.

    Files in subdirectories are sent if their size differs there; others if size and time differ from those in `sent`, which is
    updated. Copies are sent, since training goes on writing. Raises `BurnishError`.
    """
    there = {file.name: file.size for kept in _KEPT for file in remote.files(kept)}
    changing = [directory / name for name in _CHANGING]
    kept = [path for each in _KEPT for path in sorted((directory / each).rglob("*"))]
    for path in changing + kept:
        name = path.relative_to(directory).as_posix()
        with naming_failures(f"{path} cannot be read"), suppress(FileNotFoundError):
            state = path.stat()
            mark = (state.st_size, state.st_mtime_ns)
            if path in changing and sent.get(name) != mark:
                _put_copy(remote, name, path)
                sent[name] = mark
            elif path in kept and path.is_file() and there.get(name) != state.st_size:
                _put_copy(remote, name, path)


def _put_copy(remote: Remote, name: str, source: Path) -> None:
    """Put what a file has now, though it may grow meanwhile."""
    with tempfile.TemporaryDirectory(prefix="burnish-") as directory:
        remote.put_file(name, Path(shutil.copyfile(source, Path(directory) / source.name)))
