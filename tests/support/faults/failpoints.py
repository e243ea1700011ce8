"""Named dangerous moments of saving, resuming and exporting, and a disk on which something happens when one of them comes.

The moments are operations on the disk, told by their kind and by the names they touch, so that the
code under test knows nothing of them; the one moment without a disk, when a state is staged, is a
list that strikes while it is read. Of three saves the second is the one that is hit: a step is
committed already, and there is one to remove.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from burnish.files.storage import LocalStorage

SECOND = ".inflight-00000002."
STAGING = "while the state is staged"
FAULTS = (
    "kill this",
    "kill another",
    "kill all",
    "kill parent",
    "SIGTERM twice",
    "ENOSPC",
    "EIO",
    "hang",
)
"""What happens: the process at the disk is killed, the rank at the other end of the run, all ranks, the process that
started this one (a writer's trainer); the trainer gets a second SIGTERM; the operation fails; it does not return."""


def _half_written(path: Path) -> bool:
    return ".inflight-" in str(path)


def _tensors(path: Path) -> bool:
    return path.name.endswith(".safetensors") and _half_written(path)


def _step(path: Path) -> bool:
    return path.name.startswith("step-") and path.parent.name == "checkpoints"


def _rubbish(path: Path) -> bool:
    return "trash" in path.parts


def _named(start: str) -> Callable[[Path], bool]:
    return lambda path: path.name.startswith(start)


@dataclass(frozen=True)
class Moment:
    """An operation on the disk, before or after which the fault comes."""

    when: str
    """Before or after it."""
    op: str
    """Its kind: look (for free space), mkdir, create, write, read, sync, rename, unlink."""
    touches: Callable[[Path], bool]
    """Whether it is about such a path; of a rename the old name."""
    at: float = 0
    """Which of those that match: the one at this share of all that one process does, 0 the first, 1 the last."""
    last_rank: bool = False
    """Whether it is the last rank's, not rank 0's."""

    def matches(self, op: str, path: Path) -> bool:
        """Whether this is such an operation, the right one or not."""
        return op == self.op and self.touches(path)


SAVING = {
    "in the preflight": Moment("before", "look", _named("checkpoints"), at=1),
    "before mkdir": Moment("before", "mkdir", _half_written),
    "after mkdir": Moment("after", "mkdir", _half_written),
    "files laid out": Moment("after", "create", _tensors, at=1),
    "a shard at byte 0": Moment("before", "write", _tensors),
    "after one block": Moment("after", "write", _tensors),
    "at half of the blocks": Moment("after", "write", _tensors, at=0.5),
    "at the last block": Moment("before", "write", _tensors, at=1),
    "written, before fsync": Moment("before", "sync", _tensors),
    "after fsync, before the barrier": Moment("after", "sync", _tensors, at=1),
    "a rank dead at the barrier": Moment("after", "sync", _tensors, at=1, last_rank=True),
    "manifest written, before fsync": Moment("before", "sync", _named("manifest.json")),
    "COMMIT empty": Moment("before", "write", _named("COMMIT")),
    "after COMMIT, before the step's rename": Moment("before", "rename", _named(".inflight-")),
    "after the step's rename, before its fsync": Moment("after", "rename", _named(".inflight-")),
    "before the old step's rename": Moment("before", "rename", _step),
    "after the old step's rename": Moment("after", "rename", _step),
    "in the middle of removal": Moment("before", "unlink", _rubbish, at=0.3),
}
RESUMING = {
    "resuming, before a leftover's rename": Moment("before", "rename", _half_written),
    "resuming, after a leftover's rename": Moment("after", "rename", _half_written),
    "resuming, leftovers half removed": Moment("before", "unlink", _rubbish, at=0.3),
    "resuming, reading a header": Moment("before", "read", _named("model.safetensors")),
    "resuming, reading a block": Moment("before", "read", _named("model.safetensors"), at=1),
    "resuming, before quarantine": Moment("before", "rename", _step),
    "resuming, after quarantine's rename": Moment("after", "rename", _step),
}
EXPORTING = {
    "exporting, before mkdir": Moment("before", "mkdir", _named(".out.")),
    "exporting, reading a block": Moment("before", "read", _named("residual.safetensors"), at=1),
    "exporting, half written": Moment("after", "write", _named("model-"), at=0.5),
    "exporting, written, before fsync": Moment("before", "sync", _named("model-")),
    "exporting, before the rename": Moment("before", "rename", _named(".out.")),
    "exporting, after the rename": Moment("after", "rename", _named(".out.")),
}
MOMENTS = SAVING | RESUMING | EXPORTING
"""By name. Those of a save happen in the writer's process where there is one."""


class FaultStorage(LocalStorage):
    """The real disk, with one fault at one moment, by its name.

    `pids` is a directory where ranks leave their process ids. `totals` says how many operations of
    a kind on such paths one process does. With `once_there` nothing counts before a path with that
    in it has come up.
    """

    def __init__(
        self,
        moment: str,
        fault: str,
        pids: Path,
        *,
        totals: dict[str, int] | None = None,
        once_there: str = "",
        is_writer: bool = False,
    ):
        self.moment, self.fault, self.pids = moment, fault, Path(pids)
        share, op = self.at.at, self.at.op
        self.number = max(1, math.ceil(share * (totals or {}).get(op, 1)))
        self.once_there, self.is_writer = once_there, is_writer
        self.matched = 0
        self.armed = True

    @property
    def at(self) -> Moment:
        """The moment, by its name, for this is sent to the processes that write."""
        return MOMENTS[self.moment]

    def around(self, op, path, act):
        hit = self.armed and self.comes(op, Path(path)) and not self.has_struck()
        if hit and self.at.when == "before":
            self.strike()
        result = act()
        if hit and self.at.when == "after":
            self.strike()
        return result

    def comes(self, op: str, path: Path) -> bool:
        if self.once_there in str(path):
            self.once_there = ""
        if self.once_there or not self.at.matches(op, path):
            return False
        self.matched += 1
        return self.matched == self.number

    def has_struck(self) -> bool:
        """Whether it came already, to another process: a trainer clears up after its writer on the same disk."""
        return (self.pids / "struck").exists()

    def strike(self):
        self.armed = False
        strike(self.fault, self.pids, is_writer=self.is_writer, is_last=self.at.last_rank)

    def create(self, path, size):
        file = self.around("create", path, lambda: super(FaultStorage, self).create(path, size))
        return FaultFile(file, self, path)

    def open(self, path, *, write=False):
        return FaultFile(super().open(path, write=write), self, path)

    def make_dirs(self, path):
        self.around("mkdir", path, lambda: super(FaultStorage, self).make_dirs(path))

    def rename(self, source, target):
        self.around("rename", source, lambda: super(FaultStorage, self).rename(source, target))

    def free_bytes(self, path):
        return self.around("look", path, lambda: super(FaultStorage, self).free_bytes(path))

    def remove(self, path):
        if path.is_dir():
            for each in sorted(path.iterdir()):
                self.remove(each)
            path.rmdir()
        else:
            self.around("unlink", path, path.unlink)


class FaultFile:
    def __init__(self, file, storage, path):
        self.file, self.storage, self.path = file, storage, path

    def size(self):
        return self.file.size()

    def pread_into(self, buffer, offset):
        self.storage.around("read", self.path, lambda: self.file.pread_into(buffer, offset))

    def pwrite(self, data, offset):
        self.storage.around("write", self.path, lambda: self.file.pwrite(data, offset))

    def sync(self):
        self.storage.around("sync", self.path, self.file.sync)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.__exit__(*error)


class StrikingList(list):
    """Shards, of which reading the second half meets the fault, once."""

    def __init__(self, shards, fault: str, pids: Path):
        super().__init__(shards)
        self.fault, self.pids = fault, pids

    def __iter__(self):
        for number, each in enumerate(super().__iter__()):
            if number == len(self) // 2 and self.fault:
                fault, self.fault = self.fault, ""
                strike(fault, self.pids, is_writer=False, is_last=False)
            yield each


def strike(fault: str, pids: Path, *, is_writer: bool, is_last: bool) -> None:
    """Let the fault happen to this process, a rank's trainer or its writer, or to the others."""
    (pids / "struck").touch()
    trainer = os.getppid() if is_writer else os.getpid()
    ranks = [int(each.read_text()) for each in sorted(pids.glob("rank-*"))]
    if fault in ("ENOSPC", "EIO"):
        raise OSError(getattr(errno, fault), "made to fail")
    if fault == "kill this":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "kill parent":
        os.kill(trainer, signal.SIGKILL)
    elif fault == "kill another":
        os.kill(ranks[0 if is_last else -1], signal.SIGKILL)
        return
    elif fault == "kill all":
        for each in reversed(ranks):
            os.kill(each, signal.SIGKILL)
    elif fault == "SIGTERM twice":
        for _ in range(2):
            os.kill(trainer, signal.SIGTERM)
            time.sleep(0.2)
    time.sleep(1000)  # a hang, or until those who were killed take this process along
