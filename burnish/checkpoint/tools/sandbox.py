"""Give up rights permanently in a process that reads files which could run code.

Landlock (https://docs.kernel.org/userspace-api/landlock.html) forbids what `keep_writes_to` names. A seccomp filter closes the gaps.
Neither needs privileges. Reading stays allowed: imports need it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from pathlib import Path

# Landlock's system calls, on every architecture
_CREATE = 444
_ADD_RULE = 445
_RESTRICT = 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38

_EXECUTE = 1 << 0
_WRITE_BY_VERSION = {
    1: 1 << 1 | sum(1 << bit for bit in range(4, 13)),  # write, remove, make anything
    2: 1 << 13,  # link and rename across directories
    3: 1 << 14,  # truncate
    5: 1 << 15,  # control devices
}
_OF_FILES = 1 << 1 | 1 << 14  # write, truncate
_TCP = 0b11  # bind, connect
_OUTSIDE = 0b11  # abstract UNIX sockets, signals
TCP_VERSION = 4
SCOPES_VERSION = 6
"""The first versions of Landlock that forbid TCP, and signals to processes outside."""

_SET_SECCOMP = 22
_FILTER = 2
# BPF's instructions
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_RETURN = 0x06
_REFUSE = 0x00050000 | errno.EPERM
_ALLOW = 0x7FFF0000
_X32 = 1 << 30  # system calls of the x32 ABI, which have other numbers
# AUDIT_ARCH of each machine, from <linux/audit.h>.
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The numbers of refused system calls on these machines. aarch64 lacks the older forms.
_REFUSED: dict[str, tuple[int, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425), "ptrace": (101, 117),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "process_vm_writev": (311, 271),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "file_setattr": (469, 469),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
}  # fmt: skip


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 for none."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG)))


def has_seccomp() -> bool:
    """Return whether `forbid_calls` works here."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_SECCOMP, *map(ctypes.c_ulong, (_FILTER, 0)))  # no filter: nothing is changed
    return ctypes.get_errno() == errno.EFAULT


def keep_writes_to(directory: Path, version: int | None = None) -> None:
    """Allow this process to write only below `directory` and to /dev/null. Forbid programs and TCP connections.

    From version 6 on, also forbid signals and abstract UNIX sockets to outside processes. Call it before there is a
    second thread. Raises `OSError` without Landlock.
    """
    version = landlock_version() if version is None else version
    if not version:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "Landlock")
    libc = ctypes.CDLL(None, use_errno=True)
    writes = sum(bits for since, bits in _WRITE_BY_VERSION.items() if version >= since)
    rules = _Ruleset(writes | _EXECUTE, _TCP, _OUTSIDE)
    fields = 1 + (version >= TCP_VERSION) + (version >= SCOPES_VERSION)
    size = fields * ctypes.sizeof(ctypes.c_uint64)
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


def forbid_calls() -> None:
    """Refuse sockets, signals, and changes of files' modes, owners, times and attributes with EPERM, in later threads too.
    Raises `OSError`.
    """
    machine = platform.machine()
    column = list(_MACHINES).index(machine)
    numbers = [number for call in _REFUSED.values() if (number := call[column]) is not None]
    # A comparison's two counts say how many instructions to skip if it holds, and if it does not.
    program = [
        (_LOAD, 0, 0, 4),  # the architecture of the call
        (_EQUAL, 0, len(numbers) + 3, _MACHINES[machine]),
        (_LOAD, 0, 0, 0),  # the call's number
        (_AT_LEAST, len(numbers) + 1, 0, _X32),
        *((_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0))))
    filters = ctypes.byref(_Program(len(program), packed))
    _checked(libc.prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), filters))


def limit_files(most_bytes: int) -> None:
    """Limit the size of this process's files, and forbid core dumps."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(more_bytes: int) -> None:
    """Limit the private memory that this process can add. No effect outside Linux."""
    if (pages := Path("/proc/self/statm")).exists():
        most = int(pages.read_text().split()[5]) * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "sandbox")
    return result
