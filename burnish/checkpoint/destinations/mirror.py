"""Sync a mirror with a run's directory: upload missing steps, remove those its retention drops. No torch here.

Each sync compares both sides, so a crash leaves only work for the next. A step's files go up first, then its manifest, then
COMMIT, which makes it exist. Every block is read back and compared with its hash, because an ETag may be no content hash.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path, PurePath
from typing import TypeVar

from burnish.checkpoint.destinations.remote_steps import RemoteSteps
from burnish.checkpoint.manifest import (
    COMMIT,
    COMMIT_LIMIT,
    MANIFEST,
    MANIFEST_LIMIT,
    Commit,
    FileRecord,
    block_hash,
)
from burnish.checkpoint.retention import Retention, StepFacts, completed, read_pins, write_mirrored
from burnish.checkpoint.steps import (
    CommittedStep,
    open_step,
    read_commit,
    step_name,
    step_paths,
    verify_files,
)
from burnish.distributed.child_process import accompany, as_burnish_error
from burnish.errors import BurnishError, CorruptError, IncompatibleError, MissingError
from burnish.files.durable import naming_failures
from burnish.files.remote import Remote
from burnish.files.storage import LOCAL, Source
from burnish.tracking.rundir import CHECKPOINTS, STATUS

ENVIRONMENT = "environment.json"
"""The file that names the run of a mirror, and the start of the run that owns the mirror."""
ENVIRONMENT_LIMIT = 1 << 20
"""Most bytes of that file."""
SYNC = "sync"
"""The message that makes the mirror process start a sync."""

# Directories whose files are removed from the mirror when the run removes them.
_THINNED = ("rollouts", "traces")
KEPT = (*_THINNED, "tensorboard", "logs", "profiles", "trackers")
"""Directories of the run that are copied."""
# Stands for the modification time of a file that was on the mirror before this process started.
_THERE_BEFORE = 0
_CHANGING = (
    "config.yaml",
    "git.diff",
    STATUS,
    "metrics.jsonl",
    "report.html",
    f"{CHECKPOINTS}/pins.json",
)
_FILES_AT_ONCE = 4
_TRIES = 3
# Most progress messages in one sync. All must fit into the pipe, because the training process may not be reading.
_REPORTS = 100

_log = logging.getLogger(__name__)

P = TypeVar("P", bound=PurePath)


@dataclass(frozen=True, slots=True)
class Mirror:
    """The run's directory and its mirror."""

    directory: Path
    remote: Remote
    retention: Retention | None
    """Which steps stay on the mirror; None: all."""
    start: str
    """Identifies this start of the run. If the mirror names another start, this one changes nothing there."""

    @property
    def root(self) -> Path:
        """The local directory of steps."""
        return self.directory / CHECKPOINTS

    def steps(self) -> RemoteSteps:
        """Return the mirror's steps."""
        return RemoteSteps(self.remote.below(CHECKPOINTS))

    def check(self) -> None:
        """Raise `IncompatibleError` when another run or start has the mirror."""
        try:
            text = self.remote.read(ENVIRONMENT, ENVIRONMENT_LIMIT)
            start = json.loads(text).get("start")
        except (MissingError, ValueError, AttributeError) as error:
            start = str(error)
        if start != self.start:
            raise IncompatibleError(
                f"this run no longer has {self.remote} to itself",
                have=f"start {start}",
                want=f"start {self.start}",
                do="see which other run was started with this mirror",
            )


@dataclass(frozen=True, slots=True)
class Synced:
    """The outcome of a sync."""

    steps: tuple[int, ...]
    """The steps that were sent."""
    error: BurnishError | None
    """None when the mirror has all that it should."""
    may_change_late: bool = False
    """Whether a hung write was abandoned. It may still take effect while the process lives."""


def serve(pipe: int, parent: int) -> None:
    """Run `parent`'s mirror process. `pipe` is a descriptor."""
    accompany(parent)
    with Connection(pipe) as connection:
        mirror: Mirror = connection.recv()
        sync = Sync(mirror)
        while True:
            try:
                connection.recv()
            except EOFError:
                return
            steps = list[int]()
            failure: BurnishError | None = None
            try:
                steps = sync.run(connection.send)
            except Exception as error:  # noqa: BLE001 - sent to the training process, which goes on
                what = f"{mirror.remote} could not be brought up to date"
                do = "correct what the error names; the next save, or the same command again, continues"
                failure = as_burnish_error(error, what, do)
            connection.send(Synced(tuple(steps), failure, mirror.remote.may_change_late))


class Sync:
    """The syncs of one process. Each rereads COMMIT of local steps' copies, because local retention relies on it."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._steps = mirror.steps()
        # Bytes to move: each is sent and read back.
        self._total = 0
        self._moved_bytes = 0
        # Moved bytes at the last report.
        self._reported = 0
        self._lock = threading.Lock()
        self._failed: CorruptError | None = None
        self._local: dict[int, Commit] = {}
        self._remote: dict[int, Commit] = {}
        self._facts: dict[int, StepFacts] = {}
        self._pins: Collection[int] | None = None
        # Size and modification time of each output file when it was sent.
        self._outputs: dict[str, tuple[int, int]] = {}
        self._is_listed = False

    def run(self, tell: Callable[[float], None] = lambda part: None) -> list[int]:
        """Send small files first, so that no step lacks its metrics; then steps, newest first. Apply retention.

        Return the steps sent. `tell` gets the progress as fractions of 1. A damaged or removed step delays no other. Raises
        `BurnishError`; for damage, at the end.
        """
        self._tell = tell
        self._failed = None
        self._moved_bytes = 0
        self._reported = 0
        self._mirror.check()
        self._compare()
        missing = sorted(self._local.keys() - self._settled().keys(), reverse=True)
        self._total = 2 * sum(self._local[step].total_bytes for step in missing)
        self._send_outputs()
        self._note_mirrored()
        sent: list[int] = []
        for step in missing:
            if self._send_step(step):
                sent.append(step)
                self._note_mirrored()
        self._apply_retention()
        if self._failed is not None:
            raise self._failed
        return sent

    def _moved(self, count: int) -> None:
        with self._lock:
            self._moved_bytes = min(self._moved_bytes + count, self._total)
            if self._moved_bytes - self._reported > self._total // _REPORTS:
                self._reported = self._moved_bytes
                self._tell(self._moved_bytes / self._total)

    def _compare(self) -> None:
        self._steps.refresh()
        paths = step_paths(self._steps.root, self._steps)
        self._local = _commits(step_paths(self._mirror.root, LOCAL), LOCAL)
        # A step that is only there was read before, and nobody else writes there. Local steps' copies are read anew.
        known = {s: c for s, c in self._remote.items() if s in paths and s not in self._local}
        self._remote = known | _commits(_without(paths, known), self._steps)
        retention = self._mirror.retention
        if retention is None:
            return
        facts = [self._facts[step] for step in known if step in self._facts]
        facts += retention.facts(map(self._path, self._local), LOCAL)
        others = _without(paths, self._local.keys() | known)
        facts += retention.facts(others.values(), self._steps)
        self._facts = {step_facts.step: step_facts for step_facts in completed(facts)}
        try:
            self._pins = read_pins(self._mirror.root, LOCAL)
        except CorruptError as error:
            _log.warning("nothing is removed from the mirror: %s", error)
            self._pins = None

    def _outlived(self, steps: Iterable[int]) -> set[int]:
        if self._mirror.retention is None or self._pins is None:
            return set()
        facts = [self._facts[step] for step in steps if step in self._facts]
        return set(self._mirror.retention.outlived(facts, self._pins))

    def _settled(self) -> dict[int, str]:
        unwanted = self._outlived(self._facts)
        return {
            step: commit.uuid
            for step, commit in self._local.items()
            if self._remote.get(step) == commit or step in unwanted
        }

    def _note_mirrored(self) -> None:
        root = self._mirror.root
        with naming_failures(f"{root} cannot be written"):
            write_mirrored(root, str(self._mirror.remote), self._settled(), LOCAL)

    def _apply_retention(self) -> None:
        """Remove dropped and unfinished steps."""
        remote_steps = self._steps
        remote_steps.refresh()
        paths = step_paths(remote_steps.root, remote_steps)
        for step in paths.keys() & self._outlived(self._remote):
            self._mirror.check()
            remote_steps.remove(paths[step])
        remote_steps.clear(self._mirror.check)

    def _send_step(self, step: int) -> bool:
        """Send a step; return False if it is damaged, or was removed here meanwhile."""
        path = self._path(step)
        try:
            with naming_failures(f"{path} cannot be read"):
                opened = open_step(path)
                if self._send_files(opened):
                    self._seal(opened)
        except BurnishError as error:
            if LOCAL.kind(path) is None:
                _log.warning("%s is not on the mirror: it was removed here meanwhile", path)
            elif isinstance(error, CorruptError):
                self._failed = self._failed or error
            else:
                raise
            return False
        # If this step replaced another, a hung removal may still take effect. The next sync looks again.
        if self._remote.pop(step, None) is None:
            self._remote[step] = self._local[step]
        return True

    def _send_files(self, step: CommittedStep) -> bool:
        """Send the files; return False if their COMMIT is there. First remove another step's COMMIT and foreign files."""
        remote = self._place_of(step)
        sizes = {file.name: file.size for file in remote.files()}
        if COMMIT in sizes:
            if remote.read(COMMIT, COMMIT_LIMIT) == step.commit.encode():
                return False
            self._mirror.check()
            remote.remove(COMMIT)
        for name in sizes.keys() - step.manifest.files.keys() - {COMMIT}:
            remote.remove(name)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            sending = [
                pool.submit(self._send_file, step, name, remote, sizes.get(name))
                for name in step.manifest.files
            ]
            try:
                for file in sending:
                    file.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return True

    def _send_file(
        self, step: CommittedStep, name: str, remote: Remote, remote_size: int | None
    ) -> None:
        self._mirror.check()
        record = step.manifest.files[name]
        if remote_size == record.size and self._is_intact(remote, name, record):
            self._moved(record.size)
            return
        for _ in range(_TRIES):
            remote.put_file(name, Path(step.path) / name, self._moved)
            if self._is_intact(remote, name, record):
                return
        for damage in verify_files(step, [name]):
            raise damage
        raise _altered(remote, name)

    def _is_intact(self, remote: Remote, name: str, record: FileRecord) -> bool:
        buffer = memoryview(bytearray(min(record.block_bytes, record.size)))
        for number, committed_hash in enumerate(record.blocks):
            start = number * record.block_bytes
            block = buffer[: min(record.block_bytes, record.size - start)]
            try:
                remote.read_into(name, block, start)
            except CorruptError:  # the file is too short
                return False
            if block_hash(block) != committed_hash:
                return False
            self._moved(len(block))
        return True

    def _seal(self, step: CommittedStep) -> None:
        remote = self._place_of(step)
        for name, data in ((MANIFEST, step.manifest.encode()), (COMMIT, step.commit.encode())):
            self._mirror.check()
            remote.put(name, data)
            if remote.read(name, MANIFEST_LIMIT) != data:
                raise _altered(remote, name)

    def _path(self, step: int) -> Path:
        return self._mirror.root / step_name(step)

    def _place_of(self, step: CommittedStep) -> Remote:
        return self._steps.remote.below(step_name(step.step))

    def _send_outputs(self) -> None:
        """Copy changed small files, and those in `KEPT`; remove files that were thinned here."""
        directory = self._mirror.directory
        remote = self._mirror.remote
        if not self._is_listed:
            files = (file for folder in KEPT for file in remote.files(folder))
            self._outputs |= {file.name: (file.size, _THERE_BEFORE) for file in files}
            self._is_listed = True
        paths = [directory / name for name in _CHANGING]
        for folder in KEPT:
            paths += sorted((directory / folder).rglob("[!.]*"))
        present_names = set[str]()
        for path in paths:
            name = path.relative_to(directory).as_posix()
            with naming_failures(f"{path} cannot be read"), suppress(FileNotFoundError):
                if path.is_dir():
                    continue
                present_names.add(name)
                state = path.stat()
                mark = (state.st_size, state.st_mtime_ns)
                if self._outputs.get(name) not in (mark, (state.st_size, _THERE_BEFORE)):
                    _put_copy(remote, name, path)
                self._outputs[name] = mark
        for folder in _THINNED:
            there = {name for name in self._outputs if name.startswith(f"{folder}/")}
            # Without any file here, the directory was lost and not thinned.
            if there & present_names:
                for name in sorted(there - present_names):
                    self._mirror.check()
                    remote.remove(name)
                    del self._outputs[name]


def _altered(remote: Remote, name: str) -> BurnishError:
    return BurnishError(
        f"{remote.url.below(name)} is not what was sent",
        have="other bytes, when it was read back",
        want="the bytes that were committed",
        do="see that the service is in order, and that nobody else writes there",
    )


def _commits(paths: Mapping[int, PurePath], source: Source) -> dict[int, Commit]:
    commits = {}
    for step, path in paths.items():
        try:
            commits[step] = read_commit(path, source)
        except (CorruptError, IncompatibleError) as error:
            _log.warning("a step is not mirrored, because it cannot be read: %s", error)
    return commits


def _without(paths: Mapping[int, P], steps: Container[int]) -> dict[int, P]:
    return {step: path for step, path in paths.items() if step not in steps}


def _put_copy(remote: Remote, name: str, source: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="burnish-") as directory:
        remote.put_file(name, Path(shutil.copyfile(source, Path(directory) / source.name)))
