"""Run programs in a sandbox of Linux namespaces: no network, few files, limits of time, memory, disk and processes."""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from burnish.distributed.environment import descendants, kill_descendants
from burnish.sandbox.fork_server import SCRATCH

_START_SECONDS = 60.0
_SPARE_SECONDS = 10.0
"""How long the fork server may take to report beyond the program's own time."""
_WATCH_SECONDS = 0.05
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
)
"""What programs see beside Python and its packages."""
_STARTER = """
import sys
sys.path.insert(0, sys.argv[1])
from burnish.sandbox.fork_server import main
sys.path.remove(sys.argv[1])
main(int(sys.argv[2]))
"""


class SandboxError(Exception):
    """The sandbox itself failed, and the program is not to blame."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use, and what it sees."""

    seconds: float = 10.0
    """Time that passes while it runs."""
    cpu_seconds: int = 5
    """Processor time of each of its processes."""
    memory_mb: int = 1024
    """Address space of each of its processes, and memory of all of them together."""
    disk_mb: int = 64
    """All files in its /tmp together, which are in memory. Each of its outputs may be as large."""
    output_kb: int = 1024
    """How much of each of its outputs is read."""
    processes: int = 32
    """Processes and threads at the same time."""
    isolation: Literal["namespaces", "limits"] = "namespaces"
    """limits: without namespaces, for machines that forbid them. Then a program starts no processes, writes no files and sees the machine's processes."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before all programs, such as numpy."""
    visible: tuple[str, ...] = ()
    """Further files and directories that programs may read."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a limit that lets no program run."""
        for name in ("seconds", "cpu_seconds", "memory_mb", "disk_mb", "output_kb", "processes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"the sandbox's {name} is {getattr(self, name)}, and must be > 0")
        if self.isolation not in ("namespaces", "limits"):
            raise ValueError(f"isolation is {self.isolation!r}, not namespaces or limits")
        for name in ("preload", "visible"):  # lists, if they come from a configuration
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Execution:
    """How a program ended."""

    stdout: str
    stderr: str
    """Its outputs. What is no UTF-8 is replaced, and what is beyond `Limits.output_kb` is left out."""
    result: str
    """What it wrote into descriptor 3."""
    status: int
    """Its exit status, or minus the number of the signal that ended it."""
    stopped: Literal["time", "memory"] | None
    """The limit for which it was killed. A process that needs too much memory alone gets a `MemoryError` instead."""
    cut: bool
    """Whether it wrote more than `Limits.output_kb`."""
    cpu_seconds: float


class Sandbox:
    """Programs that run one after the other, forked from a process that has started Python already."""

    def __init__(self, limits: Limits | None = None) -> None:
        """Build the sandbox. Raises `SandboxError` where the kernel forbids it."""
        self.limits = limits or Limits()
        self._seconds = self.limits.seconds
        visible = _visible(self.limits.visible)
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).parents[2])
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", _STARTER, root, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environ(),
                pass_fds=[other.fileno()],
                start_new_session=True,  # the terminal's ctrl-C is for others
            )
        settings = {
            "isolation": self.limits.isolation,
            "preload": self.limits.preload,
            "visible": visible,
        }
        self._control.send(json.dumps(settings).encode())
        try:
            answer = self._receive(_START_SECONDS)
        except (SandboxError, TimeoutError):
            self.close()
            raise
        if "error" in answer:
            self.close()
            raise SandboxError(_refusal(str(answer["error"])))

    def run(self, code: str, stdin: str = "", seconds: float | None = None) -> Execution:
        """Run a Python program, at most `seconds`. Raises `SandboxError` if the sandbox fails, never for what the program does."""
        names = ("program", "stdin", "stdout", "stderr", "result")
        files = [os.memfd_create(name) for name in names]
        try:
            readable = [_filled(files[0], code), _filled(files[1], stdin)]
            try:
                self.start([*readable, *files[2:]], seconds)
            finally:
                for descriptor in readable:
                    os.close(descriptor)
            answer = self.wait()
            texts = [self._read(descriptor) for descriptor in files[2:]]
        finally:
            for descriptor in files:
                os.close(descriptor)
        most = self.limits.output_kb << 10
        status = int(answer["status"])
        cpu_seconds = float(answer["cpu"])
        is_late = status == -signal.SIGXCPU or (
            status == -signal.SIGKILL and cpu_seconds >= self.limits.cpu_seconds
        )
        return Execution(
            stdout=texts[0][:most].decode("utf-8", "replace"),
            stderr=texts[1][:most].decode("utf-8", "replace"),
            result=texts[2][:most].decode("utf-8", "replace"),
            status=status,
            stopped=answer.get("stopped") or ("time" if is_late else None),
            cut=max(map(len, texts)) > most,
            cpu_seconds=cpu_seconds,
        )

    def start(
        self, descriptors: Sequence[int], seconds: float | None, *, cpu_seconds: int | None = None
    ) -> None:
        """Start a program, whose text, stdin, stdout, stderr and result are descriptors. `wait` has to follow."""
        self._seconds = self.limits.seconds if seconds is None else seconds
        request = {
            "seconds": self._seconds,
            "cpu": cpu_seconds or self.limits.cpu_seconds,
            "memory": self.limits.memory_mb << 20,
            "disk": self.limits.disk_mb << 20,
            "processes": self.limits.processes,
        }
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], [*descriptors])
        except OSError as error:
            raise SandboxError(f"the process of the sandbox has ended ({error})") from error

    def wait(self) -> dict[str, Any]:
        """Wait until a program has ended, watch the memory of its processes, and return how it ended."""
        deadline = time.monotonic() + self._seconds + _SPARE_SECONDS
        is_stopped = False
        while True:
            with suppress(TimeoutError):
                answer = self._receive(_WATCH_SECONDS)
                if "error" in answer:
                    raise SandboxError(f"the sandbox failed: {answer['error']}")
                return answer
            if time.monotonic() > deadline:
                raise SandboxError("the process of the sandbox does not answer")
            if not is_stopped and self.uses_too_much():
                is_stopped = True
                self._control.send(b"x")

    def fileno(self) -> int:
        """Return a descriptor that can be read once a program has ended."""
        return self._control.fileno()

    def uses_too_much(self) -> bool:
        """Return whether the processes of a program need more memory together than one may have."""
        pages = 0
        for pid in descendants(self._process.pid):
            with suppress(OSError, IndexError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() > self.limits.memory_mb << 20

    def _receive(self, seconds: float) -> dict[str, Any]:
        self._control.settimeout(seconds)
        try:
            message = self._control.recv(1 << 16)
        except ConnectionError:
            message = b""
        if not message:
            raise SandboxError("the process of the sandbox has ended")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _read(self, descriptor: int) -> bytes:
        return os.pread(descriptor, (self.limits.output_kb << 10) + 1, 0)

    def close(self) -> None:
        """End the sandbox, and whatever runs in it."""
        self._control.close()
        kill_descendants(self._process.pid)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@lru_cache(maxsize=4)
def _shared(limits: Limits) -> list[Sandbox]:
    """Return a place for the sandbox of a process."""
    return []


def run_shared(
    limits: Limits, code: str, stdin: str = "", seconds: float | None = None
) -> Execution:
    """Run a program as `Sandbox.run` does, in a sandbox that lives as long as this process. A lost one is made again."""
    place = _shared(limits)
    for is_last in (False, True):
        if not place:
            place.append(Sandbox(limits))
            atexit.register(place[0].close)
        try:
            return place[0].run(code, stdin, seconds)
        except SandboxError:
            place.pop().close()
            if is_last:
                raise
    raise AssertionError


def _filled(descriptor: int, text: str) -> int:
    """Write a text into a file in memory, and return a descriptor that can only read it."""
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "replace"))
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def _visible(further: Sequence[str]) -> dict[str, str]:
    """Return the files and directories that programs may read, each with what it is without links."""
    python = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    paths = dict[str, str]()
    for path in map(os.path.abspath, (*_SYSTEM, *python, *further)):
        real = os.path.realpath(path)
        if os.path.exists(real):
            paths |= {path: real, real: real}
        elif path in further:
            raise SandboxError(f"there is no {path}, which programs are to see")
    private = [path for path in paths if path == SCRATCH or path.startswith(f"{SCRATCH}/")]
    if private:
        raise SandboxError(
            f"programs cannot see {private[0]}, because they have a {SCRATCH} of their own"
        )
    return paths


def _environ() -> dict[str, str]:
    """Return the environment of programs: nothing of this process's but where its libraries are."""
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return (
        libraries
        | threads
        | {
            "HOME": SCRATCH,
            "LANG": "C.UTF-8",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONUTF8": "1",
        }
    )


def _refusal(what: str) -> str:
    """Say why a sandbox cannot be built."""
    return (
        f"this machine cannot isolate programs ({what}): allow user namespaces (Linux 5.14 or newer; user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0, or in a container the system calls unshare and mount), or set limits: {isolation: limits} "
        "in kwargs, which protects less"
    )
