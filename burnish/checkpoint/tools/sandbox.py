"""Give up rights for good in a process that reads files which could run code.

With Linux's Landlock (https://docs.kernel.org/userspace-api/landlock.html) it cannot write outside one directory, start programs,
or use TCP. It needs no privileges. Left out: reading, which imports need.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from pathlib import Path

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same on every architecture
_VERSION_FLAG, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38

_EXECUTE = 1 << 0
_WRITE_BY_VERSION = {
    1: 1 << 1 | sum(1 << bit for bit in range(4, 13)),  # write, remove, make anything
    2: 1 << 13,  # link and rename across directories
    3: 1 << 14,  # truncate
    5: 1 << 15,  # control devices
}
_OF_FILES = 1 << 1 | 1 << 14
_TCP = 0b11  # bind, connect
_TCP_VERSION = 4


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 for none."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG)))


def keep_writes_to(directory: Path, version: int | None = None) -> None:
    """Allow this process writes below `directory` and to /dev/null only, no programs and no TCP connections.

    Call it before there is a second thread. `version` is `landlock_version`'s answer, asked if None. Raises `OSError` without
    Landlock.
    """
    version = landlock_version() if version is None else version
    if not version:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "Landlock")
    libc = ctypes.CDLL(None, use_errno=True)
    writes = sum(bits for since, bits in _WRITE_BY_VERSION.items() if version >= since)
    rules = _Ruleset(writes | _EXECUTE, _TCP)
    size = ctypes.sizeof(rules) if version >= _TCP_VERSION else ctypes.sizeof(ctypes.c_uint64)
    ruleset = _checked(libc.syscall(_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), 0))
    try:
        for path, allowed in ((directory, writes), (Path(os.devnull), writes & _OF_FILES)):
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                beneath = _PathBeneath(allowed, parent)
                rule = ctypes.byref(beneath)
                _checked(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
            finally:
                os.close(parent)
        _checked(libc.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0))))
        _checked(libc.syscall(_RESTRICT, ruleset, 0))
    finally:
        os.close(ruleset)


def limit_files(most_bytes: int) -> None:
    """Limit this process to files of so many bytes, and no core dump."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "Landlock")
    return result
