"""What ranks tell each other when a Megatron engine is described and saved: blocks for those who write them, and nothing gathered.

Every collective that a rank starts is counted where torch dispatches it. What has to travel is worked out from
the disk: of each byte that a rank wrote, whether the rank had the element.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.engine_states import config, shapes
from support.ranks.processes import run_ranks
from support.ranks.traffic import EXCHANGE, Traffic

from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.save import Contents, ModelContents
from burnish.checkpoint.steps import newest
from burnish.checkpoint.write_plan import MAIN
from burnish.config.schema import EngineConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.files.storage import Bytes, Closing, LocalFile, LocalStorage
from burnish.models.loading import FreshSource

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2": {},
    "tp 2": {"tensor_parallel": 2},
    "pp 2": {"pipeline_parallel": 2},
    "ep 2": {"expert_parallel": 2},
}


class Notes(LocalStorage):
    """The real disk, and what this rank writes to it: files below the step, first bytes, numbers of bytes."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int, int]] = []

    def open(self, path: Path, *, write: bool = False) -> Any:
        return NotedFile(super().open(path, write=write), self, f"{path.parent.name}/{path.name}")


class NotedFile(Closing):
    def __init__(self, file: LocalFile, notes: Notes, name: str) -> None:
        self.file, self.notes, self.name = file, notes, name
        self.size, self.pread_into, self.sync = file.size, file.pread_into, file.sync

    def pwrite(self, data: Bytes, offset: int) -> None:
        self.notes.written.append((self.name, offset, len(data)))
        self.file.pwrite(data, offset)

    def close(self) -> None:
        self.file.close()


@dataclass(frozen=True)
class Saved:
    """What one rank did."""

    described: list[tuple[str, int]]
    """Collectives of describing what the engine has."""
    sent: list[tuple[str, int]]
    """Collectives of saving it."""
    held: list[tuple[str, Any]]
    """Names and boxes of what it has: weights by their names, slots as `slot/weight`."""
    written: list[tuple[str, int, int]]
    """What it wrote, as `Notes` have it."""


def saved_rank(layout: Layout, root: Path) -> dict[str, Saved]:
    found = {}
    for name, settings in LAYOUTS.items():
        engine_config = EngineConfig(kind="megatron", precision="fp32", **settings)
        engine = MegatronEngine(
            config(), engine_config, OptimConfig(), layout=layout, device=torch.device("cpu")
        )
        engine.load(FreshSource(config(), 1), Part.WEIGHTS)
        with Traffic(layout) as described:
            weights, training = (
                list(engine.shards(Part.WEIGHTS)),
                list(engine.shards(Part.TRAINING)),
            )
            list(engine.published().changing)
        model = ModelContents(weights, training)
        contents = Contents(models={MAIN: model}, state={})
        notes = Notes()
        with (
            Checkpoints(root / name, layout, storage=notes) as checkpoints,
            Traffic(layout) as saving,
        ):
            checkpoints.save(1, contents)
        held = [(shard.spec.name, shard.box) for shard in (*weights, *training)]
        found[name] = Saved(described.sent, saving.sent, held, notes.written)
        engine.close()
    return found


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Saved]]]:
    """By layout, the step and what each rank did."""
    root = tmp_path_factory.mktemp("saves")
    ranks = run_ranks(saved_rank, 2, root)
    return {name: (newest(root / name).path, [rank[name] for rank in ranks]) for name in LAYOUTS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_gathered_and_only_blocks_travel(saves: Any, name: str) -> None:
    step, ranks = saves[name]
    assert [rank.described for rank in ranks] == [[], []]
    state = sum(path.stat().st_size for path in step.rglob("*.safetensors"))
    words = sum(size for rank in ranks for what, size in rank.sent if what != EXCHANGE)
    assert words < 0.002 * state, "more than words was gathered"
    exchanged = sum(size for rank in ranks for what, size in rank.sent if what == EXCHANGE)
    needed = sum(missing(step, rank) for rank in ranks)
    assert 0 < needed < 0.6 * state
    assert needed <= exchanged < 1.001 * needed, "other bytes travel than those of blocks"


def missing(step: Path, rank: Saved) -> int:
    """The bytes that a rank wrote of elements that it does not have."""
    has = {
        f"{slot}{name}": np.zeros(prod(shape), bool)
        for name, shape in shapes().items()
        for slot in ("", "exp_avg/", "exp_avg_sq/")
    }
    for name, box in rank.held:
        has[name].reshape(shapes()[name.split("/")[-1]])[box.slices] = True
    total = 0
    for path in {path for path, _, _ in rank.written if path.endswith(".safetensors")}:
        ranges = [(at, at + size) for file, at, size in rank.written if file == path]
        for name, begin, end in entries(step / path):
            owned = has[name]
            item = (end - begin) // owned.size
            for first, last in ranges:
                inside = slice(
                    max(first - begin, 0) // item, max(min(last, end) - begin, 0) // item
                )
                total += item * int((~owned[inside]).sum())
    return total


def entries(path: Path) -> Iterator[tuple[str, int, int]]:
    """What lies in a file: names as `Saved.held` has them, first and last byte."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    slot = f"{path.stem}/" if path.stem.startswith("exp_avg") else ""
    for name, said in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = said["data_offsets"]
            yield slot + name, 8 + length + begin, 8 + length + end
