"""What a process cannot do any more once it has given it up; each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from burnish.checkpoint.tools.sandbox import keep_writes_to, landlock_version

needs_landlock = pytest.mark.skipif(not landlock_version(), reason="a kernel without Landlock")

PROGRAM = """
import os, socket, subprocess, sys
from pathlib import Path
from burnish.checkpoint.tools.sandbox import keep_writes_to, limit_files
inside, outside = map(Path, sys.argv[1:3])
keep_writes_to(inside)
limit_files(1000)
try:
    exec(sys.argv[3])
except (OSError, PermissionError) as error:
    print(type(error).__name__)
else:
    print("done")
"""


def tried(tmp_path: Path, code: str) -> str:
    """What comes of some code in a process that may write to tmp_path/inside only."""
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "outside/there").write_text("as it was")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "inside", tmp_path / "outside", code],
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
