"""The process that writes what was staged, beside a training process.

A process and not a thread: hashing and planning would take the interpreter from training, and what
kills a writer must not kill a run. It has one end of a pipe; it is sent a `Saver` once and then
jobs, and answers each with what was saved or an error. It ends when the pipe is closed, and at once when
the training process dies: what that had not committed by then is not committed after it. The
writers of all ranks form a process group of their own for each job, so that nothing of a job that
went wrong is left for the next.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from burnish.checkpoint.saver import Saved, Saver
from burnish.checkpoint.staging import Memory, Staged
from burnish.checkpoint.subprocess import accompany
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError


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
