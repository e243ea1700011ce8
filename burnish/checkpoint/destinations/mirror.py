"""Sync a mirror with a run's directory: upload missing steps, remove those its retention drops. No torch here.

Each sync compares both sides, so a crash leaves only work for the next. A step's files go up first, then its manifest, then
COMMIT, which makes it exist. Every block is read back and compared with its hash, because an ETag may be no content hash.

Where machines share no disk, each has a partial checkpoint, `.portion-N.UUID`, with some of a step's files. Its process sends
them, then a marker, `portions/step-N/UUID.DISK`, which names them. When markers name all files, the first disk's process sends
manifest and COMMIT. Then each process removes its partial checkpoint and marker. Retention keeps steps with a marker.
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

from burnish.checkpoint.destinations.remote_steps import PORTIONS, RemoteSteps
from burnish.checkpoint.manifest import (
    COMMIT,
    COMMIT_LIMIT,
    MANIFEST,
    MANIFEST_LIMIT,
    Commit,
    FileRecord,
    block_hash,
    parse_commit,
    parse_manifest,
)
from burnish.checkpoint.retention import Retention, StepFacts, completed, read_pins, write_mirrored
from burnish.checkpoint.steps import (
    SEAL,
    TRASH,
    CommittedStep,
    files_below,
    open_step,
    portion_paths,
    read_commit,
    read_small,
    step_name,
    step_paths,
    verify_files,
)
from burnish.distributed.child_process import accompany, as_burnish_error
from burnish.errors import BurnishError, CorruptError, IncompatibleError, MissingError, few
from burnish.files.durable import discard, naming_failures
from burnish.files.remote import Remote
from burnish.files.storage import LOCAL, Source
from burnish.files.strict_json import encode_json, parse_json
from burnish.tracking.rundir import CHECKPOINTS, STATUS

ENVIRONMENT = "environment.json"
"""The file that names the run of a mirror, and the start of the run that owns the mirror."""
ENVIRONMENT_LIMIT = 1 << 20
"""Most bytes of that file."""
SYNC, NUDGE = "sync", "nudge"
"""Messages to the mirror process: start a sync; stop waiting for other disks."""

# Directories whose files are removed from the mirror when the run removes them.
_THINNED = ("rollouts", "traces")
KEPT = (*_THINNED, "tensorboard", "logs", "profiles", "trackers")
"""Directories of the run that are copied. With several disks, only those of the first disk are."""
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
# Seconds between two looks at the other disks' progress.
_LOOK_SECONDS = 1.0
_FILES_AT_ONCE = 4
_TRIES = 3
# Most progress messages in one sync. All must fit into the pipe, because the training process may not be reading.
_REPORTS = 100

_log = logging.getLogger(__name__)

T = TypeVar("T")
P = TypeVar("P", bound=PurePath)

# A step whose path is one disk's partial checkpoint, and the names of the files that lie there.
_Partial = tuple[CommittedStep, list[str]]
# Waits up to this many seconds; returns whether to stop waiting, because a message has arrived.
_Pause = Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class Mirror:
    """The run's directory and its mirror."""

    directory: Path
    remote: Remote
    retention: Retention | None
    """Which steps stay on the mirror; None: all."""
    start: str
    """Identifies this start of the run. If the mirror names another start, this one changes nothing there."""
    disk: int | None = None
    """Number of the disk that `directory` lies on; None if it is the only one."""

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
                while connection.recv() != SYNC:  # a nudge that arrived after its sync had ended
                    pass
            except EOFError:
                return
            steps, failure = list[int](), None
            try:
                steps = sync.run(connection.send, connection.poll)
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
        self._markers = self._steps.remote.below(PORTIONS)
        # Bytes to move, as each is sent and read back; those moved; and those of the last report.
        self._total = self._moved_bytes = self._reported = 0
        self._lock = threading.Lock()
        self._failed: CorruptError | None = None
        self._local: dict[int, Commit] = {}
        self._remote: dict[int, Commit] = {}
        self._facts: dict[int, StepFacts] = {}
        self._pins: Collection[int] | None = None
        # Size and modification time of each output file when it was sent.
        self._outputs: dict[str, tuple[int, int]] = {}
        self._is_listed = False
        # The files that each marker names.
        self._named: dict[str, frozenset[str]] = {}

    def run(
        self,
        tell: Callable[[float], None] = lambda part: None,
        pause: _Pause = lambda seconds: True,
    ) -> list[int]:
        """Send small files first, so that no step lacks its metrics; then steps, newest first, and partial checkpoints.

        Apply retention; return the steps sent. While partial checkpoints wait, `pause` is called; True
        ends the sync. `tell` gets the progress as fractions of 1. A damaged or removed step delays no other. Raises `BurnishError`; for damage, at the end.
        """
        self._tell, self._failed = tell, None
        self._moved_bytes = self._reported = 0
        self._mirror.check()
        is_first = not self._mirror.disk
        if is_first:
            self._compare()
        missing = sorted(self._local.keys() - self._settled().keys(), reverse=True)
        paths = reversed(portion_paths(self._mirror.root, LOCAL))
        found = [self._tried(path, open_partial) for path in paths]
        partials = [partial for partial in found if partial is not None]
        sizes = [self._local[step].total_bytes for step in missing]
        sizes += [_size(step, names) for step, names in partials]
        self._total = 2 * sum(sizes)
        sent: list[int] = []
        if is_first:
            self._send_outputs()
            self._note_mirrored()
            for step in missing:
                if self._send_step(step):
                    sent.append(step)
                    self._note_mirrored()
            self._apply_retention()
        made = self._send_partials(partials, pause)
        if is_first and made:  # retention may now drop older steps
            self._compare()
            self._note_mirrored()
            while self._apply_retention() and not pause(_LOOK_SECONDS):
                pass
        if self._failed is not None:
            raise self._failed
        return sent + made

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
        known = {s: c for s, c in self._remote.items() if s in paths and s not in self._local}
        self._remote = known | _commits(_without(paths, known), self._steps)
        retention = self._mirror.retention
        if retention is None:
            return
        facts = [self._facts[step] for step in known if step in self._facts]
        facts += retention.facts(map(self._path, self._local), LOCAL)
        others = _without(paths, self._local.keys() | known)
        facts += retention.facts(others.values(), self._steps)
        self._facts = {each.step: each for each in completed(facts)}
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
        root, url = self._mirror.root, str(self._mirror.remote)
        with naming_failures(f"{root} cannot be written"):
            write_mirrored(root, url, self._settled(), LOCAL)

    def _apply_retention(self) -> set[int]:
        """Remove dropped and unfinished steps; return dropped ones that another disk has yet to see."""
        there = self._steps
        there.refresh()
        alone, outlived = self._mirror.disk is None, self._outlived(self._remote)
        marked = set[str]() if alone else there.marked()
        unseen = {step for step in outlived if self._remote[step].uuid in marked}
        paths = step_paths(there.root, there)
        for step in paths.keys() & outlived - unseen:
            self._mirror.check()
            there.remove(paths[step])
        if alone:
            there.clear(self._mirror.check)
        return unseen

    def _send_step(self, step: int) -> bool:
        def send(path: Path) -> bool:
            opened = open_step(path)
            if self._send_files(opened, opened.manifest.files):
                self._seal(opened)
            return True

        if not self._tried(self._path(step), send):
            return False
        # If this step replaced another, a hung removal may still take effect. The next sync looks again.
        if self._remote.pop(step, None) is None:
            self._remote[step] = self._local[step]
        return True

    def _tried(self, path: Path, use: Callable[[Path], T]) -> T | None:
        try:
            with naming_failures(f"{path} cannot be read"):
                return use(path)
        except BurnishError as error:
            if LOCAL.kind(path) is None:
                _log.warning("%s is not on the mirror: it was removed here meanwhile", path)
            elif isinstance(error, CorruptError):
                self._failed = self._failed or error
            else:
                raise
            return None

    def _send_files(self, step: CommittedStep, names: Iterable[str]) -> bool:
        """Send these files; return False if their COMMIT is there. First remove another step's COMMIT and foreign files."""
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
                pool.submit(self._send_file, step, name, remote, sizes.get(name)) for name in names
            ]
            try:
                for each in sending:
                    each.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return True

    def _send_file(self, step: CommittedStep, name: str, remote: Remote, there: int | None) -> None:
        self._mirror.check()
        record = step.manifest.files[name]
        if there == record.size and self._is_intact(remote, name, record):
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
        for number, wanted in enumerate(record.blocks):
            start = number * record.block_bytes
            block = buffer[: min(record.block_bytes, record.size - start)]
            try:
                remote.read_into(name, block, start)
            except CorruptError:  # the file is too short
                return False
            if block_hash(block) != wanted:
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

    def _send_partials(self, partials: Iterable[_Partial], pause: _Pause) -> list[int]:
        """Send partial checkpoints and wait for other disks'; return completed steps."""
        waiting = [step for step, names in partials if self._send_partial(step, names)]
        done: list[int] = []
        while waiting:
            for step in [each for each in waiting if self._is_whole(each)]:
                waiting.remove(step)
                done.append(step.step)
                path = Path(step.path)
                with naming_failures(f"{path} cannot be removed"):
                    discard(LOCAL, path, self._mirror.root / TRASH)
                self._markers.remove(self._marker(step))
            if waiting and pause(_LOOK_SECONDS):
                break
        return done

    def _send_partial(self, step: CommittedStep, names: list[str]) -> bool:
        """Send a partial checkpoint and its marker. Return False if it is damaged or gone, or a write may take effect late."""
        if self._markers.stat(self._marker(step)) is not None:
            self._moved(2 * _size(step, names))
            return True
        is_new = self._tried(Path(step.path), lambda path: self._send_files(step, names))
        if not is_new:
            return is_new is not None
        if self._mirror.remote.may_change_late:
            return False  # the next process sends the marker, after which no late write can come
        self._mirror.check()
        self._markers.put(self._marker(step), encode_json({"files": names}))
        return True

    def _is_whole(self, step: CommittedStep) -> bool:
        """Return whether COMMIT is there."""
        is_sealed = False
        with suppress(MissingError):
            is_sealed = self._place_of(step).read(COMMIT, COMMIT_LIMIT) == step.commit.encode()
        if is_sealed or self._mirror.disk:
            return is_sealed
        if not self._files_named(step) >= step.manifest.files.keys():
            return False
        self._require_all(step)
        self._seal(step)
        return True

    def _require_all(self, step: CommittedStep) -> None:
        there = self._place_of(step)
        found = {file.name: file.size for file in there.files()}
        files = step.manifest.files
        gone = [name for name, record in files.items() if found.get(name) != record.size]
        if gone:
            self._mirror.check()
            self._markers.remove_below(step_name(step.step))
            raise BurnishError(
                f"{there} is not what the disks have sent",
                have=f"without, or in another size: {few(gone)}",
                want=f"the {len(files)} files of {MANIFEST}",
                do="see that nobody else removes or writes files there; they are sent again",
            )

    def _marker(self, step: CommittedStep) -> str:
        return f"{step_name(step.step)}/{step.commit.uuid}.{self._mirror.disk or 0}"

    def _files_named(self, step: CommittedStep) -> set[str]:
        found: set[str] = set()
        for file in self._markers.files(step_name(step.step)):
            if file.name.startswith(f"{step_name(step.step)}/{step.commit.uuid}."):
                if file.name not in self._named:
                    text = self._markers.read(file.name, MANIFEST_LIMIT)
                    marker = parse_json(text, f"{self._markers.url.below(file.name)}")
                    self._named[file.name] = frozenset(marker["files"])
                found |= self._named[file.name]
        return found

    def _send_outputs(self) -> None:
        """Copy changed small files, and those in `KEPT`; remove files that were thinned here."""
        directory, remote = self._mirror.directory, self._mirror.remote
        if not self._is_listed:
            found = (file for kept in KEPT for file in remote.files(kept))
            self._outputs |= {file.name: (file.size, _THERE_BEFORE) for file in found}
            self._is_listed = True
        kept = [path for each in KEPT for path in sorted((directory / each).rglob("[!.]*"))]
        here = set[str]()
        for path in [*(directory / name for name in _CHANGING), *kept]:
            name = path.relative_to(directory).as_posix()
            with naming_failures(f"{path} cannot be read"), suppress(FileNotFoundError):
                if path.is_dir():
                    continue
                here.add(name)
                state = path.stat()
                mark = (state.st_size, state.st_mtime_ns)
                if self._outputs.get(name) not in (mark, (state.st_size, _THERE_BEFORE)):
                    _put_copy(remote, name, path)
                self._outputs[name] = mark
        for each in _THINNED:
            there = {name for name in self._outputs if name.startswith(f"{each}/")}
            if there & here:  # without any file here, the directory was lost and not thinned
                for name in sorted(there - here):
                    self._mirror.check()
                    remote.remove(name)
                    del self._outputs[name]


def open_partial(path: Path) -> _Partial:
    """Open a partial checkpoint. Raises `CorruptError` for a wrong seal, manifest or name."""
    seal = read_small(path, SEAL, COMMIT_LIMIT, LOCAL)
    commit = parse_commit(seal, f"{path / SEAL}")
    data = read_small(path, MANIFEST, MANIFEST_LIMIT, LOCAL)
    manifest = parse_manifest(data, commit, f"{path / MANIFEST}")
    names = {name for name, _ in files_below(path, "", LOCAL)} - {SEAL, MANIFEST}
    if alien := names - manifest.files.keys():
        raise CorruptError(
            f"{path / min(alien)} is in no manifest",
            have="a file that was not saved with the step",
            want="files of the manifest",
            do="move it away",
        )
    return CommittedStep(path, commit, manifest, {}), sorted(names)


def _altered(remote: Remote, name: str) -> BurnishError:
    return BurnishError(
        f"{remote.url.below(name)} is not what was sent",
        have="other bytes, when it was read back",
        want="the bytes that were committed",
        do="see that the service is in order, and that nobody else writes there",
    )


def _size(step: CommittedStep, names: Iterable[str]) -> int:
    return sum(step.manifest.files[name].size for name in names)


def _commits(paths: Mapping[int, PurePath], source: Source) -> dict[int, Commit]:
    found = {}
    for step, path in paths.items():
        try:
            found[step] = read_commit(path, source)
        except (CorruptError, IncompatibleError) as error:
            _log.warning("a step is not mirrored, because it cannot be read: %s", error)
    return found


def _without(paths: Mapping[int, P], steps: Container[int]) -> dict[int, P]:
    return {step: path for step, path in paths.items() if step not in steps}


def _put_copy(remote: Remote, name: str, source: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="burnish-") as directory:
        remote.put_file(name, Path(shutil.copyfile(source, Path(directory) / source.name)))
