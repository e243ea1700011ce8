"""Power lost at every moment, with any part of what was not synced: a seeded sample (`make faults` tries all)."""

from __future__ import annotations

import itertools
import random
import shutil

import pytest
from faultfs import History, RecordingStorage, crash_states, write_out
from power_loss import SCENES, check, record_saving, resume, save_steps

SAMPLE = 160


@pytest.mark.parametrize("scene", ["saving", "restarting", "quarantine", "2 processes"])
def test_nothing_committed_is_lost_and_nothing_else_is_loaded(tmp_path, scene):
    rng = random.Random(scene)
    history = SCENES[scene](tmp_path / "disk")
    states = list(crash_states(history, rng, extra=4))
    assert len(states) > 200
    for moment, nodes in states:  # rare among the states, so looked for in all
        assert "checkpoints" in nodes[0].names or history.acked(moment) == 0
    found = {
        check(history, moment, nodes, tmp_path / "left", scene)
        for moment, nodes in rng.sample(states, SAMPLE)
    }
    assert len(found) > 1


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

    kind = "sync"

    def note(self, kind, path, **more):
        if kind != self.kind:
            super().note(kind, path, **more)


class WithoutSyncDir(WithoutSync):
    kind = "sync_dir"


@pytest.mark.parametrize("storage_type", [WithoutSync, WithoutSyncDir])
def test_a_protocol_without_its_syncs_is_found_out(tmp_path, storage_type):
    rng = random.Random(3)
    history = record_saving(tmp_path / "disk", storage_type)
    states = rng.sample(list(crash_states(history, rng, extra=2)), 60)
    failures = 0
    for moment, nodes in states:
        try:
            check(history, moment, nodes, tmp_path / "left")
        except Exception:
            failures += 1
    assert failures > 5
