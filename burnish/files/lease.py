"""One writer per directory: a lock that ends with its holder, and a number that grows.

Some network mounts lose locks, so a holder checks its number before it commits.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from burnish.errors import BurnishError, IncompatibleError
from burnish.files.durable import naming_failures
from burnish.files.storage import open_regular

LEASE = ".lease"
"""Name of the lease's file in a run's `checkpoints/`."""

_LIMIT = 4096
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class LeaseToken:
    """One holder's right to write."""

    path: Path
    number: int
    """Greater than the number of every earlier holder."""
    descriptor: int = -1
    """The lock's descriptor in the process that holds it."""

    def current(self) -> object:
        """Return the number in the file, or why there is none."""
        try:
            with open_regular(self.path) as file:
                return _parse(file.read(_LIMIT)).get("token")
        except OSError as error:
            return str(error)

    def check(self) -> None:
        """Raise `BurnishError` when there is another holder."""
        if (current := self.current()) != self.number:
            raise BurnishError(
                f"this run no longer has {self.path.parent} to itself",
                have=f"lease number {current}",
                want=f"lease number {self.number}",
                do="see which other run was started in this directory",
            )


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a directory's `flock`, or a file's, made if needed. Raises `OSError`; without `wait`, `BlockingIOError` if it is held."""
    access = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether somebody holds the lease."""
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


@contextmanager
def holding_lease(path: Path, patience_seconds: float = 60.0) -> Iterator[LeaseToken]:
    """Hold a directory exclusively inside the block, by a `flock`.

    The lock ends with the last process that has the descriptor. Waits `patience_seconds` for a dead holder's helpers.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with naming_failures(f"{path} cannot hold a lease", do="move it away"):
        descriptor = os.open(path, flags, 0o644)
    try:
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise BurnishError(f"{path} is not a regular file", want="a file", do="move it away")
        _lock(path, descriptor, patience_seconds)
        before = _parse(os.pread(descriptor, _LIMIT, 0)).get("token")
        # If the last number was lost with its file, the clock still gives a larger one.
        number = max(before + 1 if type(before) is int else 0, time.time_ns())
        holder: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "token": number}
        if job := os.environ.get("SLURM_JOB_ID"):
            holder["slurm_job"] = job[:64]
        text = json.dumps(holder).encode()
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
        os.fsync(descriptor)
        yield LeaseToken(path, number, descriptor)
    finally:
        os.close(descriptor)


def _lock(path: Path, descriptor: int, patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    was_held = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = os.pread(descriptor, _LIMIT, 0)
            # `is_held` of another process takes the lock for a moment, so try twice.
            if not was_held or (_is_dead(_parse(text)) and time.monotonic() < deadline):
                was_held = True
                time.sleep(_LOOK_SECONDS)
                continue
            raise _in_use(path, _parse(text)) from error
        return


def require_free(path: Path) -> None:
    """Raise `IncompatibleError` if a living process holds the lease. One that has died is left to `holding_lease`."""
    for _ in range(2):  # `is_held` of another process takes the lock for a moment
        if not is_held(path):
            return
        time.sleep(_LOOK_SECONDS)
    with suppress(OSError), open_regular(path) as file:
        holder = _parse(file.read(_LIMIT))
        if not _is_dead(holder):
            raise _in_use(path, holder)


def _in_use(path: Path, holder: dict[str, Any]) -> IncompatibleError:
    host = holder.get("host")
    place = "this machine" if host == socket.gethostname() else f"the machine {host}"
    job = f", Slurm job {holder['slurm_job']}" if "slurm_job" in holder else ""
    named = f"process {holder.get('pid')} on {place}{job}"
    return IncompatibleError(
        f"another run is using {path.parent}",
        have=named if holder else "a process that has not written its name yet",
        want="one run at a time in a directory",
        do="wait for it to end, or give this run another name",
    )


def _parse(text: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return {}


def _is_dead(holder: dict[str, Any]) -> bool:
    if holder.get("host") != socket.gethostname() or type(holder.get("pid")) is not int:
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    with suppress(OSError):  # a process that nobody has waited for
        state = Path(f"/proc/{holder['pid']}/stat").read_text().rpartition(")")[2]
        return state.split()[0] in ("Z", "X")
    return False
