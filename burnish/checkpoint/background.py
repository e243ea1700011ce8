"""Saving while training goes on: the training process's side.

`begin` copies the step's contents and hands them to a writer process, which is started again if it died. At most one save is
in flight. All ranks get the same outcome: a save that failed on any rank is cleared away and leaves the step before unchanged.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from burnish.checkpoint.save import Assets, Contents, Saved, Saver, check_new
from burnish.checkpoint.staging import Memory, Staged, stage
from burnish.checkpoint.subprocess import Companion, accompany
from burnish.distributed.collectives import agree, gather_objects
from burnish.distributed.environment import place_of
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.durable import naming_failures


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the writers of all ranks meet for a job."""

    host: str
    """Machine of the store, which the training process of rank 0 serves."""
    port: int
    """Its port."""
    name: str
    """Keeps the job apart from others."""
    timeout_seconds: float
    """How long they wait for each other, at the beginning and in every collective."""


@dataclass(frozen=True, slots=True)
class Job:
    """One step to commit."""

    step: int
    """Which."""
    staged: Staged
    """What goes into it; its tensors are in the shared memory."""
    meeting: Meeting | None
    """None for a lone process."""


Answer = Saved | BurnishError
"""What comes of a job."""


def serve(pipe: int, parent: int, memory: int) -> None:
    """Be the writer of the process `parent`; both descriptors are this process's own."""
    accompany(parent)
    torch.set_num_threads(1)
    shared = Memory(memory)
    with Connection(pipe) as connection:
        saver: Saver = connection.recv()
        while True:
            try:
                job: Job = connection.recv()
            except EOFError:
                return
            connection.send(_answer(saver, job, shared, lambda: _check_parent(parent)))


def _check_parent(parent: int) -> None:
    if os.getppid() != parent:
        raise BurnishError(
            "the training process has ended before its step was committed",
            do="start the same command again: it continues from the step before",
        )


def _answer(saver: Saver, job: Job, memory: Memory, fence: Callable[[], None]) -> Answer:
    try:
        with _meeting(job.meeting, saver.layout):
            contents = job.staged.contents(memory.take(job.staged.size))
            return saver.save(job.step, contents, fence)
    except BurnishError as error:
        return error
    except Exception as error:  # noqa: BLE001 - told to the training process, which goes on
        return BurnishError(
            f"step {job.step} could not be saved",
            have=f"{type(error).__name__}: {error}\n{traceback.format_exc()}",
            do="correct what it names; the next save tries again",
        )


@contextmanager
def _meeting(meeting: Meeting | None, layout: Layout) -> Iterator[None]:
    """The process group of the writers, as the default group of this process."""
    if meeting is None:
        yield
        return
    patience = timedelta(seconds=meeting.timeout_seconds)
    store = TCPStore(meeting.host, meeting.port, layout.world, False, patience)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(meeting.name, store),
        rank=layout.rank,
        world_size=layout.world,
        timeout=patience,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


_LOOK_SECONDS = 0.05
# Between two questions of waiting ranks to each other.

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finished:
    """How a save in the background went."""

    step: int
    """Which one."""
    error: BurnishError | None
    """None when it is committed."""
    warning: BurnishError | None = None
    """What went wrong although it is committed."""


class BackgroundSaver:
    """One rank's writer process and the memory it reads from. All methods but `close` are collective.

    `timeout_seconds` bounds how long writers wait for each other, and how long a writer may make no progress before it is
    killed. The writer holds the descriptors `keep_open` as long as it lives.
    """

    def __init__(
        self, saver: Saver, timeout_seconds: float, keep_open: tuple[int, ...] = ()
    ) -> None:
        self._saver = saver
        self._timeout = timeout_seconds
        self._keep_open = keep_open
        self._memory = Memory.make()
        self._assets: dict[str, Assets] = {}
        self._store: TCPStore | None = None
        self._jobs = 0
        self._step: int | None = None
        self._moved: str | None = None
        self._moved_at = 0.0
        self._answer: Answer | None = None
        self._writer = self._start_writer()

    def begin(self, step: int, contents: Contents) -> None:
        """Copy the contents and start writing them; they may change when this returns.

        Raises on every rank if copying fails on any, or if the step exists. No save may be in flight. Assets that `write_assets`
        writes are taken to be the same for every step.
        """
        if self._step is not None:
            raise ValueError(f"step {self._step} is still being saved")
        with agree(self._saver.layout), naming_failures(f"step {step} could not be copied"):
            if self._saver.leads:
                check_new(self._saver.root, step, self._saver.storage)
            staged = stage(contents, self._memory, self._kept_assets(contents))
        job = Job(step, staged, self._meeting())
        if not self._writer.send(job):
            _log.warning("the process that writes checkpoints had died and is started again")
            self._writer.kill()
            self._writer = self._start_writer()
            self._writer.send(job)
        self._step, self._moved_at = step, time.monotonic()

    def finished(self, *, wait: bool) -> Finished | None:
        """Return the outcome of the save in flight, once; None while it is under way or if there is none."""
        if self._step is None:
            return None
        while True:
            if self._answer is None:
                self._answer = self._look(_LOOK_SECONDS if wait else 0.0)
            told = gather_objects(self._answer, self._saver.layout)
            failed = [answer for answer in told if isinstance(answer, BurnishError)]
            if failed or None not in told:
                break
            if not wait:
                return None
        step, self._step, self._answer = self._step, None, None
        if failed:
            survived = self._survived(step, told)
            return Finished(step, None, failed[0]) if survived else Finished(step, failed[0])
        warnings = [each.warning for each in told if isinstance(each, Saved) and each.warning]
        return Finished(step, None, next(iter(warnings), None))

    def _look(self, seconds: float) -> Answer | None:
        """Return the writer's next message within this time; a writer without progress for too long counts as hung."""
        answer: Answer | None = self._writer.answer(seconds)
        if answer is not None:
            return answer
        moved = self._writer.moved()
        if moved is None or moved != self._moved:
            self._moved, self._moved_at = moved, time.monotonic()
        if time.monotonic() - self._moved_at < self._timeout:
            return None
        self._writer.kill()
        return BurnishError(
            f"the process that writes step {self._step} hangs, that of rank {self._saver.layout.rank} on {socket.gethostname()}",
            have=f"nothing read or written for {self._timeout:.0f} seconds",
            want="a disk, and other ranks, that answer within that time",
            do="look after the disk, or set distributed.timeout_seconds higher; the next save tries again",
        )

    def close(self, patience_seconds: float = 0.0) -> None:
        """End the writer, after a while for what is in flight. Not collective."""
        if self._step is not None and self._answer is None:
            answer = self._writer.answer(patience_seconds)
            if not isinstance(answer, Saved):
                _log.error("step %d is not committed: %s", self._step, answer or "it took too long")
        self._writer.kill()
        self._memory.close()

    def _start_writer(self) -> Companion:
        writer = Companion(
            "burnish.checkpoint.background",
            "the process that writes checkpoints",
            (self._memory.descriptor,),
            self._keep_open,
        )
        writer.send(self._saver)
        return writer

    def _survived(self, step: int, told: list[Answer | None]) -> bool:
        """Clear away a save that failed somewhere; return whether the step was committed all the same.

        Kills and restarts writers that wait for a dead or hung one.
        """
        layout, saver = self._saver.layout, self._saver
        if told[layout.rank] is None or not self._writer.is_alive():
            self._writer.kill()
            self._writer = self._start_writer()
        with agree(layout):  # all writers have ended
            pass
        held = not saver.leads
        if saver.leads:
            with suppress(OSError):
                held = saver.holds(step)
        committed = all(gather_objects(held, layout))
        with agree(layout):  # nobody goes on beside what is left of it
            if saver.leads and (left := saver.discard(step, portion=not committed)) is not None:
                _log.error("%s", left)
        return committed

    def _kept_assets(self, contents: Contents) -> dict[str, Assets]:
        """What rank 0 writes beside the tensors of each model, from the first save on."""
        is_main = self._saver.layout.is_main
        for role, model in contents.models.items():
            if role not in self._assets:
                written = Assets.written_by(model.write_assets) if is_main else Assets({})
                self._assets[role] = written
        return self._assets

    def _meeting(self) -> Meeting | None:
        layout = self._saver.layout
        if layout.world == 1:
            return None
        if self._store is None and layout.is_main:
            host = _address(layout.local_world == layout.world)
            patience = timedelta(seconds=self._timeout)
            self._store = TCPStore(host, 0, layout.world, True, patience, False)
        mine = (self._store.host, self._store.port) if self._store else None
        host, port = next(each for each in gather_objects(mine, layout) if each)
        self._jobs += 1
        return Meeting(host, port, f"job-{self._jobs}", self._timeout)


def _address(local: bool) -> str:
    """How the other ranks reach this machine, which is that of rank 0."""
    return "127.0.0.1" if local else place_of(os.environ).host or socket.gethostname()
