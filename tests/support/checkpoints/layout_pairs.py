"""Saved at one layout, loaded at any other: what every pair of layouts owes, whatever engines they are of.

Each layout saves once; each then loads what every other has saved, one after the other into one engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import LR, cut, loss, make_examples, whole
from torch import Tensor

from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.save import Contents, ModelContents
from burnish.checkpoint.steps import newest
from burnish.checkpoint.write_plan import MAIN
from burnish.config.schema import OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine, Part
from support.models.engines import make_engine
from support.models.tiny import VOCAB
from support.ranks.processes import run_ranks

DEFAULTS = OptimConfig()
SAVED = (Part.WEIGHTS, Part.TRAINING)
Layouts = Mapping[int, Mapping[str, Mapping[str, Any]]]
"""By processes and name: what the engine is told."""


def require_every_pair(
    path: Path,
    root: Path,
    layouts: Layouts,
    each: Sequence[int] | None = None,
    relative: float = 1e-6,
    optim: OptimConfig = DEFAULTS,
) -> None:
    """Weights and slots that were saved are loaded bit for bit, and the loss of the next step is what it would have been where they were saved.

    `path` is a directory with the model to begin from, `root` one for checkpoints. With `each` a layout
    loads not from all, but from those that are so many places behind it, in the order given. `relative`
    says how far the loss may be off where layouts differ.
    """
    saved: dict[str, list[dict[str, Any]]] = {}
    for world, of_world in layouts.items():
        ranks = run_ranks(save_rank, world, path, optim, root, of_world)
        saved |= {name: [rank[name] for rank in ranks] for name in of_world}
    names = list(saved)
    writers = {
        name: names if each is None else [names[(at + by) % len(names)] for by in each]
        for at, name in enumerate(names)
    }
    for world, of_world in layouts.items():
        told = {name: (settings, writers[name]) for name, settings in of_world.items()}
        ranks = run_ranks(load_rank, world, path, optim, root, told)
        for reader in of_world:
            for number, writer in enumerate(writers[reader]):
                loaded = [rank[reader][number] for rank in ranks]
                pair = f"{writer} to {reader}"
                _require_same(loaded, saved[writer], pair)
                wanted = saved[writer][0]["loss"]
                tolerance = 1e-6 if reader == writer else relative
                for rank in loaded:
                    what = f"{pair}: {rank['loss']}, not {wanted}"
                    assert rank["loss"] == pytest.approx(wanted, rel=tolerance), what


def save_rank(
    layout: Layout,
    path: Path,
    optim: OptimConfig,
    root: Path,
    layouts: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """By layout, what was saved after two steps below `root / name`."""
    return {
        name: _save(layout, make_engine(layout, path, optim, **settings), root / name)
        for name, settings in layouts.items()
    }


def load_rank(
    layout: Layout,
    path: Path,
    optim: OptimConfig,
    root: Path,
    layouts: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]],
) -> dict[str, list[dict[str, Any]]]:
    """By layout, what the checkpoints of these layouts give."""
    return {
        name: _load(
            layout,
            make_engine(layout, path, optim, **settings),
            [root / each for each in writers],
        )
        for name, (settings, writers) in layouts.items()
    }


def _save(layout: Layout, engine: Engine, root: Path) -> dict[str, Any]:
    batch = cut(make_examples(VOCAB), engine.layout, 2)
    for _ in range(2):
        engine.forward_backward(batch, loss)
        engine.optim_step(LR)
    weights, training = list(engine.shards(Part.WEIGHTS)), list(engine.shards(Part.TRAINING))
    model = ModelContents(weights, training)
    contents = Contents(models={MAIN: model}, state={"steps": engine.steps})
    with Checkpoints(root, layout) as checkpoints:
        checkpoints.save(2, contents)
    found = _held(engine)
    engine.close()
    return found


def _load(layout: Layout, engine: Engine, roots: list[Path]) -> list[dict[str, Any]]:
    found = []
    for root in roots:
        step = newest(root)
        assert step is not None
        source = CheckpointSource(step, layout)
        for part in SAVED:
            engine.load(source, part)
        engine.steps = step.state["steps"]
        found.append(_held(engine))
        engine.optim_step(LR)
    engine.close()
    return found


def _held(engine: Engine) -> dict[str, Any]:
    """This rank's pieces, and the loss of the next step."""
    pieces = [
        (shard.spec.name, shard.box, shard.tensor.clone(), shard.spec.shape)
        for part in SAVED
        for shard in engine.shards(part)
    ]
    batch = cut(make_examples(VOCAB), engine.layout, 2)
    stats = engine.forward_backward(batch, loss)
    return {"pieces": pieces, "loss": stats.values_by_name()["loss"]}


def _together(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    shapes = {name: shape for rank in ranks for name, _, _, shape in rank["pieces"]}
    return whole([[piece[:3] for piece in rank["pieces"]] for rank in ranks], shapes)


def _require_same(loaded: list[dict[str, Any]], saved: list[dict[str, Any]], pair: str) -> None:
    found, wanted = _together(loaded), _together(saved)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{pair}: {name}"
