"""Nothing on disk can change without being found and named, and finding it needs no torch."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import subprocess
import sys

import pytest
from support.checkpoints.states import BIG_SHAPES, make_state, save_once, shards_of
from support.faults.bit_flips import flip

from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.steps import newest, open_step, verify
from burnish.distributed.layout import Layout
from burnish.errors import CorruptError
from burnish.files.storage import LocalFile, LocalStorage

LOCAL = LocalStorage()


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return save_once(tmp_path_factory.mktemp("checkpoints"))


def problems(path):
    """What verifying says, whether it raises or yields."""
    try:
        return [str(error) for error in verify(path)]
    except CorruptError as error:
        return [str(error)]


def read_all(path):
    """What loading everything says."""
    try:
        source = CheckpointSource(open_step(path, LOCAL), Layout())
        weights, slots = make_state(0)
        source.fill(shards_of(weights | slots, Layout()))
    except CorruptError as error:
        return [str(error)]
    return []


def test_a_sound_step_has_no_problems(step):
    assert problems(step) == []
    assert read_all(step) == []


def test_the_tensor_of_a_damaged_block_is_named(tmp_path):
    weights, slots = make_state(0, BIG_SHAPES)
    path = save_once(
        tmp_path, weights=shards_of(weights, Layout()), training=shards_of(slots, Layout())
    )
    file = path / "training" / "exp_avg.safetensors"
    flip(file, 6 << 20)
    [found] = problems(path)
    assert str(6 << 20) in found
    assert "head.weight" in found
    assert "scale" not in found


@pytest.fixture
def copied(step, tmp_path):
    return shutil.copytree(step, tmp_path / step.name)


NAMES = [
    "COMMIT",
    "manifest.json",
    "state.json",
    "model/config.json",
    "model/model.safetensors",
    "training/residual.safetensors",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(copied, name):
    (copied / name).unlink()
    [found] = problems(copied)
    assert name.rpartition("/")[2] in found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep", [0, 7, -1])
def test_a_truncated_file_is_named(copied, name, keep):
    data = (copied / name).read_bytes()
    (copied / name).write_bytes(data[:keep])
    [found] = problems(copied)
    assert name.rpartition("/")[2] in found


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_file_is_named(copied, name):
    with (copied / name).open("ab") as file:
        file.write(b"\0")
    [found] = problems(copied)
    assert name.rpartition("/")[2] in found


def test_a_file_that_was_not_committed_is_named(copied):
    (copied / "model" / "pytorch_model.bin").write_bytes(b"")
    [found] = problems(copied)
    assert "pytorch_model.bin" in found


@pytest.mark.parametrize("name", NAMES)
def test_a_link_is_refused(copied, tmp_path, name):
    shutil.move(copied / name, tmp_path / "elsewhere")
    (copied / name).symlink_to(tmp_path / "elsewhere")
    [found] = problems(copied)
    assert name.rpartition("/")[2] in found


def test_a_pipe_is_refused_and_waits_for_nobody(copied):
    (copied / "COMMIT").unlink()
    os.mkfifo(copied / "COMMIT")
    [found] = problems(copied)
    assert "COMMIT" in found


def test_swapped_files_are_found(copied):
    first, second = (
        copied / "training/exp_avg.safetensors",
        copied / "training/exp_avg_sq.safetensors",
    )
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert len(problems(copied)) == 2


def run(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment())


def environment():
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


def test_verifying_loads_no_torch(step):
    code = """
import sys
from pathlib import Path
from burnish.checkpoint.steps import verify
assert list(verify(Path(sys.argv[1]))) == []
print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""
    assert run(code, step).stdout.strip() == "[]"


def test_newest_of_nothing_is_nothing(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None


class UnreadableFile(LocalFile):
    """A file on a disk with a bad sector at 5 MiB."""

    def pread_into(self, buffer, offset):
        if offset <= 5 << 20 < offset + len(buffer):
            raise OSError(errno.EIO, "made to fail")
        super().pread_into(buffer, offset)


class UnreadableStorage(LocalStorage):
    def open(self, path, *, write=False):
        return UnreadableFile(os.open(path, os.O_RDONLY))


def test_what_the_disk_cannot_read_is_named(tmp_path):
    weights, slots = make_state(0, BIG_SHAPES)
    path = save_once(
        tmp_path, weights=shards_of(weights, Layout()), training=shards_of(slots, Layout())
    )
    found = list(verify(path, UnreadableStorage()))
    names = sorted(error.file.name for error in found)
    assert names == ["exp_avg.safetensors", "exp_avg_sq.safetensors"]
    assert all("made to fail" in str(error) and "head.weight" in error.holds for error in found)


def test_a_damaged_block_crosses_processes_whole(copied):
    file = copied / "training" / "residual.safetensors"
    flip(file)
    [error] = verify(copied)
    again = copy.copy(error)  # as pickling does
    assert (str(again), again.file, again.holds) == (str(error), error.file, error.holds)
    assert (again.start, again.stop) == (0, file.stat().st_size)


@pytest.mark.parametrize("at", [5, 40])
def test_a_quick_look_finds_a_damaged_header(copied, at):
    assert list(verify(copied, fast=True)) == []
    file = copied / "training" / "residual.safetensors"
    flip(file, at)
    [found] = verify(copied, fast=True)
    assert "residual.safetensors" in str(found)
