"""A run's mirror on one rank: resume from it, and sync it in a process beside rank 0.

A failed sync is retried after the next save and at the end. After a hung write the process ends, so that the write cannot
happen late.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath

from burnish.checkpoint.destinations.mirror import (
    ENVIRONMENT,
    ENVIRONMENT_LIMIT,
    KEPT,
    SYNC,
    Mirror,
    Synced,
)
from burnish.checkpoint.destinations.remote_steps import DAMAGED
from burnish.checkpoint.manager import Destination
from burnish.checkpoint.retention import PINS, PINS_LIMIT, Retention
from burnish.checkpoint.steps import step_paths
from burnish.config.document import recorded
from burnish.config.resume import RunIdentity
from burnish.config.schema import CheckpointConfig
from burnish.distributed.child_process import Companion
from burnish.distributed.collectives import agree, any_rank, from_main
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError, IncompatibleError, MissingError
from burnish.files.backends import RemoteFile
from burnish.files.remote import Remote, RetryPolicy
from burnish.files.strict_json import parse_object
from burnish.tracking.logs import rotated
from burnish.tracking.rundir import CHECKPOINTS, RUN, START, TRAINER, RunDirectory, write_atomically

# Most bytes of files that are read from the mirror.
_CONFIG_LIMIT = 16 << 20
_METRICS_LIMIT = 4 << 30
_FILE_LIMIT = 4 << 30
_FILES_AT_ONCE = 8
_PROCESS = "burnish.checkpoint.destinations.mirror"
# Seconds between two looks at the mirror at the end of a run.
_LOOK_SECONDS = 0.2
# Seconds before a failed sync is tried again.
_PAUSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


def open_mirror(
    url: str, settings: CheckpointConfig, directory: Path, layout: Layout
) -> Destination:
    """Return a run's mirror at a URL. Collective. Raises for a wrong URL or a missing client."""
    with agree(layout):
        remote = Remote(url)
        remote.connect()
    start = from_main(uuid.uuid4().hex, layout)
    mirror = Mirror(directory, remote, Retention.of_mirror(settings), start)
    return RunMirror(mirror, layout, _policy(settings.mirror_patience_seconds))


def _policy(patience: float) -> RetryPolicy:
    """Return how long a run waits for its mirror; the process that copies may wait longer."""
    most = RetryPolicy()
    silence = min(most.silence, max(1.0, patience))
    return replace(most, seconds=min(most.seconds, patience), silence=silence)


class RunMirror:
    """A `Destination`. Starts its process when first needed."""

    sharing = "see that nobody removes steps there, and that all ranks reach one service"

    def __init__(self, mirror: Mirror, layout: Layout, policy: RetryPolicy | None = None) -> None:
        """`policy` says how long this process tries; default: as `mirror` and so the process that copies."""
        self._copying = mirror.remote
        if policy is not None:
            mirror = replace(mirror, remote=Remote(mirror.remote.url, policy))
        self.url = str(mirror.remote)
        self.source = mirror.steps()
        self.root = self.source.root
        self._mirror = mirror
        self._layout = layout
        self._part = 0.0
        self._error: BurnishError | None = None
        self._process: Companion | None = None
        self._busy = False
        self._again = False

    def paths(self) -> Mapping[int, PurePath]:
        """Return the steps with a COMMIT."""
        self.source.refresh()
        return step_paths(self.root, self.source)

    def set_aside(self, path: PurePath, error: CorruptError) -> str:
        """Replace COMMIT by the reason."""
        self._mirror.check()
        self.source.mark_damaged(path, str(error))
        return f"{path / DAMAGED}"

    def aside(self) -> list[str]:
        """Return the files with the reasons."""
        return [str(self.root / name / DAMAGED) for name in self.source.damaged()]

    def begin(self) -> None:
        """Ask for a sync, or for another after the present one."""
        if not self._layout.is_main:
            return
        self.hear()
        if self._busy:
            self._again = True
            return
        process = self._process
        if process is None or not process.is_alive():
            self.close()
            what = "the process that copies to the mirror"
            process = self._process = Companion(_PROCESS, what)
            process.send(replace(self._mirror, remote=self._copying))
        self._part = 0.0
        self._busy = process.send(SYNC)
        if not self._busy:
            self._take(Synced((), process.died()))

    def hear(self, seconds: float = 0.0) -> bool:
        """Take all the process's messages, waiting this long for the first; return whether a sync runs."""
        while self._busy and self._process is not None:
            answer = self._process.answer(seconds)
            seconds = 0.0
            if answer is None:
                break
            if isinstance(answer, float):
                self._part = answer
                continue
            self._busy = False
            self._take(answer if isinstance(answer, Synced) else Synced((), answer))
            if self._again:
                self._again = False
                self.begin()
        return self._busy

    def close(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._busy = False

    def _take(self, synced: Synced) -> None:
        self._error = synced.error
        for step in synced.steps:
            _log.info("step %d is on the mirror, %s", step, self.url)
        if synced.error is not None:
            _log.error("THE MIRROR IS BEHIND; training goes on. %s", synced.error)
        if synced.may_change_late:
            _log.warning(
                "a write to %s hung: the process that copies is restarted, and looks at the whole mirror",
                self.url,
            )
            self.close()
            self._again = self._again or synced.error is None

    def settle(
        self, seconds: float, stopped: Callable[[], bool], show: Callable[[float], None]
    ) -> BurnishError | None:
        """See `Destination`. Retries while time lasts and `stopped` is false everywhere."""
        deadline = time.monotonic() + seconds
        self.begin()
        while True:
            is_done = not self.hear(_LOOK_SECONDS)
            show(self._part)
            is_done, error = from_main((is_done, self._error), self._layout)
            is_lasting = error is not None and type(error) is not BurnishError
            if is_done and (error is None or is_lasting):  # another try would fail as well
                return error
            if any_rank(stopped() or time.monotonic() > deadline, self._layout):
                break
            if is_done:
                time.sleep(max(0.0, min(_PAUSE_SECONDS, deadline - time.monotonic())))
                self.begin()
        return error or BurnishError(
            f"{self.url} is not complete, and the run no longer waits for it",
            have="a copy that is still under way",
            want=f"a copy that is done within {seconds:.0f} seconds, and before a signal",
            do="start the same command again, or set checkpoint.mirror_patience_seconds higher",
        )

    def require_own(self, directory: RunDirectory, run: RunIdentity) -> dict[str, str]:
        """See `Destination`. Raises `IncompatibleError` for another run's mirror, `UsageError` for steps that `resume` forbids."""
        local_run = directory.read_environment().get(RUN)
        names = [path.name for path in step_paths(self.root, self.source).values()]
        identity = self._identity()
        if identity is None:
            if not names:
                return {START: self._mirror.start}
            raise IncompatibleError(
                f"{self.url} holds checkpoints, and does not say of which run",
                have=f"{names[-1]} and no {ENVIRONMENT}",
                want="an empty directory, or the mirror of this run",
                do="give this run a name of its own with name=NAME, or another mirror",
            )
        mirror_run = identity.get(RUN)
        if names or mirror_run != local_run:
            run.require_trainer(self.url, identity.get(TRAINER))
            config = self.root.parent / directory.config.name
            text = self._mirror.remote.read(config.name, _CONFIG_LIMIT)
            run.require_same(self.root.parent, recorded(config, text))
        if directory.config.exists() and mirror_run != local_run:
            raise IncompatibleError(
                f"{self.url} is the mirror of another run than {directory.root} is",
                have=f"run {mirror_run}",
                want=f"run {local_run or 'without a mirror'}",
                do=f"set name=NAME to mirror this run beside it, or move {directory.root} away to continue that one",
            )
        run.require_may_resume(self.root.parent, names)
        return {RUN: str(mirror_run), START: self._mirror.start}

    def _identity(self) -> dict[str, object] | None:
        try:
            text = self._mirror.remote.read(ENVIRONMENT, ENVIRONMENT_LIMIT)
            return parse_object(text, f"{self.url}/{ENVIRONMENT}")
        except MissingError:
            return None
        except CorruptError as error:
            raise CorruptError(
                f"{self.url}/{ENVIRONMENT} does not say whose mirror this is",
                have=error.have or error.problem,
                want=f'a JSON object with "{RUN}", "{START}" and "{TRAINER}"',
                do=f"copy {ENVIRONMENT} of the run's directory there, or give this run its own mirror",
            ) from error

    def claim(self, directory: RunDirectory) -> None:
        """See `Destination`."""
        for path in (directory.config, directory.environment, directory.status):
            self._mirror.remote.put(path.name, path.read_bytes())

    def bring_back(self, directory: RunDirectory) -> None:
        """See `Destination`."""
        pins = f"{CHECKPOINTS}/{PINS}"
        for name, limit in ((directory.metrics.name, _METRICS_LIMIT), (pins, PINS_LIMIT)):
            path = directory.root / name
            if name == pins and path.exists():
                continue
            try:
                write_atomically(path, self._mirror.remote.read(name, limit))
            except MissingError:
                continue
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            files = [file for folder in KEPT for file in self._mirror.remote.files(folder)]
            list(pool.map(partial(self._bring_file, directory.root), files))

    def _bring_file(self, root: Path, file: RemoteFile) -> None:
        path = root / file.name
        is_log = file.name.startswith("logs/")
        if is_log:  # this start has a log already
            path = path.with_name(rotated(path.name))
        if not path.exists() or (path.stat().st_size != file.size and not is_log):
            with suppress(MissingError):
                write_atomically(path, self._mirror.remote.read(file.name, _FILE_LIMIT))
