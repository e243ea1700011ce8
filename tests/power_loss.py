"""Scenes to lose power in, and what has to hold after it."""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoints_for_tests import contents_of, fill_and_compare, make_state, save_once
from distributed import run_ranks
from faultfs import History, RecordingStorage, fresh, write_out

from burnish.checkpoint.directory import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.parallel.layout import Layout

ONE = Retention(1)


def save_steps(root, storage, steps, layout=None):
    with Checkpoints(root, layout or Layout(), retention=ONE, storage=storage) as checkpoints:
        for step in steps:
            checkpoints.save(step, contents_of(*make_state(step), layout))
            storage.ack(step)


def resume(root, storage=None):
    """What a run does first; the step it continues from, 0 for none."""

    def load(step, source):
        fill_and_compare(source, *make_state(step.step), Layout())

    with Checkpoints(root, Layout(), retention=ONE, storage=storage) as checkpoints:
        resumed = checkpoints.resume(load)
    assert resumed is None or resumed.skipped == (), resumed.skipped
    return 0 if resumed is None else resumed.step.step


def record_saving(disk, storage_type=RecordingStorage):
    """Three saves from the very beginning, each of which removes the step before."""
    disk.mkdir()
    storage = storage_type()
    save_steps(disk / "checkpoints", storage, [1, 2, 3])
    return History(disk, storage.log)


def record_restarting(disk, storage_type=RecordingStorage):
    """Resume where a killed run left things half done, then save."""
    root = disk / "checkpoints"
    save_once(root, 1, seed=1)
    save_once(root, 2, seed=2)
    (root / "trash").mkdir(exist_ok=True)
    shutil.copytree(root / "step-00000001", root / ".inflight-00000003.abc")
    shutil.move(root / "step-00000001", root / "trash" / "step-00000001")
    base = fresh(disk.with_name("base"))
    shutil.copytree(disk, base)
    storage = storage_type()
    assert resume(root, storage) == 2
    save_steps(root, storage, [3])
    return History(disk, storage.log, base, saved=2)


def record_quarantine(disk, storage_type=RecordingStorage):
    """Resume with a damaged newest step, then save it anew."""
    root = disk / "checkpoints"
    save_once(root, 1, seed=1)
    damaged = save_once(root, 2, seed=2) / "training" / "exp_avg.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    base = fresh(disk.with_name("base"))
    shutil.copytree(disk, base)
    storage = storage_type()
    with Checkpoints(root, Layout(), retention=ONE, storage=storage) as checkpoints:
        assert checkpoints.resume(_loads).step.step == 1
    save_steps(root, storage, [2])
    return History(disk, storage.log, base, saved=1)


def _loads(step, source):
    fill_and_compare(source, *make_state(step.step), Layout())


def _save_on_ranks(layout, root):
    storage = RecordingStorage()
    save_steps(Path(root), storage, [1, 2], layout)
    return storage.log


def record_ranks(disk, world):
    """Two saves by several processes."""
    disk.mkdir()
    logs = run_ranks(_save_on_ranks, world, str(disk / "checkpoints"))
    return History(disk, [op for log in logs for op in log])


SCENES = {
    "saving": record_saving,
    "restarting": record_restarting,
    "quarantine": record_quarantine,
    "2 processes": lambda disk: record_ranks(disk, 2),
    "3 processes": lambda disk: record_ranks(disk, 3),
}


def check(history, moment, nodes, directory, scene="saving"):
    """Resume from what is left: nothing that was acknowledged is lost, nothing half written is loaded."""
    write_out(nodes, fresh(directory))
    found = resume_after(directory / "checkpoints", scene)
    acked = history.acked(moment)
    assert acked <= found <= acked + 1, f"step {acked} was saved, step {found} is found"
    return found


def resume_after(directory, scene):
    """Like `resume`; the scene with a damaged step may find that one again."""
    if scene != "quarantine":
        return resume(directory)
    with Checkpoints(directory, Layout(), retention=ONE) as checkpoints:
        resumed = checkpoints.resume(_loads)
    assert all("exp_avg" in reason for reason in resumed.skipped)
    return resumed.step.step
