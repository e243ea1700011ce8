"""Directories that are being written, and those whose writers are gone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from burnish.checkpoint.tools.export import partial_directory
from burnish.files.storage import LocalStorage

LOCAL = LocalStorage()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_what_the_dead_left_goes_and_what_lives_stays(tmp_path: Path) -> None:
    dead = tmp_path / f".out.{uuid.uuid4().hex}"
    (dead / "model").mkdir(parents=True)
    (dead / "model" / "big").write_bytes(b"half")
    others = {".out.mine", f".other.{uuid.uuid4().hex}", f".out.{uuid.uuid4().hex}.old"}
    for name in others:
        (tmp_path / name).mkdir()
    target = tmp_path / "out"
    with partial_directory(target, LOCAL) as first:
        assert names(tmp_path) == {first.name, *others}
        with partial_directory(target, LOCAL) as second:  # at the same time
            assert names(tmp_path) == {first.name, second.name, *others}
            second.rename(target)
    assert names(tmp_path) == {first.name, target.name, *others}


KILLED = """
import os, signal, sys
from pathlib import Path
from burnish.checkpoint.tools.export import partial_directory
from burnish.files.storage import LocalStorage
with partial_directory(Path(sys.argv[1]), LocalStorage()) as path:
    (path / "big").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.nightly
def test_a_writer_that_was_killed(tmp_path: Path) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    argv = [sys.executable, "-c", KILLED, tmp_path / "out"]
    done = subprocess.run(argv, check=False, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == -9
    [left] = names(tmp_path)
    with partial_directory(tmp_path / "out", LOCAL) as new:
        assert names(tmp_path) == {new.name} != {left}


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), partial_directory(tmp_path / "out", LOCAL) as path:
        path.write_bytes(b"a directory is no file")
    assert names(tmp_path) == set()


class Stubborn(LocalStorage):
    """A disk that lets nothing go."""

    def remove(self, path: Path) -> None:
        raise OSError("made to fail")


def test_what_cannot_be_removed_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f".out.{uuid.uuid4().hex}").mkdir()
    with caplog.at_level(logging.WARNING), partial_directory(tmp_path / "out", Stubborn()) as path:
        path.rename(tmp_path / "out")
    assert "made to fail" in caplog.text
