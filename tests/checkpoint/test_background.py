"""Saving while training goes on: the same files as otherwise, and nothing lost when the writer fails, hangs or dies."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.checkpoints.states import (
    BIG_SHAPES,
    FaultyStorage,
    OnceFullStorage,
    OnceHangingStorage,
    SlowStorage,
    StubbornStorage,
    bits,
    committed,
    contents_of,
    fill_and_compare,
    make_state,
    save_in_background_forever,
    save_once,
    writer_pid,
)
from support.ranks.fork_server import ANEW, Forked
from support.ranks.processes import run_ranks

from burnish.checkpoint.background import Memory, stage, staged_in
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.steps import verify
from burnish.distributed.environment import STOPPING
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.storage import LOCAL


def opened(root, layout=None, storage=LOCAL, keep_last=9, timeout=250.0):
    return Checkpoints(
        root,
        layout or Layout(),
        retention=Retention(keep_last),
        background_timeout=timeout,
        storage=storage,
    )


def steps_in(root):
    assert not any(list(verify(step.path)) for step in committed(root))
    return [step.step for step in committed(root)]


def leftovers(root):
    return [path.name for path in root.iterdir() if "inflight" in path.name]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same state saved the plain way."""
    root = tmp_path_factory.mktemp("plain")
    weights, slots = make_state(3, BIG_SHAPES)
    with Checkpoints(root, Layout()) as checkpoints:
        checkpoints.save(1, contents_of(weights, slots))
    return committed(root)[0].manifest.files


def save_changing(layout, root):
    """Save in the background, and change everything as soon as that is allowed."""
    weights, slots = make_state(3, BIG_SHAPES)
    with opened(Path(root), layout) as checkpoints:
        checkpoints.begin_save(1, contents_of(weights, slots, layout))
        for tensor in [*weights.values(), *slots.values()]:
            tensor.fill_(-7)
        finished = checkpoints.finished(wait=True)
    return finished.step, finished.error


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_files_are_those_of_a_plain_save_though_training_goes_on(tmp_path, saved, world):
    assert run_ranks(save_changing, world, str(tmp_path)) == [(1, None)] * world
    [step] = committed(tmp_path)
    assert step.manifest.files == saved
    assert step.manifest.world == world
    fill_and_compare(CheckpointSource(step, Layout()), *make_state(3, BIG_SHAPES), Layout())


def test_one_at_a_time_told_once_left_alone_by_signals_and_waited_for_at_the_end(tmp_path):
    with suppress(ZeroDivisionError), opened(tmp_path, storage=SlowStorage()) as checkpoints:
        assert checkpoints.finished(wait=True) is None
        checkpoints.begin_save(1, contents_of(*make_state(1)))
        assert checkpoints.finished(wait=False) is None  # training goes on meanwhile
        with pytest.raises(ValueError, match="step 1"):
            checkpoints.begin_save(2, contents_of(*make_state(2)))
        while not leftovers(tmp_path):
            time.sleep(0.01)
        for number in STOPPING:  # as if to the whole group
            os.kill(writer_pid(checkpoints), number)
        finished = checkpoints.finished(wait=True)
        assert (finished.step, finished.error) == (1, None)
        assert checkpoints.finished(wait=True) is None
        checkpoints.begin_save(2, contents_of(*make_state(2)))
        raise ZeroDivisionError
    assert steps_in(tmp_path) == [1, 2]


def test_one_writer_through_a_run(tmp_path, monkeypatch):
    """Older steps go, unhealthy ones displace none, none is made twice, a lack of memory passes, a lost lease does not."""

    def full(descriptor, size):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with opened(tmp_path, keep_last=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.begin_save(step, contents_of(*make_state(step)))
            assert checkpoints.finished(wait=True).error is None
        checkpoints.begin_save(4, contents_of(*make_state(4), check_finite=True))  # has infinities
        assert checkpoints.finished(wait=True).error is None
        with pytest.raises(BurnishError, match="step 3"):
            checkpoints.begin_save(3, contents_of(*make_state(3)))
        assert {step.step: step.healthy for step in committed(tmp_path)} == {3: True, 4: False}
        larger = contents_of(*make_state(5, BIG_SHAPES))
        with monkeypatch.context() as patched:
            patched.setattr("burnish.checkpoint.background.allocate", full)
            with pytest.raises(BurnishError):
                checkpoints.begin_save(5, larger)
        assert checkpoints.finished(wait=True) is None
        checkpoints.begin_save(5, larger)
        assert checkpoints.finished(wait=True).error is None
        (tmp_path / ".lease").write_text(json.dumps({"pid": 1, "host": "another", "token": 9}))
        checkpoints.begin_save(6, contents_of(*make_state(6)))
        assert "9" in checkpoints.finished(wait=True).error.have  # the lease's number
        with pytest.raises(BurnishError):
            checkpoints.save(6, contents_of(*make_state(6)))
    assert (steps_in(tmp_path), leftovers(tmp_path)) == ([5], [])


def test_without_a_process_for_it(tmp_path):
    with Checkpoints(tmp_path, Layout()) as checkpoints:
        with pytest.raises(ValueError, match="background"):
            checkpoints.begin_save(1, contents_of(*make_state(1)))
        assert checkpoints.finished(wait=True) is None


def test_an_error_of_the_disk_is_told_and_the_next_save_works(tmp_path, monkeypatch):
    monkeypatch.setenv(ANEW, "1")
    save_once(tmp_path, 1)
    storage = FaultyStorage(fail_at=9, lasting=False)
    with opened(tmp_path, storage=storage) as checkpoints:
        checkpoints.begin_save(2, contents_of(*make_state(2)))
        finished = checkpoints.finished(wait=True)
        assert finished.step == 2
        assert "step 2" in str(finished.error)
        assert "made to fail" in str(finished.error)
        assert steps_in(tmp_path) == [1]
        assert leftovers(tmp_path) == []
        checkpoints.begin_save(3, contents_of(*make_state(3)))
        assert checkpoints.finished(wait=True).error is None
    assert steps_in(tmp_path) == [1, 3]


@pytest.mark.nightly
def test_what_the_disk_does_not_let_go_of_is_told_and_the_step_is_committed(tmp_path):
    with opened(tmp_path, storage=StubbornStorage(), keep_last=1) as checkpoints:
        checkpoints.begin_save(1, contents_of(*make_state(1)))
        first = checkpoints.finished(wait=True)
        checkpoints.begin_save(2, contents_of(*make_state(2)))
        second = checkpoints.finished(wait=True)
    assert (first.error, first.warning, second.error) == (None, None, None)
    assert "Directory not empty" in str(second.warning)
    assert steps_in(tmp_path) == [2]


def test_a_writer_that_is_killed_is_started_again(tmp_path):
    with opened(tmp_path, storage=SlowStorage()) as checkpoints:
        checkpoints.begin_save(1, contents_of(*make_state(1)))
        while not leftovers(tmp_path):
            time.sleep(0.01)
        os.kill(writer_pid(checkpoints), signal.SIGKILL)
        finished = checkpoints.finished(wait=True)
        assert "died" in str(finished.error)
        assert "-9" in str(finished.error)
        assert (steps_in(tmp_path), leftovers(tmp_path)) == ([], [])
        os.kill(writer_pid(checkpoints), signal.SIGKILL)  # the next one, with nothing to do
        while is_alive(writer_pid(checkpoints)):
            time.sleep(0.01)
        checkpoints.begin_save(2, contents_of(*make_state(2)))
        assert checkpoints.finished(wait=True).error is None
    assert steps_in(tmp_path) == [2]


@pytest.mark.nightly
def test_a_disk_that_hangs_is_not_waited_for(tmp_path):
    """RetryPolicy is short only while the disk hangs, so that no writer has to be quick."""
    hung = tmp_path / "hung"
    with opened(tmp_path, storage=OnceHangingStorage(hung)) as checkpoints:
        patience = checkpoints._background._timeout
        checkpoints.begin_save(1, contents_of(*make_state(1)))
        while not hung.exists():
            time.sleep(0.01)
        checkpoints._background._timeout = 1.0
        finished = checkpoints.finished(wait=True)
        checkpoints._background._timeout = patience
        assert "hangs" in str(finished.error)
        assert " 1 seconds" in str(finished.error)
        assert (steps_in(tmp_path), leftovers(tmp_path)) == ([], [])
        checkpoints.begin_save(2, contents_of(*make_state(2)))
        assert checkpoints.finished(wait=True).error is None
    assert steps_in(tmp_path) == [2]


def lose_a_writer(layout, root, how, victim):
    storage = SlowStorage(600) if how == "hang" and layout.rank == victim else SlowStorage(0.1)
    if how == "full" and layout.rank == victim:
        storage = OnceFullStorage(Path(root) / "full")
    timeout = {"timeout": 4.0} if how == "hang" else {}
    weights, slots = make_state(1, BIG_SHAPES)
    with opened(Path(root), layout, storage, **timeout) as checkpoints:
        checkpoints.begin_save(1, contents_of(weights, slots, layout))
        if how == "kill" and layout.rank == victim:
            while not list(Path(root).glob(".inflight*/training/*")):
                time.sleep(0.01)
            os.kill(writer_pid(checkpoints), signal.SIGKILL)
        first = checkpoints.finished(wait=True)
        left = leftovers(Path(root))
        if how == "hang":
            return first.step, str(first.error), left
        checkpoints.begin_save(2, contents_of(weights, slots, layout))
        second = checkpoints.finished(wait=True)
    assert second.error is None, second.error
    return first.step, str(first.error), left


@pytest.mark.parametrize(
    ("how", "victim"),
    [
        ("kill", 1),
        pytest.param("full", 0, marks=pytest.mark.nightly),
        pytest.param("hang", 1, marks=pytest.mark.nightly),
    ],
)
def test_what_fails_on_one_rank_has_failed_on_all(tmp_path, how, victim):
    told = run_ranks(lose_a_writer, 2, str(tmp_path), how, victim)
    assert [step for step, _, _ in told] == [1, 1]
    assert told[0][1] == told[1][1] != "None"
    assert [left for _, _, left in told] == [[], []]
    assert steps_in(tmp_path) == ([] if how == "hang" else [2])


def is_alive(pid):
    with suppress(FileNotFoundError, ProcessLookupError):  # it may end while its file is open
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_writer_ends_with_its_run_and_the_directory_is_free_again(tmp_path):
    process = Forked(save_in_background_forever, tmp_path)
    pid, step = process.recv(), process.recv()
    while step < 3:
        step = process.recv()
    assert is_alive(pid)
    process.kill()
    with opened(tmp_path) as checkpoints:  # waits for the writer, should that still be there
        assert not is_alive(pid)
        resumed = checkpoints.resume(lambda step, source: None)
        assert resumed.step.step in (2, 3)
        assert leftovers(tmp_path) == []


def test_the_memory_is_kept_between_saves():
    memory = Memory.make()
    contents = contents_of(*make_state(1))
    stage(contents, memory)
    before = memory.take(1).data_ptr()
    stage(contents, memory)
    assert memory.take(1).data_ptr() == before
    weights, slots = make_state(1, BIG_SHAPES)
    staged = stage(contents_of(weights, slots), memory)
    assert all(shard.tensor.is_meta for shard in staged.shards)
    again = staged_in(memory.take(1 << 25), staged)
    for shard, tensor in zip(again.shards, [*weights.values(), *slots.values()], strict=True):
        assert torch.equal(bits(shard.tensor), bits(tensor))
    memory.close()


def test_what_another_process_maps_is_the_same_memory():
    memory = Memory.make()
    memory.take(1000).copy_(torch.arange(1000) % 251)
    other = Memory(os.dup(memory.descriptor))
    assert torch.equal(other.take(1000), memory.take(1000))
    memory.take(5000)[4999] = 3
    assert other.take(5000)[4999] == 3
    other.close()
    memory.close()
