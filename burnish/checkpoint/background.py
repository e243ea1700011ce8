"""Save while training goes on: a copy in shared memory, and a writer process beside each rank."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from burnish.boxes.shards import Shard
from burnish.boxes.transfer import accelerator_of
from burnish.checkpoint.save import Contents, Fence, Saver, SaveResult, aligned, check_new
from burnish.distributed import host_memory
from burnish.distributed.child_process import Companion, accompany, as_burnish_error
from burnish.distributed.collectives import agree, from_main, gather_objects
from burnish.distributed.environment import place_of
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.distributed.meeting import connect_lazily, in_groups
from burnish.errors import BurnishError
from burnish.files.durable import naming_failures
from burnish.files.storage import allocate

# Seconds between two exchanges of ranks that wait for a save.
_LOOK_SECONDS = 0.05

_log = logging.getLogger(__name__)


class Memory:
    """Unnamed shared memory that two processes map by its descriptor. Grows, and is reused."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned: torch.device | None = None

    @classmethod
    def make(cls) -> Memory:
        """Create memory, freed with its last user."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("burnish-staging", os.MFD_CLOEXEC))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def take(self, size: int, pin: torch.device | None = None) -> Tensor:
        """Return the first `size` bytes, page-locked to `pin`, at a stable address unless they grow. Raises `OSError`."""
        if size > self._bytes.numel():
            self._release()
            if os.fstat(self.descriptor).st_size < size:
                allocate(self.descriptor, size)  # lacking memory raises here; later, it is a SIGBUS
            mapped = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        if pin and not self._pinned and host_memory.page_lock(self._bytes, pin):
            self._pinned = pin
        return self._bytes[:size]

    def close(self) -> None:
        """Free the memory."""
        self._release()
        os.close(self.descriptor)

    def _release(self) -> None:
        if self._pinned:
            host_memory.page_unlock(self._bytes, self._pinned)
            self._pinned = None
        self._bytes = torch.empty(0, dtype=torch.uint8)


def stage(contents: Contents, memory: Memory) -> Contents:
    """Copy the shards into the memory, for `staged_in`; afterwards the shards may change. Raises `OSError` without room."""
    device = accelerator_of(contents.shards)
    pinned = device if device is not None and device.type == "cuda" else None
    copies = staged_in(memory.take(_staged_bytes(contents), pinned), contents)
    with torch.no_grad():
        for shard, copy in zip(contents.shards, copies.shards, strict=True):
            copy.tensor.copy_(shard.tensor, non_blocking=True)
    if device is not None:
        torch.accelerator.synchronize(device)
    bare = copies.with_shards(lambda copy: replace(copy, tensor=copy.tensor.to("meta")))
    return replace(bare, state=dict(contents.state), arena=None)


def _staged_bytes(contents: Contents) -> int:
    return sum(aligned(shard.tensor.nbytes) for shard in contents.shards)


def staged_in(room: Tensor, contents: Contents) -> Contents:
    """Return the contents with shards that are views of the memory."""
    start = 0

    def view(shard: Shard) -> Shard:
        nonlocal start
        elements = room[start : start + shard.tensor.nbytes].view(shard.tensor.dtype)
        start += aligned(shard.tensor.nbytes)
        return Shard(shard.spec, shard.box, elements.view(shard.box.sizes))

    return contents.with_shards(view)


@dataclass(frozen=True, slots=True)
class Job:
    """One step to commit."""

    step: int
    contents: Contents
    """The contents that `stage` returned."""
    number: int
    """Number of the job in the run, the same on all ranks."""
    meeting: tuple[str, int] | None
    """Host and port of the store where the writers of all ranks meet; None for a lone process."""


Answer = SaveResult | BurnishError
"""A writer's answer to a job."""


def serve(pipe: int, parent: int, memory: int) -> None:
    """Run `parent`'s writer process. `pipe` and `memory` are descriptors."""
    accompany(parent)
    torch.set_num_threads(1)
    shared = Memory(memory)
    arena = Arena(torch.device("cpu"))

    def check_parent() -> None:
        if os.getppid() != parent:
            raise BurnishError(
                "the training process has ended before its step was committed",
                do="start the same command again: it continues from the step before",
            )

    with Connection(pipe) as connection:
        saver, timeout = connection.recv()
        while True:
            try:
                job: Job = connection.recv()
            except EOFError:
                return
            connection.send(_answer(saver, job, shared, arena, timeout, check_parent))


def _answer(
    saver: Saver,
    job: Job,
    memory: Memory,
    arena: Arena,
    timeout: float,
    fence: Fence,
) -> Answer:
    try:
        with _meeting(job, saver.layout, timedelta(seconds=timeout)) as saver.layout:
            room = memory.take(_staged_bytes(job.contents))
            contents = replace(staged_in(room, job.contents), arena=arena)
            return saver.save(job.step, contents, fence)
    except Exception as error:  # noqa: BLE001 - sent to the training process, which goes on
        do = "correct what the error names; the next save tries again"
        return as_burnish_error(error, f"step {job.step} could not be saved", do)


@contextmanager
def _meeting(job: Job, layout: Layout, patience: timedelta) -> Iterator[Layout]:
    if job.meeting is None:
        yield layout
        return
    store = TCPStore(*job.meeting, layout.world, False, patience)
    connect_lazily(layout)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"job-{job.number}", store),
        rank=layout.rank,
        world_size=layout.world,
        timeout=patience,
    )
    try:
        yield in_groups(layout, patience)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome of a background save."""

    step: int
    error: BurnishError | None
    """None if the step is committed."""
    warning: BurnishError | None = None
    """A failure that did not stop the commit."""


class BackgroundSaver:
    """One rank's writer process and its memory. All methods but `close` are collective.

    A writer without progress for `timeout_seconds` is killed; a dead writer is restarted.
    """

    def __init__(
        self, saver: Saver, timeout_seconds: float, keep_open: tuple[int, ...] = ()
    ) -> None:
        self._saver = saver
        self._timeout = timeout_seconds
        self._keep_open = keep_open
        self._memory = Memory.make()
        self._store: TCPStore | None = None
        self._jobs = 0
        self._step: int | None = None
        self._moved: str | None = None
        self._moved_at = 0.0
        self._answer: Answer | None = None
        self._writer = self._start_writer()

    def _start_writer(self) -> Companion:
        name = "the process that writes checkpoints"
        writer = Companion(__name__, name, (self._memory.descriptor,), self._keep_open)
        writer.send((self._saver, self._timeout))
        return writer

    def _restart_writer(self) -> None:
        self._writer.kill()
        self._writer = self._start_writer()

    def begin(self, step: int, contents: Contents) -> None:
        """Copy the contents and start writing them. No save may be in flight.

        Raises if copying fails on any rank, or if the step exists.
        """
        if self._step is not None:
            raise ValueError(f"step {self._step} is still being saved")
        with agree(self._saver.layout), naming_failures(f"step {step} could not be copied"):
            if self._saver.layout.is_main:
                check_new(self._saver.root, step, self._saver.storage)
            staged = stage(contents, self._memory)
        self._jobs += 1
        job = Job(step, staged, self._jobs, self._meeting())
        if not self._writer.send(job):
            _log.warning("the process that writes checkpoints had died and is started again")
            self._restart_writer()
            self._writer.send(job)
        self._step = step
        self._moved_at = time.monotonic()

    def finished(self, *, wait: bool) -> Finished | None:
        """See `Checkpoints.finished`."""
        if self._step is None:
            return None
        while True:
            if self._answer is None:
                self._answer = self._poll(_LOOK_SECONDS if wait else 0.0)
            answers = gather_objects(self._answer, self._saver.layout)
            failed = [answer for answer in answers if isinstance(answer, BurnishError)]
            if failed or None not in answers:
                break
            if not wait:
                return None
        step = self._step
        self._step = None
        self._answer = None
        if failed:
            survived = self._survived(step, answers)
            return Finished(step, None, failed[0]) if survived else Finished(step, failed[0])
        results = [answer for answer in answers if isinstance(answer, SaveResult)]
        warnings = [result.warning for result in results if result.warning]
        return Finished(step, None, next(iter(warnings), None))

    def _poll(self, seconds: float) -> Answer | None:
        answer: Answer | None = self._writer.answer(seconds)
        if answer is not None:
            return answer
        moved = self._writer.moved()
        if moved is None or moved != self._moved:
            self._moved = moved
            self._moved_at = time.monotonic()
        if time.monotonic() - self._moved_at < self._timeout:
            return None
        self._writer.kill()
        return BurnishError(
            f"the process that writes step {self._step} for rank {self._saver.layout.rank} on {socket.gethostname()} hangs",
            have=f"nothing read or written for {self._timeout:.0f} seconds",
            want="a disk, and other ranks, that answer within that time",
            do="check the disk, or set distributed.timeout_seconds higher; the next save tries again",
        )

    def close(self, patience_seconds: float = 0.0) -> None:
        """Wait this long for a save in flight, then end the writer. Not collective."""
        if self._step is not None and self._answer is None:
            answer = self._writer.answer(patience_seconds)
            if not isinstance(answer, SaveResult):
                _log.error("step %d is not committed: %s", self._step, answer or "it took too long")
        self._writer.kill()
        self._memory.close()

    def _survived(self, step: int, answers: list[Answer | None]) -> bool:
        """Clean up a failed save and restart hung writers; return whether it was committed after all."""
        saver = self._saver
        layout = saver.layout
        if answers[layout.rank] is None or not self._writer.is_alive():
            self._restart_writer()
        with agree(layout):  # wait until all failed writers have ended
            pass
        committed = False
        with agree(layout):  # no rank goes on before rank 0 has removed the failed save
            if layout.is_main:
                with suppress(OSError):
                    committed = saver.holds(step)
                if (failure := saver.discard(step)) is not None:
                    _log.error("%s", failure)
        return from_main(committed, layout)

    def _meeting(self) -> tuple[str, int] | None:
        layout = self._saver.layout
        if layout.world == 1:
            return None
        if self._store is None and layout.is_main:
            is_local = layout.local_world == layout.world
            host = "127.0.0.1" if is_local else place_of(os.environ).host or socket.gethostname()
            patience = timedelta(seconds=self._timeout)
            self._store = TCPStore(host, 0, layout.world, True, patience, False)
        address = (self._store.host, self._store.port) if self._store else None
        return from_main(address, layout)
