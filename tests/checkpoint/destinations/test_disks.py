"""Machines that share no disk: each has a portion of a step, and the mirror has the step."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from checkpoints_for_tests import (
    BIG_SHAPES,
    OnceFullStorage,
    committed,
    contents_of,
    fill_and_compare,
    make_state,
    save_once,
)
from corruption import flip
from disk_crashes import DiskAssignment as Where
from disk_crashes import go_on, save, save_portions
from hypothesis import given
from hypothesis import strategies as st
from mirror_crashes import mirror_at
from ranks import run_ranks

from burnish.checkpoint.destinations.mirror import Sync, open_partial
from burnish.checkpoint.destinations.run_mirror import RunMirror
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.steps import PORTION, portion_paths, verify
from burnish.checkpoint.write_plan import DiskAssignment, owners_by_disk
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError, UsageError
from burnish.files.remote import Remote
from burnish.files.storage import LOCAL, LocalStorage


def where(tmp_path, *of_rank, url=None, environ=None):
    """Disks of ranks, whose mirror is there."""
    disks = Where(tmp_path, url or f"file://{tmp_path}/far", of_rank, environ or {})
    mirror_at(disks.run(0), Remote(disks.url))
    return disks


def settle(checkpoints):
    return checkpoints.settle_mirror(250, lambda: False, lambda progress: None)


def steps_on(disks):
    steps = disks.mirror(0).steps()
    found = committed(steps.root, steps)
    assert not [error for step in found for error in verify(step.path, disks.mirror(0).steps())]
    return [step.step for step in found]


def portions_on(disks, rank):
    return list(portion_paths(disks.run(rank) / "checkpoints", LOCAL))


@given(st.lists(st.integers(0, 1 << 32), max_size=40), st.lists(st.integers(0, 3), min_size=1))
def test_files_are_divided_evenly(sizes, of_rank):
    of_rank = [0, *(sorted(set(of_rank)).index(disk) for disk in of_rank)]
    leaders = tuple(of_rank.index(disk) for disk in range(max(of_rank) + 1))
    disks = DiskAssignment(tuple(of_rank), leaders)
    found = disks.divide(sizes)
    assert len(found) == len(sizes)
    for disk, count in enumerate(np.bincount(of_rank)):
        here = sum(size for size, each in zip(sizes, found, strict=True) if each == disk)
        share = count / len(of_rank)
        most = share * (sum(sizes) + max(sizes, default=0) * (len(leaders) - 1))
        assert here <= most * (1 + 1e-9)  # as any greedy choice of where a file is done first


def test_a_block_is_a_ranks_that_has_its_disk():
    rng = np.random.default_rng(0)
    block, rank = rng.integers(0, 60, 500), rng.integers(0, 7, 500)
    disk_of_block, disk_of_rank = rng.integers(0, 3, 60), np.array([0, 1, 2, 0, 1, 1, 0])
    owner = owners_by_disk(block, rank, rng.integers(1, 9, 500), disk_of_block, disk_of_rank)
    assert (disk_of_rank[owner] == disk_of_block).all()
    for disk in range(3):
        share = np.bincount(owner[disk_of_block == disk], minlength=7)[disk_of_rank == disk]
        assert share.max() <= -(-(disk_of_block == disk).sum() // (disk_of_rank == disk).sum())


def found_disks(layout, places):
    found = []
    for disks in places:
        with disks.open(layout) as checkpoints:
            found.append((checkpoints._saver.disks, checkpoints.meets_on_mirror))
    return found


def test_who_has_a_disk_with_whom(tmp_path):
    expected = {"0000": "0000", "abba": "0110", "abca": "0120"}
    places = []
    for of_rank in expected:
        (tmp_path / of_rank).mkdir()
        places.append(where(tmp_path / of_rank, *of_rank))
    told = run_ranks(found_disks, 4, places)
    assert told == [told[0]] * 4
    for (disks, meets), found in zip(told[0], expected.values(), strict=True):
        assert "".join(map(str, disks.of_rank)) == found
        assert [disks.of_rank[leader] for leader in disks.leaders] == sorted(set(disks.of_rank))
        assert meets == disks.are_several == (len(set(found)) > 1)


def files_of(path):
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_portion_is_whole_files_and_no_step(tmp_path):
    disks = where(tmp_path, 0, 1, 1)
    run_ranks(save_portions, 3, disks, 1, BIG_SHAPES)
    portions = [open_partial(*portions_on(disks, rank)) for rank in (0, 1)]
    (step, first), (_, second) = portions
    assert {*first, *second} == step.manifest.files.keys()
    assert not {*first} & {*second}
    assert "state.json" in first
    for portion, _ in portions:
        assert portion.manifest == step.manifest
        assert committed(portion.path.parent) == []
    sizes = [sum(step.manifest.files[name].size for name in names) for _, names in portions]
    assert sum(sizes) / 5 < sizes[0] < sizes[1]  # two ranks write the second


def save_in_the_background(layout, disks):
    """By all the processes that there are in a run."""
    with disks.open(layout, background_timeout=250) as checkpoints:
        checkpoints.mirror_to(RunMirror(disks.mirror(layout.rank), layout))
        assert checkpoints.resume(lambda step, source: None) is None
        for step in (1, 2):
            checkpoints.begin_save(step, contents_of(*make_state(step), layout))
            assert checkpoints.finished(wait=True).error is None
        assert settle(checkpoints) is None


def test_a_step_of_several_disks_is_that_of_one(tmp_path):
    disks = where(tmp_path, 0, 1)
    run_ranks(save_in_the_background, 2, disks)
    one = files_of(save_once(tmp_path / "one", 1, seed=1))
    several = files_of(tmp_path / "far" / "checkpoints" / "step-00000001")
    ours = ("COMMIT", "manifest.json")
    assert {name: data for name, data in several.items() if name not in ours} == {
        name: data for name, data in one.items() if name not in ours
    }
    assert steps_on(disks) == [1, 2]
    for rank in (0, 1):
        assert portions_on(disks, rank) == []
        assert committed(disks.run(rank) / "checkpoints") == []
    assert not list((tmp_path / "far" / "checkpoints" / "portions").rglob("*.?"))


@pytest.mark.nightly
def test_any_number_of_empty_disks_goes_on(tmp_path, s3_server):
    """Over S3: three disks after two, then one."""
    url, environ = f"{s3_server.make_bucket('disks')}/run", dict(s3_server.environ)
    disks = where(tmp_path, 0, 1, url=url, environ=environ)
    run_ranks(save, 2, disks, 1)
    three = Where(tmp_path / "new", url, (0, 1, 2), environ)
    assert run_ranks(go_on, 3, three) == [1, 1, 1]
    assert steps_on(disks) == [1, 2]

    def compare(step, source):
        fill_and_compare(source, *make_state(2), Layout())

    with Where(tmp_path / "one", url, (0,)).open(Layout()) as checkpoints:
        assert not checkpoints.meets_on_mirror
        checkpoints.mirror_to(RunMirror(disks.mirror(0), Layout()))
        assert checkpoints.resume(compare).step.step == 2


@pytest.mark.nightly
def test_disks_that_are_lost_and_portions_that_got_no_further(tmp_path):
    """They are no step, and go; what the mirror has is there, and older steps of one disk are not asked for."""
    disks = where(tmp_path, 0, 1)
    run_ranks(save, 2, disks, 1)
    run_ranks(save_portions, 2, disks, 2)
    assert [len(portions_on(disks, rank)) for rank in (0, 1)] == [1, 1]
    shutil.rmtree(disks.run(1))
    assert run_ranks(go_on, 2, disks) == [1, 1]
    assert [portions_on(disks, rank) for rank in (0, 1)] == [[], []]
    assert steps_on(disks) == [1, 2]
    shutil.rmtree(disks.run(0))
    save_once(disks.run(1) / "checkpoints", 1)
    assert run_ranks(go_on, 2, disks) == [2, 2]
    assert steps_on(disks) == [1, 2, 3]


def start_with_a_step_of_its_own(layout, disks):
    with pytest.raises(UsageError) as caught:
        go_on(layout, disks)
    return str(caught.value)


def test_a_step_that_one_disk_alone_has_is_not_passed_over(tmp_path):
    disks = where(tmp_path, 0, 1)
    save_once(disks.run(1) / "checkpoints", 2)
    for said in run_ranks(start_with_a_step_of_its_own, 2, disks):
        assert "disk-1/run/checkpoints/step-00000002" in said


def start_with_a_mirror_of_its_own(layout, disks):
    disks = replace(disks, url=f"{disks.url}/{layout.rank}")
    with pytest.raises(UsageError) as caught:
        go_on(layout, disks)
    return str(caught.value)


@pytest.mark.nightly
def test_a_mirror_that_is_another_for_each_is_refused(tmp_path):
    """A path of this machine, for one, behind file://."""
    disks = where(tmp_path, 0, 1)
    mirror_at(disks.run(0), Remote(f"{disks.url}/0"))
    for said in run_ranks(start_with_a_mirror_of_its_own, 2, disks):
        assert "rank 1" in said
        assert f"{disks.url}/1/environment.json" in said


class Disk(LocalStorage):
    """One without room."""

    def free_bytes(self, path):
        return 5


def save_on_a_full_disk(layout, disks):
    with disks.open(layout) as checkpoints:
        checkpoints.save(1, contents_of(*make_state(1), layout))
        checkpoints._saver.storage = Disk() if layout.rank else LOCAL
        with pytest.raises(BurnishError) as caught:
            checkpoints.save(2, contents_of(*make_state(2), layout))
        return str(caught.value)


def test_a_full_disk_names_the_portions_that_wait(tmp_path):
    disks = where(tmp_path, 0, 1)
    for said in run_ranks(save_on_a_full_disk, 2, disks):
        assert "step 2" in said
        assert re.search(rf"{re.escape(disks.url)}.* 1\b", said)
    for rank in (0, 1):  # the save has left nothing
        [portion] = portions_on(disks, rank)
        assert portion.name.startswith(".portion-00000001.")
        assert not list((disks.run(rank) / "checkpoints").glob(".inflight*"))


class Unnameable(LocalStorage):
    """A disk on which nothing becomes a portion."""

    def rename(self, source, target):
        if target.name.startswith(PORTION):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(target))
        super().rename(source, target)


def save_where_one_fails(layout, disks):
    """In place, on a disk that fails at the last moment; in the background, on one that fails once, at the first."""
    storage = Unnameable() if layout.rank else LOCAL
    with disks.open(layout, storage=storage) as checkpoints:
        with pytest.raises(BurnishError):
            checkpoints.save(1, contents_of(*make_state(1), layout))
        left = [path.name for path in checkpoints._root.glob(".*0*")]
    storage = OnceFullStorage(disks.directory / "full") if layout.rank else LOCAL
    with disks.open(layout, storage=storage, background_timeout=250) as checkpoints:
        errors = []
        for step in (2, 3):
            checkpoints.begin_save(step, contents_of(*make_state(step), layout))
            errors.append(str(checkpoints.finished(wait=True).error))
        return left, errors, sorted(portion_paths(checkpoints._root, LOCAL).values())


@pytest.mark.nightly
def test_a_save_that_fails_on_one_disk_leaves_nothing_on_any(tmp_path):
    for left, errors, steps in run_ranks(save_where_one_fails, 2, where(tmp_path, 0, 1)):
        assert left == []
        assert "step 2" in errors[0]
        assert "have: [Errno 28] made to fail" in errors[0]
        assert (errors[1], steps) == ("None", [3])


def lose_and_heal(layout, disks):
    """The mirror is away for one of the disks, for a while; what is said at the end then, and when it is back."""
    with disks.open(layout) as checkpoints:
        checkpoints.mirror_to(RunMirror(disks.mirror(layout.rank), layout))
        environment = disks.directory / "far" / "environment.json"
        if layout.is_main:
            environment.rename(environment.with_name("away"))
        checkpoints.save(1, contents_of(*make_state(1), layout))
        error = settle(checkpoints)
        if layout.is_main:
            environment.with_name("away").rename(environment)
        assert committed(disks.run(layout.rank) / "checkpoints") == []
        checkpoints.save(2, contents_of(*make_state(2), layout))
        return type(error).__name__, settle(checkpoints)


@pytest.mark.nightly
def test_a_mirror_that_comes_back_gets_all(tmp_path):
    disks = where(tmp_path, 0, 1)
    assert run_ranks(lose_and_heal, 2, disks) == [("IncompatibleError", None)] * 2
    assert steps_on(disks) == [1, 2]


def sync(mirror, disk, looks=0):
    """What a disk's process does that looks so often whether the others are ready."""
    left = iter(range(looks))
    mirror = replace(mirror, disk=disk)
    return Sync(mirror).run(pause=lambda seconds: next(left, None) is None)


@pytest.fixture
def two(tmp_path):
    """Two disks with a portion each of step 1, and their mirrors."""
    disks = where(tmp_path, 0, 1)
    run_ranks(save_portions, 2, disks, 1)
    return disks, disks.mirror(0), disks.mirror(1)


@pytest.mark.nightly
def test_nobody_waits_for_another_on_the_way(two):
    disks, first, second = two
    assert sync(first, 0) == []
    assert steps_on(disks) == []
    assert sync(second, 1) == []
    assert sync(first, 0) == [1]
    assert steps_on(disks) == [1]
    assert sync(second, 1) == [1]
    assert sync(second, 1) == sync(first, 0) == []


@pytest.mark.nightly
def test_a_word_of_another_writing_does_not_count(two):
    disks, first, second = two
    _, names = open_partial(*portions_on(disks, 1))
    word = json.dumps({"files": names}).encode()
    for name in names:
        first.remote.put(f"checkpoints/step-00000001/{name}", b"of an attempt before")
    first.remote.put("checkpoints/portions/step-00000001/another.1", word)
    assert sync(first, 0, looks=3) == []
    assert steps_on(disks) == []
    assert sync(second, 1) == []
    assert sync(first, 0) == [1]
    assert steps_on(disks) == [1]


def test_nothing_is_sealed_that_is_not_there(two):
    """Somebody removes a file after it was read back: it is sent again."""
    disks, first, second = two
    sync(second, 1)
    name = open_partial(*portions_on(disks, 1))[1][0]
    first.remote.remove(f"checkpoints/step-00000001/{name}")
    with pytest.raises(BurnishError) as caught:
        sync(first, 0)
    assert name in caught.value.have
    assert steps_on(disks) == []
    assert sync(second, 1) == []
    assert sync(first, 0) == [1]
    assert steps_on(disks) == [1]


@pytest.mark.nightly
def test_what_is_damaged_on_one_disk_keeps_no_other_step_back(two):
    disks, first, second = two
    [damaged] = portions_on(disks, 1)
    file = next(damaged.rglob("*.safetensors"))
    flip(file, -5)
    kept = [path.rename(path.with_name("kept")) for path in [*portions_on(disks, 0), damaged]]
    run_ranks(save_portions, 2, disks, 2)
    for path in kept:
        path.rename(path.with_name(damaged.name))
    with pytest.raises(CorruptError):
        sync(second, 1)
    assert sync(first, 0) == [2]
    assert steps_on(disks) == [2]


@pytest.mark.nightly
def test_who_lost_the_mirror_seals_nothing(two):
    disks, first, second = two
    first.remote.put("environment.json", b'{"start": "that"}')
    for disk, mirror in enumerate((first, second)):
        with pytest.raises(BurnishError):
            sync(mirror, disk)
    assert steps_on(disks) == []


def save_twice(layout, disks):
    """Steps that the mirror is not told of."""
    with disks.open(layout) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, contents_of(*make_state(step), layout))


@pytest.mark.nightly
def test_the_mirrors_retention_leaves_what_another_disk_has_not_seen_sealed(tmp_path):
    disks = where(tmp_path, 0, 1)
    run_ranks(save_twice, 2, disks)
    first, second = replace(disks.mirror(0), disk=0, retention=Retention(1)), disks.mirror(1)
    sync(second, 1)
    assert Sync(first).run() == [2, 1]
    assert steps_on(disks) == [1, 2]
    assert sync(second, 1) == [2, 1]
    assert [portions_on(disks, rank) for rank in (0, 1)] == [[], []]
    Sync(first).run()
    assert steps_on(disks) == [2]


@pytest.mark.nightly
def test_the_mirrors_retention_waits_until_all_disks_have_seen_what_it_removes(tmp_path):
    disks = where(tmp_path, 0, 1)
    run_ranks(save_twice, 2, disks)
    first, second = replace(disks.mirror(0), disk=0, retention=Retention(1)), disks.mirror(1)
    sync(second, 1)

    def pause(seconds):
        assert steps_on(disks) == [1, 2]
        return not sync(second, 1)

    assert Sync(first).run(pause=pause) == [2, 1]
    assert steps_on(disks) == [2]


@pytest.mark.nightly
def test_nobody_asks_for_the_words_of_disks_that_are_no_more(tmp_path):
    disks = where(tmp_path, 0, 1)
    run_ranks(save_twice, 2, disks)
    sync(disks.mirror(1), 1)
    sync(disks.mirror(0), 0)
    alone = replace(disks.mirror(0), retention=Retention(1))
    assert Sync(alone).run() == []
    assert steps_on(disks) == [2]
    assert not any("portions" in file.name for file in alone.remote.files())


@pytest.mark.nightly
def test_the_mirrors_retention_counts_what_was_just_sealed(two):
    disks, first, second = two
    sync(second, 1)
    mirror = replace(first, disk=0, retention=Retention(1))
    assert Sync(mirror).run() == [1]
    sync(second, 1)
    run_ranks(save_portions, 2, disks, 2)
    sync(second, 1)
    assert Sync(mirror).run() == [2]
    assert steps_on(disks) == [2]
