"""A run's checkpoints: what is kept, what is resumed, what is set aside, who may write."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
from support.checkpoints.states import (
    StubbornStorage,
    committed,
    contents_of,
    fill_and_compare,
    make_state,
    save_once,
)
from support.faults.bit_flips import flip
from support.ranks.processes import run_ranks

from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.steps import newest
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError, IncompatibleError, UsageError
from burnish.files.storage import LocalStorage


def steps_in(root):
    return [step.step for step in committed(root)]


def loads(seed):
    """A `load` that compares with the state of a seed, and remembers what it was given."""

    def load(step, source):
        load.steps.append(step.step)
        fill_and_compare(source, *make_state(seed), Layout())

    load.steps = []
    return load


def test_the_last_steps_are_kept(tmp_path):
    with Checkpoints(tmp_path, Layout(), retention=Retention(2)) as checkpoints:
        for step in (1, 2, 3, 10):
            checkpoints.save(step, contents_of(*make_state(step)))
    assert steps_in(tmp_path) == [3, 10]
    assert list((tmp_path / "trash").iterdir()) == []


def test_unhealthy_steps_displace_nothing(tmp_path):
    with Checkpoints(tmp_path, Layout(), retention=Retention(1)) as checkpoints:
        checkpoints.save(1, contents_of(*make_state(1)))
        checkpoints.save(2, contents_of(*make_state(2), healthy=False))
        assert steps_in(tmp_path) == [1, 2]
        assert newest(tmp_path).step == 1
        checkpoints.save(3, contents_of(*make_state(3)))
    assert steps_in(tmp_path) == [3]


def test_what_cannot_be_read_is_never_removed(tmp_path):
    first = save_once(tmp_path, 1)
    flip(first / "COMMIT", 20)
    with Checkpoints(tmp_path, Layout(), retention=Retention(1)) as checkpoints:
        checkpoints.save(2, contents_of(*make_state(2)))
        checkpoints.save(3, contents_of(*make_state(3)))
    assert first.is_dir()
    assert steps_in(tmp_path) == [3]


def test_a_step_is_never_overwritten(tmp_path):
    path = save_once(tmp_path, 1, seed=1)
    before = (path / "COMMIT").read_bytes()
    with pytest.raises(BurnishError):
        save_once(tmp_path, 1, seed=2)
    assert (path / "COMMIT").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if "inflight" in p.name] == []


def test_nothing_to_resume(tmp_path):
    with Checkpoints(tmp_path / "new", Layout()) as checkpoints:
        assert checkpoints.resume(loads(0)) is None


def test_what_is_resumed_and_what_is_skipped_is_said_before_it_is_loaded(tmp_path, caplog):
    for step in (1, 2, 3):
        save_once(tmp_path, step)
    flip(tmp_path / "step-00000003" / "COMMIT", 20)
    said = []

    def load(step, source):
        said.append([r.message for r in caplog.records if "resuming" in r.message])
        if step.step == 2:
            raise CorruptError("bad bytes")

    with Checkpoints(tmp_path, Layout()) as checkpoints:
        assert checkpoints.resume(load).step.step == 1
    assert [len(lines) for lines in said] == [1, 2]
    assert "resuming step 2" in said[0][0]
    assert "step-00000003/COMMIT" in said[0][0]
    assert "resuming step 1" in said[1][1]
    assert said[1][1].endswith("; bad bytes")


def test_the_newest_is_resumed(tmp_path):
    for step in (1, 2):
        save_once(tmp_path, step, seed=step)
    load = loads(2)
    with Checkpoints(tmp_path, Layout()) as checkpoints:
        resumed = checkpoints.resume(load)
    assert (resumed.step.step, resumed.skipped, load.steps) == (2, (), [2])
    assert resumed.step.state == {"step": 1, "cursor": 5}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("training/exp_avg.safetensors", ["exp_avg.safetensors", "embed.weight"]),
        ("model/model.safetensors", ["model.safetensors"]),
        ("state.json", ["state.json"]),
        ("manifest.json", ["manifest.json"]),
        ("COMMIT", ["COMMIT"]),
    ],
)
def test_damage_is_set_aside_and_the_older_step_resumed(tmp_path, name, words):
    save_once(tmp_path, 1, seed=1)
    flip(save_once(tmp_path, 2, seed=2) / name, -10)
    with Checkpoints(tmp_path, Layout()) as checkpoints:
        resumed = checkpoints.resume(loads(1))
        assert resumed.step.step == 1
        [reason] = resumed.skipped
        assert all(word in reason for word in words)
        assert (tmp_path / "quarantine" / "step-00000002").is_dir()
        checkpoints.save(2, contents_of(*make_state(5)))  # its name is free again
    assert steps_in(tmp_path) == [1, 2]


def test_unhealthy_steps_are_not_resumed(tmp_path):
    save_once(tmp_path, 1, seed=1)
    save_once(tmp_path, 2, seed=2, healthy=False)
    with Checkpoints(tmp_path, Layout()) as checkpoints:
        resumed = checkpoints.resume(loads(1))
    assert resumed.step.step == 1
    assert "unhealthy" in resumed.skipped[0]


def test_never_silently_from_the_start(tmp_path):
    for step in (1, 2):
        (save_once(tmp_path, step) / "COMMIT").unlink()
    with pytest.raises(CorruptError):
        newest(tmp_path)
    for _ in range(2):  # the second time there is only the quarantine left
        with Checkpoints(tmp_path, Layout()) as checkpoints, pytest.raises(CorruptError) as caught:
            checkpoints.resume(loads(0))
        assert caught.value.exit_code == 3
        assert "step-00000001" in str(caught.value)


def test_other_errors_of_loading_leave_the_step(tmp_path):
    save_once(tmp_path, 1)

    def load(step, source):
        raise IncompatibleError("another model")

    with Checkpoints(tmp_path, Layout()) as checkpoints, pytest.raises(IncompatibleError):
        checkpoints.resume(load)
    assert steps_in(tmp_path) == [1]


def test_leftovers_are_cleared_at_the_start(tmp_path):
    save_once(tmp_path, 1)
    for name in (".inflight-00000002.abc", "trash/step-00000000"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "model.safetensors").write_bytes(b"half")
    assert steps_in(tmp_path) == [1]
    with Checkpoints(tmp_path, Layout()) as checkpoints:
        assert checkpoints.resume(lambda step, source: None).step.step == 1
    left = sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith((".lease", ".lock")))
    assert left == ["step-00000001", "trash"]
    assert list((tmp_path / "trash").iterdir()) == []


def test_a_disk_that_does_not_let_go_stops_nothing(tmp_path, caplog):
    stubborn = StubbornStorage()
    with Checkpoints(tmp_path, Layout(), retention=Retention(1), storage=stubborn) as checkpoints:
        for step in (1, 2, 3):
            assert checkpoints.save(step, contents_of(*make_state(step))).is_dir()
    assert steps_in(tmp_path) == [3]
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    for said, left in zip(warned, ("step-00000001", "step-00000002"), strict=True):
        assert left in said
        assert "do:" in said

    (tmp_path / ".inflight-00000004.abc").mkdir()
    caplog.clear()
    with Checkpoints(tmp_path, Layout(), storage=stubborn) as checkpoints:
        assert checkpoints.resume(lambda step, source: None).step.step == 3
    assert caplog.text.count("ERROR") == 1  # of all three at once
    assert (
        len(list((tmp_path / "trash").iterdir())) == 3
    )  # the half written one, too, is out of sight
    with Checkpoints(tmp_path, Layout()):
        assert list((tmp_path / "trash").iterdir()) == []


class Unmovable(LocalStorage):
    """A disk on which the first step has an attribute that forbids it to go."""

    def rename(self, source, target):
        if source.name == "step-00000001":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(source))
        super().rename(source, target)


def enter(layout, roots):
    """Enter with and without a mirror; return whether rank 0 prints each error, and its text."""
    found = []
    for mirror in (None, "s3://bucket/run"):
        checkpoints = Checkpoints(
            Path(roots[layout.rank]), layout, retention=Retention(1, mirror=mirror)
        )
        try:
            with checkpoints:
                found.append((False, "entered"))
        except UsageError as error:
            found.append((error.printed_by_main, str(error)))
    return found


@pytest.mark.parametrize("places", ["abbb", "aaba"])
def test_disks_that_ranks_do_not_share_are_refused_at_once(tmp_path, places):
    roots = [tmp_path / place for place in places]
    for root in set(roots):
        save_once(root, 1)  # of an earlier run, which was here as well
    by_rank = run_ranks(enter, 4, [str(root) for root in roots])
    for rank, found in enumerate(by_rank):
        for printed_by_main, said in found:
            assert printed_by_main == (rank > 0)  # one rank says it
            assert f"{roots[0]} is not the same directory" in said
            for other, place in enumerate(places):
                assert (f"rank {other} on " in said.replace("rank 0 on ", "")) == (place != "a")
            assert "output_dir" in said
        assert ["checkpoint.mirror" in said for _, said in found] == [False, True]
    assert [each.name for root in set(roots) for each in root.glob("step-*")] == [
        "step-00000001"
    ] * 2


def test_ranks_that_share_a_directory_by_two_names_enter(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    roots = [str(tmp_path / place) for place in "ab"]
    assert run_ranks(enter, 2, roots) == [[(False, "entered")] * 2] * 2


def test_one_step_that_cannot_go_keeps_no_other(tmp_path, caplog):
    for step in (1, 2, 3):
        save_once(tmp_path, step)
    with Checkpoints(
        tmp_path, Layout(), retention=Retention(1), storage=Unmovable()
    ) as checkpoints:
        checkpoints.save(4, contents_of(*make_state(4)))
    assert steps_in(tmp_path) == [1, 4]
    assert "Operation not permitted" in caplog.text


def test_two_runs_cannot_share_a_directory(tmp_path):
    with (
        Checkpoints(tmp_path, Layout()),
        pytest.raises(BurnishError),
        Checkpoints(tmp_path, Layout()),
    ):
        pass
    with Checkpoints(tmp_path, Layout()):
        pass


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path):
    class Full(LocalStorage):
        def free_bytes(self, path):
            return 1_000_000

        def create(self, path, size):
            raise AssertionError("nothing may be written")

    with (
        Checkpoints(tmp_path, Layout(), storage=Full(), reserve_bytes=999_000) as checkpoints,
        pytest.raises(BurnishError, match="step 7") as caught,
    ):
        checkpoints.save(7, contents_of(*make_state(0)))
    assert "1.0 MB" in caught.value.have
    assert "999.0 kB" in caught.value.want
    assert "keep_last" in caught.value.do


@pytest.mark.parametrize("name", ["step-1", "step-00000001.old", "step-0000000a", "xstep-00000001"])
def test_other_names_are_no_steps(tmp_path, name):
    save_once(tmp_path, 1).rename(tmp_path / name)
    assert newest(tmp_path) is None


def test_a_step_under_another_steps_name_is_refused(tmp_path):
    save_once(tmp_path, 1).rename(tmp_path / "step-00000002")
    with pytest.raises(CorruptError):
        newest(tmp_path)


@pytest.mark.parametrize("kind", ["link", "broken link", "file"])
def test_what_has_a_steps_name_and_is_no_directory_is_set_aside(tmp_path, kind):
    elsewhere = save_once(tmp_path / "elsewhere", 2, seed=2)
    root = tmp_path / "checkpoints"
    save_once(root, 1, seed=1)
    target = elsewhere if kind == "link" else tmp_path / "nothing"
    path = root / "step-00000002"
    path.write_text("x") if kind == "file" else path.symlink_to(target)
    with Checkpoints(root, Layout(), retention=Retention(1)) as checkpoints:
        checkpoints.save(3, contents_of(*make_state(3)))
        assert (root / "step-00000002").lstat()  # it displaces no step, and is not removed
    flip(root / "step-00000003" / "COMMIT", 20)
    with Checkpoints(root, Layout()) as checkpoints, pytest.raises(CorruptError) as caught:
        checkpoints.resume(loads(1))
    assert str(path) in str(caught.value)
    assert (elsewhere / "COMMIT").is_file()


def test_a_link_alone_is_no_beginning(tmp_path):
    elsewhere = save_once(tmp_path / "elsewhere", 2, seed=2)
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / "step-00000002").symlink_to(elsewhere)
    with Checkpoints(root, Layout()) as checkpoints:
        for _ in range(2):
            with pytest.raises(CorruptError):
                checkpoints.resume(loads(2))
