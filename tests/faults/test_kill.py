"""Processes killed in the middle of saving: what was committed stays, what was not is never loaded."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from support.checkpoints.states import (
    DeadlyStorage,
    FaultyStorage,
    committed,
    contents_of,
    fill_and_compare,
    make_state,
    save_forever,
)
from support.ranks.fork_server import Forked
from support.ranks.processes import RankFailed, run_ranks

from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.steps import verify
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    """How many operations on the disk opening, saving and removing the step before take."""
    root, storage = tmp_path_factory.mktemp("counted"), FaultyStorage()
    for step in (1, 2):
        storage.operations.clear()
        with Checkpoints(root, Layout(), retention=Retention(1), storage=storage) as checkpoints:
            checkpoints.save(step, contents_of(*make_state(step)))
    names = " ".join(storage.operations)
    assert all(kind in names for kind in ("create", "pwrite", "sync", "sync_dir", "rename"))
    return len(storage.operations)


def killed_run(root, first, fail_at=None, seconds=None):
    """Let a process commit steps from `first` on until it dies; the last step it told of."""
    process = Forked(save_forever, root, first, fail_at)
    told = None
    try:
        while True:
            told = process.recv()
            if seconds is not None:
                time.sleep(seconds)
                process.kill()
                seconds = None
    except EOFError:
        assert process.wait() == -9
    return told


def resumed_step(root):
    """Resume as a run does, and compare what is loaded with what was saved."""

    def load(step, source):
        fill_and_compare(source, *make_state(step.step), Layout())

    with Checkpoints(root, Layout(), retention=Retention(1)) as checkpoints:
        resumed = checkpoints.resume(load)
    assert resumed is None or resumed.skipped == ()
    assert not [p for p in root.iterdir() if p.name.startswith(".inflight")]
    return 0 if resumed is None else resumed.step.step


def test_killed_at_every_operation(tmp_path, operations):
    last = 0
    for fail_at in range(1, operations + 1):
        told = killed_run(tmp_path, last + 1, fail_at) or last
        found = resumed_step(tmp_path)
        assert found in (told, told + 1)  # the step after may have been committed and not told yet
        last = found
    assert last > 1


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments(tmp_path, seed):
    moments = random.Random(seed)
    last = 0
    for _ in range(2):
        told = killed_run(tmp_path, last + 1, seconds=moments.uniform(0, 0.08))
        last = resumed_step(tmp_path)
        assert last in (told, told + 1)


def save_with_a_death(layout, root, rank, fail_at):
    root = Path(root)
    with Checkpoints(root, layout) as checkpoints:
        checkpoints.save(1, contents_of(*make_state(1), layout))
    storage = DeadlyStorage(fail_at) if layout.rank == rank else FaultyStorage()
    with Checkpoints(root, layout, storage=storage) as checkpoints:
        checkpoints.save(2, contents_of(*make_state(2), layout))


@pytest.mark.parametrize(("rank", "fail_at"), [(1, 2), (0, 12)])
def test_the_death_of_a_rank_takes_no_step_along(tmp_path, rank, fail_at):
    with pytest.raises(RankFailed):
        run_ranks(save_with_a_death, 2, str(tmp_path), rank, fail_at, timeout=30)
    assert [step.step for step in committed(tmp_path)] == [1]
    assert resumed_step(tmp_path) == 1


@pytest.mark.parametrize("lasting", [True, False])
def test_errors_of_the_disk_at_every_operation(tmp_path, operations, lasting, caplog):
    last = 0
    for fail_at in range(1, operations + 1):
        storage = FaultyStorage(fail_at if last else None, lasting=lasting)
        caplog.clear()
        try:
            with Checkpoints(
                tmp_path, Layout(), retention=Retention(1), storage=storage
            ) as checkpoints:
                checkpoints.save(last + 1, contents_of(*make_state(last + 1)))
            said = caplog.text  # of an old step that could not be removed
        except BurnishError as error:
            said = str(error)
        assert ("made to fail" in said) == (last > 0)
        found = resumed_step(tmp_path)
        assert found in (last, last + 1)
        assert not any(list(verify(step.path)) for step in committed(tmp_path))
        last = found
    assert last > 1


def test_a_failed_save_leaves_no_litter_and_the_run_can_save_again(tmp_path):
    storage = FaultyStorage(fail_at=9)
    with Checkpoints(tmp_path, Layout(), storage=storage) as checkpoints:
        with pytest.raises(BurnishError, match="step 1"):
            checkpoints.save(1, contents_of(*make_state(1)))
        storage.healed = True
        checkpoints.save(1, contents_of(*make_state(1)))
    assert resumed_step(tmp_path) == 1


def fail_on_one_rank(layout, root):
    storage = FaultyStorage(fail_at=1 if layout.rank == 1 else None)
    with Checkpoints(Path(root), layout, storage=storage) as checkpoints:
        try:
            checkpoints.save(1, contents_of(*make_state(1), layout))
        except BurnishError as error:
            storage.healed = True
            checkpoints.save(2, contents_of(*make_state(2), layout))
            return str(error)
    return None


def test_a_full_disk_on_one_rank_is_everyones_error(tmp_path):
    messages = run_ranks(fail_on_one_rank, 2, str(tmp_path))
    assert all("step 1 " in message for message in messages)
    assert [step.step for step in committed(tmp_path)] == [2]
