"""Runs that find their step on the mirror, on the disk, or on neither, and the process that copies."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from pathlib import Path

import pytest
from support.checkpoints.states import (
    BIG_SHAPES,
    committed,
    contents_of,
    fill_and_compare,
    make_state,
    save_once,
)
from support.faults.bit_flips import flip
from support.ranks.processes import run_ranks

from burnish.checkpoint.destinations.mirror import Mirror, Sync
from burnish.checkpoint.destinations.remote_steps import DAMAGED
from burnish.checkpoint.destinations.run_mirror import RunMirror
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError
from burnish.files.remote import Remote, RetryPolicy
from burnish.files.storage import LocalStorage

QUICK = RetryPolicy(tries=2, seconds=1, first_pause=0.01)
LOCAL = LocalStorage()


def mirror_of(run, url, start="this"):
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    remote = Remote(url, QUICK)
    remote.put("environment.json", json.dumps({"start": start}).encode())
    return Mirror(run, remote, None, start)


@pytest.fixture
def mirror(tmp_path):
    return mirror_of(tmp_path / "run", f"memory://{uuid.uuid4().hex}")


def mirrored(mirror, *steps):
    """Steps on the mirror, each with the state of its number, and none here."""
    for step in steps:
        save_once(mirror.root, step, seed=step)
    Sync(mirror).run()
    for step in steps:
        LOCAL.remove(mirror.root / f"step-{step:08d}")


def load(step, source):
    fill_and_compare(source, *make_state(step.step), Layout())


def resume(mirror):
    with Checkpoints(mirror.root, Layout()) as checkpoints:
        checkpoints.mirror_to(RunMirror(mirror, Layout()))
        return checkpoints.resume(load)


def flip_there(mirror, name):
    data = bytearray(mirror.remote.read(name, 1 << 30))
    data[-20] ^= 1
    mirror.remote.put(name, data)


def test_an_empty_machine_goes_on_from_the_mirror(mirror):
    mirrored(mirror, 1, 2)
    resumed = resume(mirror)
    assert str(resumed.step.path) == f"{mirror.remote}/checkpoints/step-00000002"
    assert resumed.skipped == ()


def test_nothing_anywhere(mirror):
    assert resume(mirror) is None


@pytest.mark.parametrize(
    ("here", "there", "found"), [(3, 2, "disk"), (2, 3, "mirror"), (2, 2, "disk")]
)
def test_the_newest_of_both_sides(mirror, here, there, found):
    mirrored(mirror, there)
    save_once(mirror.root, here, seed=here)
    resumed = resume(mirror)
    assert resumed.step.step == max(here, there)
    assert isinstance(resumed.step.path, Path) == (found == "disk")


def test_damage_here_is_made_good_by_the_mirror(mirror):
    mirrored(mirror, 1, 2)
    path = save_once(mirror.root, 2, seed=7)
    (path / "state.json").write_text("{}")
    resumed = resume(mirror)
    assert str(resumed.step.path).startswith("memory://")
    assert (resumed.step.step, len(resumed.skipped)) == (2, 1)
    assert (mirror.root / "quarantine" / "step-00000002").is_dir()


@pytest.mark.parametrize(
    "name", ["training/exp_avg.safetensors", "state.json", "manifest.json", "COMMIT"]
)
def test_damage_there_is_marked_and_the_next_older_step_taken(mirror, name):
    mirrored(mirror, 2)
    flip_there(mirror, f"checkpoints/step-00000002/{name}")
    save_once(mirror.root, 1, seed=1)
    resumed = resume(mirror)
    assert resumed.step.path == mirror.root / "step-00000001"
    [reason] = resumed.skipped
    assert f"{mirror.remote}/checkpoints/step-00000002/{name}" in reason
    why = mirror.remote.read(f"checkpoints/step-00000002/{DAMAGED}", 10_000).decode()
    assert name in why
    assert resume(mirror).skipped == ()


def test_damage_everywhere_never_starts_from_the_beginning(mirror):
    mirrored(mirror, 1)
    flip_there(mirror, "checkpoints/step-00000001/training/exp_avg.safetensors")
    for _ in range(2):
        with pytest.raises(CorruptError) as caught:
            resume(mirror)
        assert DAMAGED in str(caught.value)
        assert caught.value.exit_code == 3


def test_unsealed_data_is_not_resumed_from(mirror):
    mirrored(mirror, 1, 2)
    mirror.remote.remove("checkpoints/step-00000002/COMMIT")
    assert resume(mirror).step.step == 1


def test_a_mirror_that_cannot_be_reached_is_not_taken_for_empty(tmp_path):
    url = f"file://{tmp_path}/far"
    mirror = mirror_of(tmp_path / "run", url)
    mirrored(mirror, 2)
    save_once(mirror.root, 1, seed=1)

    class Away(Remote):
        def files(self, below=""):
            raise BurnishError(f"{self.url} could not be listed, again and again")

        def below(self, name):
            return Away(self.url.below(name))

    away = Mirror(mirror.directory, Away(url), None, "this")
    with pytest.raises(BurnishError):
        resume(away)
    assert [step.step for step in committed(mirror.root)] == [1]


def save_and_mirror(layout, run, url):
    mirror = Mirror(Path(run), Remote(url), None, "this")
    with Checkpoints(mirror.root, layout) as checkpoints:
        checkpoints.mirror_to(RunMirror(mirror, layout))
        checkpoints.save(1, contents_of(*make_state(1, BIG_SHAPES), layout))
        return checkpoints.settle_mirror(250, lambda: False, lambda progress: None)


def resume_elsewhere(layout, run, url):
    def compare(step, source):
        fill_and_compare(source, *make_state(1, BIG_SHAPES), layout, dim=1)

    mirror = Mirror(Path(run), Remote(url), None, "this")
    with Checkpoints(mirror.root, layout) as checkpoints:
        checkpoints.mirror_to(RunMirror(mirror, layout))
        return str(checkpoints.resume(compare).step.path)


@pytest.mark.nightly
def test_another_layout_on_another_machine(tmp_path):
    """One process saves rows, two go on with columns, in a directory of their own that is empty."""
    url = f"file://{tmp_path}/far"
    mirror_of(tmp_path / "one", url)
    assert save_and_mirror(Layout(), str(tmp_path / "one"), url) is None
    (tmp_path / "two" / "checkpoints").mkdir(parents=True)
    paths = run_ranks(resume_elsewhere, 2, str(tmp_path / "two"), url)
    assert paths == [f"{url}/checkpoints/step-00000001"] * 2


def far_mirror(tmp_path):
    return mirror_of(tmp_path / "run", f"file://{tmp_path}/far")


def settle(checkpoints, seconds=250):
    return checkpoints.settle_mirror(seconds, lambda: False, lambda progress: None)


def test_steps_go_up_while_training_goes_on(tmp_path):
    mirror = far_mirror(tmp_path)
    retention = Retention(1, mirror=str(mirror.remote))
    shown = []
    with Checkpoints(mirror.root, Layout(), retention=retention) as checkpoints:
        checkpoints.mirror_to(RunMirror(mirror, Layout()))
        for step in (1, 2, 3):
            checkpoints.save(step, contents_of(*make_state(step)))
            checkpoints.finished(wait=False)
        assert checkpoints.settle_mirror(250, lambda: False, shown.append) is None
    steps = mirror.steps()
    assert [step.step for step in committed(steps.root, steps)] == [1, 2, 3]
    assert [step.step for step in committed(mirror.root)] == [3]  # the others were only waiting
    assert 0 <= shown[-1] <= 1


def test_a_failure_is_loud_and_made_good_at_the_next_save(tmp_path, caplog):
    mirror = far_mirror(tmp_path)
    with Checkpoints(mirror.root, Layout()) as checkpoints:
        checkpoints.mirror_to(RunMirror(mirror, Layout()))
        os.rename(tmp_path / "far", tmp_path / "away")
        checkpoints.save(1, contents_of(*make_state(1)))
        while "THE MIRROR IS BEHIND" not in caplog.text:
            checkpoints.finished(wait=False)
            time.sleep(0.05)
        os.rename(tmp_path / "away", tmp_path / "far")
        checkpoints.save(2, contents_of(*make_state(2)))
        assert settle(checkpoints) is None
    steps = mirror.steps()
    assert [step.step for step in committed(steps.root, steps)] == [1, 2]


def test_the_end_waits_so_long_and_says_why(tmp_path):
    mirror = far_mirror(tmp_path)
    with Checkpoints(mirror.root, Layout()) as checkpoints:
        checkpoints.mirror_to(RunMirror(mirror, Layout()))
        os.rename(tmp_path / "far", tmp_path / "away")
        checkpoints.save(1, contents_of(*make_state(1)))
        error = settle(checkpoints, 0)
    assert str(mirror.remote) in str(error)
    assert [step.step for step in committed(mirror.root)] == [1]


def test_a_copying_process_that_dies_is_started_again(tmp_path, caplog):
    mirror = far_mirror(tmp_path)
    with Checkpoints(mirror.root, Layout()) as checkpoints:
        checkpoints.mirror_to(RunMirror(mirror, Layout()))
        checkpoints.save(1, contents_of(*make_state(1)))
        assert settle(checkpoints) is None
        os.kill(checkpoints._mirror._process._process.pid, signal.SIGKILL)
        checkpoints.save(2, contents_of(*make_state(2)))
        assert settle(checkpoints) is None
    steps = mirror.steps()
    assert [step.step for step in committed(steps.root, steps)] == [1, 2]


def resume_big(layout, run, url):
    def compare(step, source):
        fill_and_compare(source, *make_state(step.step, BIG_SHAPES), layout)

    mirror = Mirror(Path(run), Remote(url), None, "this")
    with Checkpoints(mirror.root, layout) as checkpoints:
        checkpoints.mirror_to(RunMirror(mirror, layout))
        resumed = checkpoints.resume(compare)
    return str(resumed.step.path), resumed.skipped


def test_what_one_rank_finds_on_the_mirror_all_ranks_act_upon(tmp_path):
    mirror = far_mirror(tmp_path)
    with Checkpoints(mirror.root, Layout()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, contents_of(*make_state(step, BIG_SHAPES)))
    Sync(mirror).run()
    LOCAL.remove(mirror.root / "step-00000002")
    file = tmp_path / "far/checkpoints/step-00000002/training/exp_avg.safetensors"
    flip(file, -1000)  # in the last block, which one rank alone reads
    both = run_ranks(resume_big, 2, str(mirror.directory), str(mirror.remote))
    for path, [reason] in both:
        assert path == str(mirror.root / "step-00000001")
        assert f"{mirror.remote}/checkpoints/step-00000002/training/exp_avg.safetensors" in reason
