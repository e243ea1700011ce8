"""What a process cannot do any more once it has given it up; each in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.checkpoint.tools import sandbox
from burnish.checkpoint.tools.sandbox import has_seccomp, keep_writes_to, landlock_version

needs_seccomp = pytest.mark.skipif(not has_seccomp(), reason="no seccomp filters here")
needs_landlock = pytest.mark.skipif(not landlock_version(), reason="a kernel without Landlock")

PROGRAM = """
import os, signal, socket, subprocess, sys, threading
from pathlib import Path
from burnish.checkpoint.tools.sandbox import forbid_calls, keep_writes_to, limit_files, limit_memory
inside, outside = map(Path, sys.argv[1:3])
exec(sys.argv[4])
limit_files(1000)
try:
    exec(sys.argv[3])
except (OSError, PermissionError, MemoryError) as error:
    print(type(error).__name__)
else:
    print("done")
"""


def tried(tmp_path: Path, code: str, given_up: str = "keep_writes_to(inside)") -> str:
    """What comes of some code in a process that may write to tmp_path/inside only, or has given up other rights."""
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "outside/there").write_text("as it was")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "inside", tmp_path / "outside", code, given_up],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    return done.stdout.strip()


@needs_landlock
@pytest.mark.parametrize(
    "code",
    [
        "(outside / 'new').write_text('x')",
        "(outside / 'there').write_text('x')",
        "(outside / 'there').open('a')",
        "os.truncate(outside / 'there', 0)",
        "(outside / 'there').unlink()",
        "(outside / 'directory').mkdir()",
        "(outside / 'there').rename(outside / 'gone')",
        "(outside / 'there').rename(inside / 'taken')",
        "(outside / 'link').symlink_to('/')",
        "(inside / 'link').symlink_to(outside / 'there'); (inside / 'link').write_text('x')",
        "os.link(outside / 'there', inside / 'hard')",
        "subprocess.run(['/bin/true'])",
        "socket.create_connection(('127.0.0.1', 9))",
        "socket.socket().bind(('127.0.0.1', 0))",
        "open('/dev/shm/x', 'w')",
    ],
)
def test_what_was_given_up_fails(tmp_path: Path, code: str) -> None:
    assert tried(tmp_path, code) in ("PermissionError", "OSError")  # OSError: a link across
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["there"]
    assert (tmp_path / "outside/there").read_text() == "as it was"


CALLS = [
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "socket.socket(socket.AF_UNIX)",
    "socket.socketpair()",
    "socket.socket(socket.AF_INET6)",
    "os.kill(os.getppid(), 0)",
    "signal.pidfd_send_signal(0, 0)",
    "os.pidfd_open(os.getppid())",
    "os.chmod(outside / 'there', 0o777)",
    "os.chmod(outside / 'there', 0o777, dir_fd=os.open('/', 0))",
    "os.chown(outside / 'there', os.getuid(), -1)",
    "os.chown(outside / 'there', os.getuid(), -1, follow_symlinks=False)",
    "os.utime(outside / 'there')",
    "os.setxattr(outside / 'there', 'user.x', b'x')",
    "os.removexattr(outside / 'there', 'user.x')",
    "file = open(outside / 'there'); os.fchmod(file.fileno(), 0o777)",
    "file = open(outside / 'there'); os.fchown(file.fileno(), os.getuid(), -1)",
]


@needs_seccomp
@pytest.mark.parametrize("code", CALLS)
def test_calls_that_were_forbidden_fail(tmp_path: Path, code: str) -> None:
    assert tried(tmp_path, code, "forbid_calls()") == "PermissionError"


@needs_landlock
@pytest.mark.skipif(landlock_version() < sandbox.SCOPES_VERSION, reason="Landlock has no scopes")
def test_landlock_alone_keeps_from_signals_and_abstract_sockets(tmp_path: Path) -> None:
    assert tried(tmp_path, "os.kill(os.getppid(), 0)") == "PermissionError"
    assert tried(tmp_path, "os.kill(os.getpid(), 0)") == "done"
    name = f"\0burnish-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        code = f"socket.socket(socket.AF_UNIX).connect({name!r})"
        assert tried(tmp_path, code) == "PermissionError"
        assert tried(tmp_path, code, "keep_writes_to(inside, version=5)") == "done"


@needs_seccomp
def test_a_filter_leaves_what_the_work_needs(tmp_path: Path) -> None:
    code = "t = threading.Thread(target=list); t.start(); t.join(); (inside / 'x').write_text('x'); os.pipe(); os.stat('/')"
    assert tried(tmp_path, code, "forbid_calls()") == "done"


def test_memory_has_a_limit(tmp_path: Path) -> None:
    limit = "limit_memory(64 << 20)"
    assert tried(tmp_path, "bytearray(32 << 20)", limit) == "done"
    assert tried(tmp_path, "bytearray(128 << 20)", limit) == "MemoryError"


@pytest.mark.parametrize(
    "code",
    [
        "(inside / 'new').write_text('x')",
        "(inside / 'a').mkdir(); (inside / 'a' / 'b').write_text('x'); (inside / 'a' / 'b').unlink()",
        "(inside / 'c').write_text('x'); (inside / 'c').rename(inside / 'd')",
        "open(os.devnull, 'w').write('x')",
        "assert (outside / 'there').read_text() == 'as it was'",
    ],
)
def test_what_was_kept_works(tmp_path: Path, code: str) -> None:
    assert tried(tmp_path, code) == "done"


def test_no_file_grows_beyond_the_limit(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); (inside / 'x').write_bytes(bytes(1001))"
    assert tried(tmp_path, code) == "OSError"


def test_without_landlock_nothing_is_promised(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Landlock"):
        keep_writes_to(tmp_path, version=0)


@needs_landlock
def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        keep_writes_to(tmp_path / "absent")
