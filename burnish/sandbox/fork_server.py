"""The process that programs are forked from. It has imported what programs often need, so that one starts in a few ms.

`main` builds the sandbox once: a user namespace without privileges outside, a root directory of a few read-only mounts, no network. Each
program then gets a process namespace, /proc and /tmp of its own. When its first process ends, the kernel ends all others.

    Sandbox --(socket)-- outer process --- keeper, process 1 of the sandbox --- process 1 of a program --- the program

It imports only the standard library and `burnish.sandbox.kernel`, which imports no more.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import linecache
import math
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from burnish.sandbox import kernel

SCRATCH = "/tmp"
"""The only directory that a program may write to. It is empty at first, in memory, and gone after the program."""
RESULT = 3
"""The descriptor of a program's result."""
_SOURCE = 4
_REPORT = 5
_INSIDE = 1000
"""The user that programs are, inside."""
_NOBODY = 65534
"""The user that they are outside, if root starts them: the kernel does not count the processes of root."""
_BEFORE = "/before"
_NEW = "/new"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_COMMON = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq"),
    *("itertools", "json", "math", "operator", "random", "re", "statistics", "string", "typing"),
)
"""What programs often import."""
_SAFE = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
_FILE = "program.py"


def main(descriptor: int) -> None:
    """Serve the socket `descriptor`: the first message has the settings, each further one a program."""
    os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=descriptor)
    settings = json.loads(control.recv(1 << 16))
    try:
        if not kernel.is_known_machine():
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), f"machine {os.uname().machine}")
        if settings["isolation"] == "namespaces":
            _enter(settings, control)
        for name in (*_COMMON, *settings["preload"]):
            import_module(name)
    except (OSError, ImportError) as error:
        what = error.filename if isinstance(error, OSError) and error.filename else ""
        text = f"{what}: {error.strerror if isinstance(error, OSError) else error}"
        control.send(json.dumps({"error": text.removeprefix(": ")}).encode())
        os._exit(1)
    kernel.hide_memory()
    control.send(b"{}")
    _serve(settings, control)
    os._exit(0)


def _enter(settings: dict[str, Any], control: socket.socket) -> None:
    """Build the sandbox. The calling process waits for its end; a child goes on inside."""
    outside = os.getuid()
    settings["users"] = _new_user_namespace()
    kernel.unshare(
        kernel.CLONE_NEWNS
        | kernel.CLONE_NEWPID
        | kernel.CLONE_NEWNET
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS
    )
    keeper = os.fork()
    if keeper:
        control.close()
        os.waitpid(keeper, 0)
        os._exit(0)
    kernel.die_with_parent()
    socket.sethostname("sandbox")
    _build_root(settings["visible"])
    # The kernel does not count the processes of the machine's root.
    settings["forks"] = outside != 0 or settings["users"]


def _new_user_namespace() -> bool:
    """Enter a user namespace. Return whether it has a second user, `_NOBODY` outside, which only root may give it."""
    own = os.getuid()
    group = os.getgid()
    parent = os.getpid()
    go, ready = os.pipe()
    helper = 0
    if own == 0:
        helper = os.fork()
        if helper == 0:
            os.close(ready)  # so that the end of the parent ends this process too
            if not os.read(go, 1):
                os._exit(1)
            try:
                for name in ("gid_map", "uid_map"):
                    _write(f"/proc/{parent}/{name}", f"0 0 1\n{_INSIDE} {_NOBODY} 1")
                os._exit(0)
            except OSError:
                os._exit(1)
    kernel.unshare(kernel.CLONE_NEWUSER)
    os.write(ready, b"x")
    os.close(go)
    os.close(ready)
    if helper and os.waitpid(helper, 0)[1] == 0:
        return True
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_INSIDE} {own} 1")
    _write("/proc/self/gid_map", f"{_INSIDE} {group} 1")
    return False


def _build_root(visible: Mapping[str, str]) -> None:
    """Make a root directory that has `visible`, read-only, a few devices, and nothing else."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    options = "size=1m,mode=755"
    kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    os.chdir(SCRATCH)
    os.mkdir(f".{_BEFORE}")
    os.mkdir(f".{_NEW}")
    kernel.pivot_root(".", f".{_BEFORE}")
    os.chdir("/")
    kernel.mount("tmpfs", _NEW, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for path, real in sorted(visible.items()):
        _show(path, real)
    os.makedirs(f"{_NEW}/dev")
    for name in _DEVICES:
        device = f"/dev/{name}"
        _bind(device, device, kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NOEXEC)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{_NEW}/dev/{name}")
    os.symlink("/proc/self/fd", f"{_NEW}/dev/fd")
    os.symlink(SCRATCH, f"{_NEW}/dev/shm")
    for name in ("proc", SCRATCH[1:]):
        os.makedirs(f"{_NEW}/{name}", exist_ok=True)
    # The kernel lets programs mount /proc only while another one is in sight. They put theirs on top of this one.
    _mount_proc(f"{_NEW}/proc")
    os.chdir(_NEW)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.protect("/", kernel.MS_RDONLY | kernel.MS_NOSUID)


def _show(path: str, real: str) -> None:
    """Show a file or directory, or the link that it is, at its own place."""
    place = _NEW + path
    if os.path.lexists(place) or not os.path.lexists(_BEFORE + real):
        return
    if path != real and os.path.islink(_BEFORE + path):
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.symlink(os.readlink(_BEFORE + path), place)
    else:
        _bind(path, real)


def _bind(path: str, real: str, flags: int = _SAFE) -> None:
    source = _BEFORE + real
    place = _NEW + path
    if os.path.isdir(source):
        os.makedirs(place)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT, 0o644))
    kernel.mount(source, place, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.protect(place, flags)


def _serve(settings: Mapping[str, Any], control: socket.socket) -> None:
    """Run one program after the other, until the socket closes."""
    here = os.pidfd_open(os.getpid())
    is_inside = settings["isolation"] == "namespaces"
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 8)
        if not message:
            return
        limits = json.loads(message)
        report, written = os.pipe()
        if is_inside:
            # New processes are born in a namespace of their own; the next call needs one more.
            kernel.set_namespace(here, kernel.CLONE_NEWPID)
            kernel.unshare(kernel.CLONE_NEWPID)
        first = os.fork()
        if first == 0:
            control.close()
            os.close(report)
            if is_inside:
                _lead(settings, limits, descriptors, written)
            _be_program(settings, limits, descriptors, written)
        os.close(written)
        for each in descriptors:
            os.close(each)
        answer = _wait(first, limits["seconds"], control)
        lines = os.read(report, 1 << 12).splitlines()
        os.close(report)
        if lines:
            answer |= json.loads(lines[0])
        elif is_inside and "stopped" not in answer:
            answer = {"error": "the first process of a program ended"}
        control.send(json.dumps(answer).encode())


def _wait(process: int, seconds: float, control: socket.socket) -> dict[str, Any]:
    """Wait for a process, and kill it if it is late or if `control` says so. Return how it ended."""
    waiting = os.pidfd_open(process)
    ready, _, _ = select.select([waiting, control.fileno()], [], [], seconds)
    answer: dict[str, Any] = {}
    if waiting not in ready:
        answer["stopped"] = "memory" if ready else "time"
        os.kill(process, signal.SIGKILL)
        if ready and not control.recv(1):
            os._exit(0)  # nobody waits for an answer
    _, status, usage = os.wait4(process, 0)
    os.close(waiting)
    return _ended(status, usage) | answer


def _ended(status: int, usage: resource.struct_rusage) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(status)
    return {"status": code, "cpu": usage.ru_utime + usage.ru_stime}


def _lead(
    settings: Mapping[str, Any], limits: Mapping[str, Any], descriptors: Sequence[int], report: int
) -> NoReturn:
    """Be the first process of a program: start it, wait for it, and report how it ended."""
    try:
        kernel.die_with_parent()
        kernel.unshare(kernel.CLONE_NEWNS)
        private = f"size={limits['disk']},nr_inodes=10000,mode=1777"
        kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, private)
        _mount_proc("/proc")
        program = os.fork()
        if program == 0:
            _be_program(settings, limits, descriptors, report)
        kernel.forbid_privileges()
        kernel.drop_privileges()
        ended = 0
        while ended != program:  # others are orphans of the program
            ended, status, usage = os.wait4(-1, 0)
        answer = _ended(status, usage)
    except OSError as error:
        answer = {"error": f"{error.filename or ''}: {error.strerror}"}
    os.write(report, json.dumps(answer).encode())
    os._exit(0)


def _mount_proc(place: str) -> None:
    """Mount a /proc of the own processes only, or an empty directory where the kernel forbids it, as in many containers."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    try:
        kernel.mount("proc", place, "proc", flags, "subset=pid")
    except OSError:
        kernel.mount("tmpfs", place, "tmpfs", flags | kernel.MS_RDONLY, "size=4k")


def _be_program(
    settings: Mapping[str, Any], limits: Mapping[str, Any], descriptors: Sequence[int], report: int
) -> NoReturn:
    """Take the program's descriptors, limit this process for ever, and run the program."""
    try:
        # Out of the way of the numbers that they get.
        *high, report = (fcntl.fcntl(each, fcntl.F_DUPFD, 100) for each in (*descriptors, report))
        for number, descriptor in enumerate((*high[1:], high[0])):
            os.dup2(descriptor, number)
        report = os.dup2(report, _REPORT)
        os.closerange(_REPORT + 1, 1 << 16)
        _confine(settings, limits)
    except (OSError, ValueError) as error:
        what = error.filename if isinstance(error, OSError) and error.filename else "limits"
        text = json.dumps({"error": f"{what}: {error}"})
        os.write(report, f"{text}\n".encode())
        os._exit(1)
    os.close(_REPORT)
    _run()


def _confine(settings: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
    is_inside = settings["isolation"] == "namespaces"
    forks = bool(settings.get("forks"))
    os.setsid()
    kernel.forbid_privileges()
    if is_inside and settings["users"]:
        _become(_INSIDE)
    is_root = not is_inside and os.getuid() == 0
    if is_root:
        with suppress(OSError):  # the root of a container may have no other user
            _become(_NOBODY)
            is_root = False
    most = {
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: limits["disk"],
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if forks:
        # Without a second user, the processes of the sandbox itself count.
        most[resource.RLIMIT_NPROC] = limits["processes"] + 4
    for kind, value in most.items():
        _limit(kind, value, value)
    seconds = math.ceil(limits["cpu"])
    _limit(resource.RLIMIT_CPU, seconds, seconds + 1)
    os.chdir(SCRATCH if is_inside else "/")
    os.umask(0o022)
    kernel.drop_privileges()
    devices = [f"/dev/{name}" for name in _DEVICES]
    readable = ["/"] if is_inside else settings["visible"]
    writable = [SCRATCH, *devices] if is_inside else devices
    if not kernel.restrict_files(readable, writable) and is_root:
        raise OSError(errno.EPERM, "root needs Landlock, or another user", "setuid")
    kernel.filter_calls(forks=forks)


def _limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit, or keep a stricter one that the machine has set."""
    before = resource.getrlimit(kind)[1]
    most = hard if before == resource.RLIM_INFINITY else min(hard, before)
    resource.setrlimit(kind, (min(soft, most), most))


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _run() -> NoReturn:
    """Run the program's text as Python's main module, and end as the interpreter would."""
    with open(_SOURCE, "rb") as file:
        source = file.read().decode()
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [_FILE]
    random.seed(0)  # so that a program that draws is graded alike each time
    status = 0
    try:
        exec(compile(source, _FILE, "exec", dont_inherit=True), vars(module))
    except SystemExit as error:
        status = _status_of(error.code)
    except BaseException as error:  # noqa: BLE001 - the program may raise anything
        status = 1
        own = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, own)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - the program may have closed or replaced them
        status = status or 120
    os._exit(status)


def _status_of(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
