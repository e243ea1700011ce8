"""Power lost at every moment, with any part of what was not synced: a seeded sample (`make faults` tries all)."""

from __future__ import annotations

import itertools
import random
import shutil

import pytest
from support.faults.failpoints import EXPORTING, SAVING
from support.faults.power_loss import (
    SCENES,
    check,
    named_moments,
    record_saving,
    resume,
    save_steps,
)
from support.faults.recorded_disk import History, RecordingStorage, crash_states, write_out

SAMPLE = 80


@pytest.mark.parametrize(
    "scene",
    [
        "saving",
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ("2 processes", "2 + writers", "restarting", "quarantine")
        ),
    ],
)
def test_nothing_committed_is_lost_and_nothing_else_is_loaded(tmp_path, scene):
    rng = random.Random(scene)
    history = SCENES[scene](tmp_path / "disk")
    states = list(crash_states(history, rng, extra=4))
    assert len(states) > 200
    for moment, nodes in states:  # rare among the states, so looked for in all
        assert "checkpoints" in nodes[0].names or history.acked(moment) == 0
    verdicts = [
        check(history, moment, nodes, tmp_path / "left", scene)
        for moment, nodes in rng.sample(states, SAMPLE)
    ]
    assert [verdict.wrong for verdict in verdicts if not verdict.is_good] == []


def test_an_export_is_there_whole_or_not_at_all(tmp_path):
    rng = random.Random(4)
    history = SCENES["exporting"](tmp_path / "disk")
    states = list(crash_states(history, rng, extra=4))
    assert {"out" in nodes[0].names for _, nodes in states} == {True, False}
    for moment, nodes in states:
        assert check(history, moment, nodes, tmp_path / "left", "exporting").is_good


def test_every_moment_of_the_matrix_is_met(tmp_path):
    """The table names losses of power by what had come last."""
    names = named_moments(record_saving(tmp_path / "disk"))
    others = {"in the preflight", "a rank dead at the barrier"}
    # Files are written side by side: the next operation may already be the first write, or the first sync.
    at_times = {"files laid out", "after one block"}
    assert set(names) | at_times == set(SAVING) - others
    names = named_moments(SCENES["exporting"](tmp_path / "export"))
    assert {"exporting, before the rename", "exporting, after the rename"} < set(names)
    assert set(names) < set(EXPORTING)


def test_after_a_loss_of_power_saving_goes_on(tmp_path):
    rng = random.Random(1)
    history = record_saving(tmp_path / "disk")
    for number, (_, nodes) in enumerate(rng.sample(list(crash_states(history, rng, 2)), 15)):
        write_out(nodes, tmp_path / f"left-{number}")
        root = tmp_path / f"left-{number}" / "checkpoints"
        found = resume(root)
        save_steps(root, RecordingStorage(), [found + 1])
        assert resume(root) == found + 1


def test_power_lost_again_while_resuming(tmp_path):
    rng = random.Random(2)
    history = record_saving(tmp_path / "disk")
    for number, (moment, nodes) in enumerate(rng.sample(list(crash_states(history, rng, 2)), 6)):
        base, disk = tmp_path / f"base-{number}", tmp_path / f"disk-{number}"
        write_out(nodes, base)
        write_out(nodes, disk)
        storage = RecordingStorage()
        first = resume(disk / "checkpoints", storage)
        again = History(disk, storage.log, base)
        for _, left in itertools.islice(crash_states(again, rng, 2), 12):
            write_out(left, tmp_path / "again")
            assert resume(tmp_path / "again" / "checkpoints") == first >= history.acked(moment)
            shutil.rmtree(tmp_path / "again")


class WithoutSync(RecordingStorage):
    """A protocol that forgets to sync: its log has none of one kind."""

    forgotten = "sync"

    def note(self, kind, path, **more):
        if kind != self.forgotten:
            super().note(kind, path, **more)


class WithoutSyncDir(WithoutSync):
    forgotten = "sync_dir"


@pytest.mark.parametrize(
    "storage_type", [WithoutSync, pytest.param(WithoutSyncDir, marks=pytest.mark.nightly)]
)
def test_a_protocol_without_its_syncs_is_found_out(tmp_path, storage_type):
    rng = random.Random(3)
    history = record_saving(tmp_path / "disk", storage_type)
    states = rng.sample(list(crash_states(history, rng, extra=2)), 60)
    failures = 0
    for moment, nodes in states:
        failures += not check(history, moment, nodes, tmp_path / "left").is_good
    assert failures > 5
