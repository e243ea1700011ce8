"""What Linux offers to shut a process in: namespaces, mounts, capabilities, seccomp, Landlock. All of it works without root.

Bubblewrap makes such a sandbox for one program, and takes as long as starting Python. A fork server needs the same calls many times.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Mapping

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_ALL_NEW = 0x7E020080
"""Flags of `clone` that make a namespace of any kind."""
_CLONE_THREAD = 0x00010000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47

_MACHINES: Mapping[str, tuple[int, int]] = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}
"""Column of a machine in `_CALLS`, and its name for seccomp."""
_CALLS: Mapping[str, tuple[int, int]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, -1),
    "landlock_add_rule": (445, 445),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "socket": (41, 198),
    "vfork": (58, -1),
}
"""Numbers of system calls on x86_64 and aarch64."""
_DENIED: Mapping[str, tuple[int, int]] = {
    # Other processes.
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    # Namespaces and mounts.
    "chroot": (161, 51),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "pivot_root": (155, 41),
    "setns": (308, 268),
    "umount2": (166, 39),
    "unshare": (272, 97),
    # Memory that no limit of a process counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "semget": (64, 190),
    "shmget": (29, 194),
    # Large or rarely used parts of the kernel.
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "modify_ldt": (154, -1),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "userfaultfd": (323, 282),
    # The network. What `socketpair` makes reaches nobody else.
    "socket": _CALLS["socket"],
}
"""System calls that programs may not make."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]


def is_known_machine() -> bool:
    """Return whether the numbers of this machine's system calls are known."""
    return platform.machine() in _MACHINES


def unshare(flags: int) -> None:
    """Give this process namespaces of its own."""
    _checked(_libc.unshare(flags), "unshare")


def set_namespace(descriptor: int, flags: int) -> None:
    """Enter a namespace."""
    _checked(_libc.setns(descriptor, flags), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system."""
    texts = (source.encode(), target.encode(), kind.encode() or None)
    _checked(_libc.mount(*texts, flags, options.encode() or None), f"mount {target}")


def unmount(target: str) -> None:
    """Take a mount and all below it out of sight."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def protect(target: str, flags: int = MS_RDONLY | MS_NOSUID | MS_NODEV) -> None:
    """Set flags of a mount and of all below it. The values of these four flags are those of MOUNT_ATTR."""
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    arguments = (_AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, len(attributes))
    _checked(_call("mount_setattr", *arguments), f"mount_setattr {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root directory, and mount the former one at `old`."""
    _checked(_call("pivot_root", new.encode(), old.encode()), "pivot_root")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")


def hide_memory() -> None:
    """Keep other processes of the same user out of this one's memory."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def forbid_privileges() -> None:
    """Keep this process and what it starts from ever gaining privileges, such as by a program with the bit setuid."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    for number in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0):
            break  # the kernel knows no more, or this process has no privileges


def drop_privileges() -> None:
    """Give up all privileges that this process has."""
    _libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")


def filter_calls(*, forks: bool) -> None:
    """Refuse dangerous system calls for ever, and new processes too unless `forks`. Needs `forbid_privileges` before."""
    column, machine = _MACHINES[platform.machine()]

    def refuse(number: int, error: int) -> list[tuple[int, int, int, int]]:
        return [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error)] if number >= 0 else []

    program = [
        (0x20, 0, 0, 4),  # the machine
        (0x15, 1, 0, machine),
        (0x06, 0, 0, 0x80000000),  # kill: numbers of another machine mean other calls
        (0x20, 0, 0, 0),  # the call's number
        (0x35, 0, 1, 0x40000000),  # those of x32
        (0x06, 0, 0, 0x80000000),
    ]
    # glibc takes `clone` instead, whose flags can be read.
    program += refuse(_CALLS["clone3"][column], errno.ENOSYS)
    for numbers in _DENIED.values():
        program += refuse(numbers[column], errno.EPERM)
    if not forks:
        program += refuse(_CALLS["fork"][column], errno.EPERM)
        program += refuse(_CALLS["vfork"][column], errno.EPERM)
    wrong_flags = (0x45, 0, 1, _ALL_NEW) if forks else (0x45, 1, 0, _CLONE_THREAD)
    program += [
        (0x15, 0, 3, _CALLS["clone"][column]),
        (0x20, 0, 0, 16),  # the flags
        wrong_flags,
        (0x06, 0, 0, 0x00050000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000),  # allow
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    head = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _checked(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(head), 0, 0), "seccomp")


_READ = 1 | 4 | 8
"""Landlock: run, read files, list directories."""
_WRITE = 2 | 0x1FF0
"""Landlock: write and remove files, make files of all kinds."""


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> bool:
    """Allow only these files for ever, where the kernel has Landlock. Needs `forbid_privileges` before. Return whether it has."""
    version = _call("landlock_create_ruleset", None, 0, 1)
    if version < 1:
        return False
    # Moving files between directories, shortening them, devices: each came with a version.
    known = _READ | _WRITE
    known |= sum(bit for at, bit in ((2, 1 << 13), (3, 1 << 14), (5, 1 << 15)) if version >= at)
    network = 3 if version >= 4 else 0
    scopes = 3 if version >= 6 else 0
    ruleset = struct.pack("QQQ", known, network, scopes)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    descriptor = _checked(_call("landlock_create_ruleset", ruleset, size, 0), "landlock")
    for rights, paths in ((_READ, readable), (known, writable)):
        for path in paths:
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            allowed = rights
            if not os.path.isdir(path):
                allowed &= 1 | 2 | 4 | 1 << 14 | 1 << 15  # what a file has rights for
            rule = struct.pack("=Qi", allowed, opened)
            _checked(_call("landlock_add_rule", descriptor, 1, rule, 0), f"landlock {path}")
            os.close(opened)
    _checked(_call("landlock_restrict_self", descriptor, 0), "landlock")
    os.close(descriptor)
    return True


def _call(name: str, *arguments: object) -> int:
    number = _CALLS[name][_MACHINES[platform.machine()][0]]
    return int(_libc.syscall(ctypes.c_long(number), *map(_word, arguments)))


def _word(value: object) -> object:
    """Return an argument of `syscall`, which takes words of 64 bits."""
    return ctypes.c_long(value) if isinstance(value, int) else value


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result
