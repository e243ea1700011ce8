"""Scenes to lose power in, and what has to hold after it."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.steps import open_step
from burnish.checkpoint.tools.export import StepModel, export
from burnish.distributed.layout import Layout
from burnish.files.storage import LOCAL, LocalStorage
from support.checkpoints.states import (
    contents_of,
    fill_and_compare,
    make_state,
    save_once,
    shards_of,
)
from support.faults.failpoints import EXPORTING, RESUMING, SAVING
from support.faults.recorded_disk import (
    History,
    RecordingStorage,
    SharedRecordingStorage,
    fresh,
    write_out,
)
from support.faults.verdict import ONE, Verdict, resumable
from support.ranks.processes import run_ranks

EXPORT_BYTES = 1600
"""Of a file of an export: three files."""


def save_steps(root, storage, steps, layout=None):
    with Checkpoints(root, layout or Layout(), retention=ONE, storage=storage) as checkpoints:
        for step in steps:
            checkpoints.save(step, contents_of(*make_state(step), layout))
            storage.ack(step)


def resume(root, storage=LOCAL):
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


def _save_in_background(layout, root, logs, steps):
    storage = SharedRecordingStorage(logs)
    with Checkpoints(
        Path(root), layout, retention=ONE, background_timeout=60, storage=storage
    ) as checkpoints:
        for step in steps:
            checkpoints.begin_save(step, contents_of(*make_state(step), layout))
            assert checkpoints.finished(wait=True).error is None
            storage.ack(step)


def record_writers(disk, world):
    """Two saves by the processes beside so many trainers."""
    disk.mkdir()
    logs = disk.with_name(f"{disk.name}-logs")
    logs.mkdir()
    run_ranks(_save_in_background, world, str(disk / "checkpoints"), str(logs), [1, 2])
    return History(disk, SharedRecordingStorage(logs).together())


def finite_weights():
    """What is exported."""
    weights, _ = make_state(1)
    weights["embed.weight"][0, :6] = 1.0
    return weights


def record_export(disk, storage_type=RecordingStorage):
    """Export a step; nothing was there before."""
    disk.mkdir()
    weights = shards_of(finite_weights(), Layout())
    path = save_once(disk.with_name("source"), 1, weights=weights)
    step = open_step(path, LocalStorage())
    storage = storage_type()
    export(
        StepModel(replace(step, source=storage)), disk / "out", torch.float32, EXPORT_BYTES, storage
    )
    storage.ack(1)
    return History(disk, storage.log)


SCENES = {
    "saving": record_saving,
    "restarting": record_restarting,
    "quarantine": record_quarantine,
    "2 processes": lambda disk: record_ranks(disk, 2),
    "3 processes": lambda disk: record_ranks(disk, 3),
    "1 + writer": lambda disk: record_writers(disk, 1),
    "2 + writers": lambda disk: record_writers(disk, 2),
    "exporting": record_export,
}


def check(history, moment, nodes, directory, scene="saving") -> Verdict:
    """Resume from what is left, or look at what is left of an export."""
    write_out(nodes, fresh(directory))
    acked = history.acked(moment)
    if scene == "exporting":
        return _exported(directory / "out", acked)
    damaged = "exp_avg" if scene == "quarantine" else "no step"
    return resumable(directory / "checkpoints", acked, damaged=damaged)


def _exported(target, acked):
    """The directory is whole or not there; there, once that was told."""
    if not target.exists():
        return Verdict(lost=acked, wrong="the export is gone" if acked else "")
    try:
        found = {}
        for path in target.glob("*.safetensors"):
            found |= load_file(path)
        wanted = finite_weights()
        same = (target / "config.json").is_file() and found.keys() == wanted.keys()
        same = same and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    except Exception as error:  # whatever reading a part of a file raises
        return Verdict(uncommitted=1, wrong=str(error))
    return Verdict() if same else Verdict(uncommitted=1, wrong="a part of an export is there")


def named_moments(history) -> list[str]:
    """For every moment of a log (a number of operations) the named one that had come last."""
    names, shares = [], {}
    group, at = RESUMING, "resuming, before a leftover's rename"
    if history.saved == 0:
        group, at = SAVING, "before mkdir"
    if any(EXPORTING["exporting, before mkdir"].matches(op.kind, op.path) for op in history.ops):
        group, at = EXPORTING, "exporting, before mkdir"
    for op in history.ops:
        if SAVING["before mkdir"].matches(op.kind, op.path):
            group, shares = SAVING, {}
        comes = [name for name, moment in group.items() if _comes(moment, op, name, shares)]
        before = [name for name in comes if group[name].when == "before"]
        names.append((before or [at])[-1])
        at = (comes or [at])[-1]
    return [*names, at]


def _comes(moment, op, name, seen) -> bool:
    """Whether an operation is the one of a moment, for files of one block each."""
    if moment.last_rank or not moment.matches(op.kind, op.path):
        return False
    seen[name] = seen.get(name, 0) + 1
    total = {"write": 4, "create": 4, "sync": 4, "unlink": 9}.get(op.kind, 1)
    return seen[name] == max(1, math.ceil(moment.at * total))
