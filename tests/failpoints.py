"""Named dangerous moments of a save, and a disk on which something happens when one of them comes.

The moments are operations on the disk, told by their kind and by the names they touch, so that the
code under test knows nothing of them. The second of three saves is the one that is hit: a step is
committed already, and there is one to remove.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

from burnish.files.storage import LocalStorage

DURING, REMOVED = ".inflight-00000002.", "step-00000001"
TENSORS = ".safetensors"


def _tensors(path):
    return path.name.endswith(TENSORS) and DURING in str(path)


MOMENTS = {
    "before mkdir": ("before", lambda op, path, n: op == "mkdir" and DURING in str(path)),
    "after mkdir": ("after", lambda op, path, n: op == "mkdir" and DURING in str(path)),
    "files laid out": ("after", lambda op, path, n: op == "create" and _tensors(path)),
    "a shard at byte 0": ("before", lambda op, path, n: op == "write" and _tensors(path)),
    "after one block": ("after", lambda op, path, n: op == "write" and _tensors(path)),
    "at half of the blocks": ("after", lambda op, path, n: op == "write" and _tensors(path) and n == 3),
    "at the last block": ("before", lambda op, path, n: op == "write" and _tensors(path) and n == 5),
    "written, before fsync": ("before", lambda op, path, n: op == "sync" and _tensors(path)),
    "after fsync, before the barrier": ("after", lambda op, path, n: op == "sync" and _tensors(path) and n == 2),
    "manifest under its temporary name": ("before", lambda op, path, n: op == "rename" and DURING in str(path) and ".manifest.json" in path.name),
    "before COMMIT's rename": ("before", lambda op, path, n: op == "rename" and DURING in str(path) and path.name.startswith(".COMMIT")),
    "after COMMIT, before the step's rename": ("before", lambda op, path, n: op == "rename" and path.name.startswith(DURING)),
    "after the step's rename, before its fsync": ("after", lambda op, path, n: op == "rename" and path.name.startswith(DURING)),
    "before the old step's rename": ("before", lambda op, path, n: op == "rename" and path.name == REMOVED),
    "after the old step's rename": ("after", lambda op, path, n: op == "rename" and path.name == REMOVED),
    "in the middle of removal": ("before", lambda op, path, n: op == "unlink" and REMOVED in str(path) and n == 3),
}  # fmt: skip
"""By name: whether the fault comes before or after the operation, and which operation: by its kind, its path, and
its number among those that match. A step of BIG_SHAPES has 10 blocks of tensors; of two processes each writes half."""

FAULTS = ("kill this", "kill another", "kill all", "kill parent", "ENOSPC", "EIO", "hang")
"""What happens: the process at the disk is killed, the run's last rank, all ranks, the process that started this one; the operation fails; it does not return."""


class FaultStorage(LocalStorage):
    """The real disk, with one fault at one moment. `pids` is a directory where ranks leave their process ids."""

    def __init__(self, moment, fault, pids, armed=True):
        self.moment, self.fault, self.pids, self.armed = moment, fault, Path(pids), armed
        self.matched = 0

    def around(self, op, path, act):
        when, matches = MOMENTS[self.moment]
        hit = self.armed and matches(op, Path(path), self.matched + 1)
        if not hit and self.armed and any(matches(op, Path(path), n) for n in range(1, 9)):
            self.matched += 1
        if hit and when == "before":
            self.strike()
        result = act()
        if hit and when == "after":
            self.strike()
        return result

    def strike(self):
        self.armed = False
        (self.pids / "struck").touch()
        if self.fault in ("ENOSPC", "EIO"):
            raise OSError(getattr(errno, self.fault), "made to fail")
        if self.fault == "hang":
            time.sleep(1000)
        elif self.fault == "kill this":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "kill parent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        else:
            ranks = sorted(self.pids.glob("rank-*"))
            for each in reversed(ranks if self.fault == "kill all" else ranks[-1:]):
                os.kill(int(each.read_text()), signal.SIGKILL)
            if self.fault == "kill all":
                time.sleep(1000)  # the killed take this process along

    def create(self, path, size):
        file = self.around("create", path, lambda: super(FaultStorage, self).create(path, size))
        return FaultFile(file, self, path)

    def open(self, path, *, write=False):
        file = super().open(path, write=write)
        return FaultFile(file, self, path) if write else file

    def make_dirs(self, path):
        self.around("mkdir", path, lambda: super(FaultStorage, self).make_dirs(path))

    def rename(self, source, target):
        self.around("rename", source, lambda: super(FaultStorage, self).rename(source, target))

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

    def pwrite(self, data, offset):
        self.storage.around("write", self.path, lambda: self.file.pwrite(data, offset))

    def sync(self):
        self.storage.around("sync", self.path, self.file.sync)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.__exit__(*error)
