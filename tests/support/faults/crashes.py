"""One cell of the crash matrix: a moment, a fault and a layout; what happened, and whether all is as it has to be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.steps import open_step, verify
from burnish.checkpoint.tools.export import StepModel, export
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import BurnishError
from burnish.files.storage import LocalStorage
from burnish.runs.signals import catch_signals
from support.checkpoints.engine_states import (
    ENGINES,
    RESUMED_BY,
    make_engine,
    require_loaded,
    shapes,
    shards_in,
)
from support.checkpoints.states import (
    BIG_SHAPES,
    contents_of,
    fill_and_compare,
    make_state,
    save_once,
    shards_of,
)
from support.faults.failpoints import (
    EXPORTING,
    FAULTS,
    MOMENTS,
    RESUMING,
    SAVING,
    SECOND,
    STAGING,
    FaultStorage,
    StrikingList,
)
from support.faults.power_loss import EXPORT_BYTES, finite_weights
from support.faults.verdict import ONE, Verdict, resumable, resumed_with
from support.ranks.processes import RankFailed, run_ranks

LAYOUTS = {
    "1 process": (1, False),
    "2 processes": (2, False),
    "1 + writer": (1, True),
    "2 + writers": (2, True),
    "3 processes": (3, False),
    **{name: (ENGINES[name][0], False) for name in RESUMED_BY},
}
"""By name: processes, and whether they save in the background, in a process beside each. Those of `ENGINES` save what a real engine holds, and the other engine resumes."""
IN_PART = ("3 processes", *RESUMED_BY)
"""Layouts that are tried at a few moments."""
OF_PARTS = (
    "files laid out",
    STAGING,
    "at half of the blocks",
    "a rank dead at the barrier",
    "before COMMIT's rename",
    "after the step's rename, before its fsync",
)
"""The moments at which they meet the faults that kill, and a full disk."""
STOPPED = "training did not go on"
"""How words begin that may only mean that a busy machine took longer than patience."""
PATIENCE_SECONDS = (6.0, 25.0, 100.0)
"""For one that hangs; longer ones where the machine was too busy to get that far."""
BLOCKS, FILES = 10, 4
"""Of tensors, in a step of `BIG_SHAPES`, or of an engine."""


@dataclass(frozen=True)
class Cell:
    """What is tried."""

    moment: str
    fault: str
    layout: str

    def __str__(self):
        return f"{self.fault} {self.moment}, {self.layout}"


def cells() -> Iterator[Cell]:
    """All that make sense."""
    for layout, (world, background) in LAYOUTS.items():
        for fault in FAULTS:
            if fault in ("kill another", "kill all") and world == 1:
                continue
            if fault == "kill parent" and not background:
                continue
            if layout in IN_PART and not (fault.startswith("kill") or fault == "ENOSPC"):
                continue
            moments = OF_PARTS if layout in IN_PART else _moments(world, background)
            for moment in moments:
                if moment != STAGING or _may_fail_while_staging(fault, background):
                    yield Cell(moment, fault, layout)


def _may_fail_while_staging(fault: str, background: bool) -> bool:
    """There is no disk in it, but for the memory that a writer shares."""
    return fault not in ("kill parent", *([] if background else ["ENOSPC", "EIO"]))


def _moments(world: int, background: bool) -> Iterator[str]:
    yield from (name for name, moment in SAVING.items() if world > 1 or not moment.last_rank)
    yield STAGING
    if not background:
        yield from RESUMING
    if not background and world == 1:
        yield from EXPORTING


def try_cell(cell: Cell, directory: Path) -> Verdict:
    """Run it in a directory that is not there, and look at what is left."""
    attempt = _try_saving
    if cell.moment in RESUMING:
        attempt = _try_resuming
    if cell.moment in EXPORTING:
        attempt = _try_exporting
    for patience in PATIENCE_SECONDS if cell.fault == "hang" else (120.0,):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        verdict = attempt(cell, directory, patience)
        if verdict.struck and not verdict.wrong.startswith(STOPPED):
            break
    return verdict


def _run(fn: Callable[..., None], cell: Cell, patience: float, *arguments: object) -> str:
    """The function on the cell's ranks; how it ended, where it did not end well."""
    world, background = LAYOUTS[cell.layout]
    outlasts = cell.fault == "hang" and background  # the run, which goes on without that save
    try:
        run_ranks(fn, world, *arguments, timeout=4 * patience if outlasts else patience)
    except RankFailed as failed:
        return str(failed)
    return ""


def _try_saving(cell: Cell, directory: Path, patience: float) -> Verdict:
    root = directory / "checkpoints"
    writers = patience if LAYOUTS[cell.layout][1] else None
    ended = _run(_save_three, cell, patience, str(root), cell, writers)
    struck = (directory / "struck").exists()
    if not (directory / "acked").exists():
        return Verdict(struck, wrong=f"not even the first save was made: {ended}")
    acked = int((directory / "acked").read_text())
    if _goes_on(cell) and acked != 3:
        return Verdict(struck, wrong=f"{STOPPED} after step {acked}: {ended}")
    return replace(_resumed(cell, root, acked), struck=struck)


def _resumed(cell: Cell, root: Path, acked: int) -> Verdict:
    """What one process finds there, or where an engine has saved it the other engine."""
    other = RESUMED_BY.get(cell.layout)
    if other is None:
        return resumable(root, acked, BIG_SHAPES)
    try:
        verdicts = run_ranks(_resume_with_engine, ENGINES[other][0], other, str(root), acked)
    except RankFailed as failed:
        return Verdict(lost=1, wrong=f"{other} does not go on: {failed}")
    return next((verdict for verdict in verdicts if not verdict.is_good), verdicts[0])


def _resume_with_engine(layout, name, root, acked):
    with closing(make_engine(name, layout)) as engine:

        def load(step, source):
            for part in (Part.WEIGHTS, Part.TRAINING):
                engine.load(source, part)
            require_loaded(engine, *make_state(step.step, shapes()))

        return resumed_with(load, Path(root), acked, layout)


def _goes_on(cell: Cell) -> bool:
    """Whether training has to outlive the fault, and to commit its last step.

    What happens to a writer stops nobody; a lone one that hangs is tried in `tests/checkpoint/test_background.py`, as its time-out is long.
    """
    world, background = LAYOUTS[cell.layout]
    at_the_writer = background and cell.moment != STAGING
    if cell.fault == "hang":
        return at_the_writer and world > 1
    return cell.fault in ("ENOSPC", "EIO") or (cell.fault == "kill this" and at_the_writer)


def _shapes(cell: Cell) -> dict[str, tuple[int, ...]]:
    return shapes() if cell.layout in ENGINES else BIG_SHAPES


def _save_three(layout, root, cell, writers_patience):
    moment, fault, background = cell.moment, cell.fault, writers_patience is not None
    root = Path(root)
    pids = root.parent
    (pids / f"rank-{layout.rank}").write_text(str(os.getpid()))
    storage = LocalStorage()
    if moment in MOMENTS and layout.is_main != MOMENTS[moment].last_rank:
        totals = {"create": FILES, "unlink": 9, "look": 2}
        totals |= {"write": BLOCKS // layout.world, "sync": FILES // layout.world}
        there = "" if MOMENTS[moment].op == "look" else SECOND
        storage = FaultStorage(
            moment, fault, pids, totals=totals, once_there=there, is_writer=background
        )
    with (
        _engine(cell, layout) as engine,
        catch_signals(),
        Checkpoints(
            root,
            layout,
            retention=ONE,
            background_timeout=writers_patience,
            storage=storage,
        ) as checkpoints,
    ):
        for step in (1, 2, 3):
            weights, slots = make_state(step, _shapes(cell))
            held = {"weights": shards_of(weights, layout), "training": shards_of(slots, layout)}
            if engine is not None:
                held = shards_in(engine, weights, slots)
            if moment == STAGING and step == 2 and layout.is_main:
                held["weights"] = StrikingList(held["weights"], fault, pids)
            contents = contents_of(weights, slots, layout, **held)
            if _saved(checkpoints, step, contents, background) and layout.is_main:
                (pids / "acked").write_text(str(step))


def _engine(
    cell: Cell, layout: Layout
) -> AbstractContextManager[MegatronEngine | TorchEngine | None]:
    """What holds the state, where that is an engine."""
    return closing(make_engine(cell.layout, layout)) if cell.layout in ENGINES else nullcontext()


def _saved(checkpoints, step, contents, background) -> bool:
    """Whether a save tells that the step is committed."""
    try:
        if background:
            checkpoints.begin_save(step, contents)
            return checkpoints.finished(wait=True).error is None
        checkpoints.save(step, contents)
    except BurnishError as failure:
        return "is committed" in str(failure)
    return True


def _try_resuming(cell: Cell, directory: Path, patience: float) -> Verdict:
    """Step 1 is whole, step 2 damaged, step 3 half written, and an old one half removed."""
    root = directory / "checkpoints"
    save_once(root, 1, seed=1)
    damaged = save_once(root, 2, seed=2) / "training/exp_avg_sq.safetensors"
    (root / "trash").mkdir(exist_ok=True)
    shutil.copytree(root / "step-00000001", root / ".inflight-00000003.abc")
    shutil.copytree(root / "step-00000001", root / "trash/step-00000000")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    _run(_resume, cell, patience, str(root), cell.moment, cell.fault)
    return replace(resumable(root, 1, damaged=damaged.name), struck=(directory / "struck").exists())


def _resume(layout, root, moment, fault):
    root = Path(root)
    (root.parent / f"rank-{layout.rank}").write_text(str(os.getpid()))
    storage = LocalStorage()
    if layout.is_main:
        totals = {"unlink": 9, "read": 2}
        storage = FaultStorage(moment, fault, root.parent, totals=totals)

    def load(step, source):
        fill_and_compare(source, *make_state(step.step), layout)

    with catch_signals(), Checkpoints(root, layout, retention=ONE, storage=storage) as checkpoints:
        checkpoints.resume(load)


def _try_exporting(cell: Cell, directory: Path, patience: float) -> Verdict:
    root = directory / "checkpoints"
    step = save_once(root, 1, weights=shards_of(finite_weights(), Layout()))
    whole = _export(Layout(), str(step), str(directory / "whole"))
    _run(_export, cell, patience, str(step), str(directory / "out"), cell.moment, cell.fault)
    struck = (directory / "struck").exists()
    problems = [str(error) for error in verify(step)]
    if problems:
        return Verdict(struck, lost=1, wrong="; ".join(problems))
    if (directory / "out").exists() and _content(directory / "out") != whole:
        return Verdict(struck, uncommitted=1, wrong="a part of an export is there under its name")
    shutil.rmtree(directory / "out", ignore_errors=True)
    again = _export(Layout(), str(step), str(directory / "out"))
    return Verdict(struck, wrong="" if again == whole else "exporting again gives other files")


def _export(layout, step, target, moment="", fault=""):
    target = Path(target)
    storage, signals = LocalStorage(), nullcontext()
    if moment:
        (target.parent / "rank-0").write_text(str(os.getpid()))
        totals = {"read": 2, "write": 4}
        storage = FaultStorage(moment, fault, target.parent, totals=totals)
        signals = catch_signals()
    with signals:
        model = StepModel(replace(open_step(Path(step)), source=storage))
        export(model, target, torch.float32, EXPORT_BYTES, storage)
    return _content(target)


def _content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
