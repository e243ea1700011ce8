"""One writer per directory: a lock that the system takes away when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from burnish.errors import BurnishError


class Lease:
    """Exclusive use of a directory, held from entering to leaving the block.

    A `flock` on a file in the directory: the lock is the file system's, so a killed process leaves
    nothing behind that has to be cleared; what the file says (process, host) is for people.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Take it, or raise `BurnishError` that names the holder."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise BurnishError(
                f"another run is using {self._path.parent}",
                have=holder or "a process that has not said its name yet",
                want="one run at a time in a directory",
                do="wait for it to end, or give this run another name",
            ) from error
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give it back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
