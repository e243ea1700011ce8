"""A process that has imported what takes seconds, and forks one for every connection: those of the tests.

One serves a test run and all its workers. A client sends its standard streams and a `Request`.
It receives the id of the process, what that sends, and its `Ended`. A process whose client is gone is killed.
The server is given a socket that listens already, so who connects while it imports is served afterwards.
It ends when its standard input is closed, which the end of the test run does.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).parents[2]
# The variable by which the workers of a test run find the server of its controller.
_ADDRESS = "BURNISH_TESTS_FORK_SERVER"
ANEW = "BURNISH_TESTS_COMPANIONS_ANEW"
"""The variable by which a test has companions start as those of users do, which takes seconds."""
# How many descriptors a client may send, and what is above all their numbers.
_MOST_DESCRIPTORS = 16
_ABOVE = 600

PRELOAD = (
    "datasets.io.json",
    "hypothesis",
    "peft",
    "pytest",
    "rich._emoji_codes",
    "tensorboard.summary.writer.record_writer",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard.summary",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "burnish.algorithms.advantages",
    "burnish.algorithms.policy_loss",
    "burnish.check.family_proof",
    "burnish.checkpoint.background",
    "burnish.checkpoint.destinations.mirror",
    "burnish.checkpoint.destinations.run_mirror",
    "burnish.distributed.child_process",
    "burnish.cli.main",
    "burnish.cli.run",
    "burnish.data.length_cache",
    "burnish.distributed.failure_watch",
    "burnish.distributed.stall",
    "burnish.engines.megatron.megatron_engine",
    "burnish.engines.torch.activation_offload",
    "burnish.engines.torch.tensor_parallel",
    "burnish.models.kernels.ulysses",
    "burnish.models.lora.adapter",
    "burnish.models.lora.experts",
    "burnish.rollout.builtin.shared_cache",
    "burnish.tracking.console",
    "burnish.tracking.rollouts",
    "burnish.tracking.tensorboard",
    "burnish.tracking.traces",
    "burnish.methods.parts.critic",
    "burnish.methods.parts.validation",
    "burnish.methods.parts.guard",
    "burnish.runs.download_inputs",
    "burnish.runs.model_card",
    "burnish.methods.parts.online_training",
    "burnish.methods.parts.serve",
    "burnish.methods.parts.offline_training",
    "burnish.tracking.report",
    "support.models.adapters",
    "contracts.engine",
    "support.models.engines",
    "support.checkpoints.layout_pairs",
    "support.ranks.processes",
    "support.models.tiny",
    "support.runs.training_files",
)


@dataclass(frozen=True)
class Call:
    """A function at the top level of a module, and its last arguments.

    Only the process that calls has to find the module, by its file: pytest's importlib mode makes names that
    cannot be imported.
    """

    module: str
    file: str
    function: str
    arguments: bytes

    @classmethod
    def of(cls, fn: Callable[..., Any], *arguments: Any) -> Call:
        file = sys.modules[fn.__module__].__file__
        return cls(fn.__module__, file, fn.__qualname__, pickle.dumps(arguments))

    def __call__(self, *first: Any) -> Any:
        if self.module not in sys.modules:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            module = importlib.util.module_from_spec(spec)
            sys.modules[self.module] = module
            spec.loader.exec_module(module)
        arguments = pickle.loads(self.arguments)  # noqa: S301 - written by a test
        return getattr(sys.modules[self.module], self.function)(*first, *arguments)


@dataclass(frozen=True)
class Request:
    call: Call
    environ: Mapping[str, str]
    path: Sequence[str]
    """Where modules are found."""
    descriptors: Sequence[int]
    """What the client sends of these numbers, the process has under the same."""


@dataclass(frozen=True)
class Ended:
    """The last thing that a client receives."""

    code: int
    """As multiprocessing has it: minus the number of the signal that ended the process."""


@cache
def address() -> str:
    """The socket of the server, which is started unless there is one, and ends with the process that started it."""
    if _ADDRESS not in os.environ:
        os.environ[_ADDRESS] = _start()
    return os.environ[_ADDRESS]


def with_given_path(*own: Path) -> str:
    """A PYTHONPATH of `own` directories and of this process's."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, own), *([given] if given else [])])


def _start() -> str:
    directory = tempfile.mkdtemp(prefix="burnish-forks-")
    path = with_given_path(TESTS, TESTS.parent)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{directory}/socket")
        listening.listen(1000)
        server = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import Server; Server({listening.fileno()})"],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            pass_fds=(listening.fileno(),),
        )
    atexit.register(_end, server, directory)
    return f"{directory}/socket"


def _end(server: subprocess.Popen[bytes], directory: str) -> None:
    server.stdin.close()
    server.wait()
    shutil.rmtree(directory, ignore_errors=True)


class Server:
    """Import, and serve until standard input is closed."""

    def __init__(self, descriptor: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client's, which ends what it started
        self._listening = socket.socket(fileno=descriptor)
        self._children: dict[int, tuple[ForkProcess, Connection]] = {}
        gc.disable()  # it would look at all modules again and again
        for name in PRELOAD:
            importlib.import_module(name)
        _compute_what_all_need()
        fork_companions()
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page that it looks at
        gc.enable()
        _gather_pages()
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(sys.stdin, selectors.EVENT_READ, self._end)
            self._selector.register(self._listening, selectors.EVENT_READ, self._fork)
            while True:
                for key, _ in self._selector.select():
                    if self._selector.get_map().get(key.fd) is key:  # what came before closed it
                        key.data()

    def _fork(self) -> None:
        client, _ = self._listening.accept()
        with client:
            _, streams, _, _ = socket.recv_fds(client, 1, _MOST_DESCRIPTORS)
            connection = Connection(client.detach())
        try:
            request = connection.recv()
        except (EOFError, OSError):  # a client that is gone already
            connection.close()
            return
        process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(connection, streams, request)
        )
        process.start()
        for each in streams:
            os.close(each)
        descriptor = os.pidfd_open(process.pid)
        self._children[descriptor] = process, connection
        self._selector.register(descriptor, selectors.EVENT_READ, partial(self._reap, descriptor))
        self._selector.register(
            connection, selectors.EVENT_READ, partial(self._abandon, descriptor)
        )

    def _reap(self, descriptor: int) -> None:
        process, connection = self._children.pop(descriptor)
        process.join()
        with suppress(OSError):  # its client is gone
            connection.send(Ended(process.exitcode))
        process.close()
        self._selector.unregister(descriptor)
        os.close(descriptor)
        if not connection.closed:
            self._selector.unregister(connection)
            connection.close()

    def _abandon(self, descriptor: int) -> None:
        process, connection = self._children[descriptor]
        process.kill()
        self._selector.unregister(connection)
        connection.close()

    def _end(self) -> None:
        for process, _ in self._children.values():
            process.kill()
        os._exit(0)

    def _run(self, connection: Connection, streams: Sequence[int], request: Request) -> None:
        """Be the process."""
        for descriptor, (_, other) in self._children.items():
            os.close(descriptor)
            other.close()
        self._listening.close()
        self._selector.close()
        # Above all numbers that a client may have sent, so that nothing is in their way.
        own, *given = (
            fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
            for each in (connection.fileno(), *streams)
        )
        for each in streams:
            os.close(each)
        connection.close()
        connection = Connection(own)
        for number, each in zip(request.descriptors, given, strict=True):
            os.dup2(each, number)
            os.close(each)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it for the tests
        os.environ.clear()
        os.environ.update(request.environ)
        sys.path[:] = request.path
        tempfile.tempdir = None
        connection.send(os.getpid())
        request.call(connection)


def _compute_what_all_need() -> None:
    """What every process would compute anew."""
    import codecs

    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from burnish.check import proof_key
    from burnish.config.keys import known_keys
    from burnish.data import length_cache as kept_lengths
    from burnish.tracking import report

    known_keys()  # the schema, in words
    proof_key.own_code()  # reads the library's files, once
    kept_lengths._code()  # so does this
    get_checkpoint_conversion_mapping("qwen3")  # compiles 600 regular expressions, once
    codecs.lookup("idna")  # which every name of a host asks for
    report._page()  # reads it, once


def execute(connection: Connection, code: str) -> None:
    """Be `python -c`."""
    sys.stdin = os.fdopen(0)  # multiprocessing has closed it
    exec(code, {"__name__": "__main__"})


def _gather_pages() -> None:
    """Let Linux keep what was imported in huge pages, of which a fork copies and frees 512 times fewer."""
    if sys.platform != "linux":
        return
    collapse, size = 25, 2 << 20  # MADV_COLLAPSE, of Linux 6.1; one before refuses it
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, inode = line.split()[:5]
        if rights == "rw-p" and inode == "0":
            first, end = (int(each, 16) for each in addresses.split("-"))
            for start in range(-(-first // size) * size, end - size + 1, size):
                madvise(start, size, collapse)  # fails where nothing is


class Forked:
    """A function called in a process of its own, with its connection to this process before the arguments.

    The function is at the top level of its module. `environ` is added to the variables of this process.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *arguments: Any,
        environ: Mapping[str, str] | None = None,
        descriptors: Mapping[int, int] | None = None,
    ) -> None:
        """With `descriptors`, the process has those of this process under the numbers that are their keys."""
        self._code: int | None = None
        self._received: deque[Any] = deque()
        given = {0: 0, 1: 1, 2: 2} | dict(descriptors or {})
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address())
            socket.send_fds(client, [b" "], list(given.values()))
            self._connection = Connection(client.detach())
        own = {**os.environ, **(environ or {})}
        self._connection.send(Request(Call.of(fn, *arguments), own, sys.path, list(given)))
        self.pid: int = self._connection.recv()

    def fileno(self) -> int:
        """Something to wait for: readable when it has sent something or ended."""
        return self._connection.fileno()

    def recv(self) -> Any:
        """What it sends next. Raises `EOFError` once it has ended."""
        while not self._received:
            if self._code is not None:
                raise EOFError
            self._receive()
        return self._received.popleft()

    def is_running(self) -> bool:
        """Whether its end has not been told yet."""
        while self._code is None and self._connection.poll():
            self._receive()
        return self._code is None

    def wait(self, seconds: float | None = None) -> int:
        """Its exit code, minus the signal's number if one killed it. Raises `TimeoutError`."""
        until = None if seconds is None else time.monotonic() + seconds
        while self._code is None:
            if not self._connection.poll(until and max(0.0, until - time.monotonic())):
                raise TimeoutError(f"process {self.pid} still runs")
            self._receive()
        return self._code

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.is_running():
            with suppress(ProcessLookupError):  # it has ended by now
                os.kill(self.pid, number)

    def kill(self) -> int:
        """End it at once; its exit code."""
        self.send(signal.SIGKILL)
        return self.wait()

    def _receive(self) -> None:
        match self._connection.recv():
            case Ended(code):
                self._code = code
                self._connection.close()
            case message:
                self._received.append(message)


_COMPANIONS = (
    "burnish.checkpoint.background",
    "burnish.checkpoint.destinations.mirror",
    "burnish.methods.parts.serve",
)


def start_companion(command: Sequence[str], **options: Any) -> Any:
    """Start the companion of a training process; fork it if it imports what takes seconds."""
    if ANEW not in os.environ and command[-1].startswith(
        tuple(f"from {name} import" for name in _COMPANIONS)
    ):
        return _ForkedCompanion(command[-1], **options)
    return subprocess.Popen(command, **options)


class _ForkedCompanion:
    """As much of a `Popen` as a companion asks."""

    def __init__(
        self,
        code: str,
        *,
        stdin: int,
        stdout: Any,
        stderr: Any,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> None:
        given = {each: each for each in pass_fds}
        given |= {n: log.fileno() for n, log in ((1, stdout), (2, stderr)) if log is not None}
        with open(os.devnull) as nothing:
            self._process = Forked(
                accompany,
                code,
                os.getpid(),
                os.getcwd(),
                start_new_session,
                environ=env,
                descriptors={0: nothing.fileno(), **given},
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return None if self._process.is_running() else self._process.wait()

    def wait(self, seconds: float) -> int:
        try:
            return self._process.wait(seconds)
        except TimeoutError:
            raise subprocess.TimeoutExpired("a companion", seconds) from None

    def kill(self) -> None:
        self._process.send(signal.SIGKILL)


def accompany(
    connection: Connection, code: str, parent: int, directory: str, own_session: bool
) -> None:
    """Be a companion. The server kills it when the process that started it is gone."""
    from burnish.distributed.environment import STOPPING

    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    os.chdir(directory)
    if own_session:
        os.setsid()
    # The server is its parent, and the other end of the connection is held by the one that it asks for.
    os.getppid = lambda: 1 if connection.poll() else parent
    execute(connection, code)


def fork_companions() -> None:
    """From now on this process and its forks start companions by forking."""
    from burnish.distributed import child_process

    child_process.subprocess = SimpleNamespace(
        Popen=start_companion, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


if __name__ == "__main__":  # what xdist starts as a worker's Python, with `-u -c CODE`
    sys.path[0] = str(TESTS)
    from support.ranks.fork_server import Forked as Imported
    from support.ranks.fork_server import execute as imported

    sys.exit(Imported(imported, sys.argv[-1]).wait())
