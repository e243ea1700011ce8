"""A directory under a name of its own until it is whole, and what is left of those whose writers were killed.

`.NAME.<32 hex digits>` lies beside NAME. Its writer holds a lock on it, which the system takes back
from the dead, so whoever writes to the same NAME next can tell a leftover, which has the whole size,
from what somebody is writing. Left out: file systems without locks on directories, as NFS, where
nothing is taken for a leftover; what is done with the directory when it is whole.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from burnish.files.storage import Storage

_log = logging.getLogger(__name__)


@contextmanager
def partial_directory(target: Path, storage: Storage) -> Iterator[Path]:
    """A new directory beside `target`, to be renamed by the end of the block; an error in the block removes it.

    What killed processes left of the same target goes first. Raises `OSError`.
    """
    _clear(target, storage)
    path = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    storage.make_dirs(path)
    try:
        with _opened(path) as descriptor:
            with suppress(OSError):  # a file system without such locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield path
    except BaseException:
        with suppress(OSError):
            storage.remove(path)
        raise


def _clear(target: Path, storage: Storage) -> None:
    name = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{32}")
    for entry in storage.entries(target.parent):
        path = target.with_name(entry.name)
        if entry.kind == "directory" and name.fullmatch(entry.name) and _is_left(path):
            try:
                storage.remove(path)
            except OSError as error:
                _log.warning("what a killed process left could not be removed: %s", error)


def _is_left(path: Path) -> bool:
    """Whether nobody holds the lock of a directory; False where the system cannot tell."""
    try:
        with _opened(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
