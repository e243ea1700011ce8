"""Saved at one layout, loaded at any other: every weight and slot bit-equal, the next loss the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import LR, cut, loss, make_examples, whole
from distributed import run_ranks
from tiny import VOCAB, save_tiny
from torch import Tensor
from transformers import AutoConfig

from burnish.checkpoint.committed import newest
from burnish.checkpoint.contents import Contents, ModelContents
from burnish.checkpoint.directory import Checkpoints
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.tensor_sets import MAIN
from burnish.config.schema import EngineConfig, OptimConfig
from burnish.engines.base import Part
from burnish.engines.torch_engine import TorchEngine
from burnish.models.sources import SafetensorsSource
from burnish.parallel.layout import Layout

CPU = torch.device("cpu")
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    1: {"1": {}},
    2: {"fsdp 2": {}, "tp 2": {"tensor_parallel": 2}, "sp 2": {"sequence_parallel": 2}},
    3: {"fsdp 3": {}},
    4: {
        "fsdp 4": {},
        "hsdp 2x2": {"replicas": 2},
        "fsdp 2 x tp 2": {"tensor_parallel": 2},
        "fsdp 2 x sp 2": {"sequence_parallel": 2},
    },
}
"""By processes: what the engine is told."""


def make_engine(layout: Layout, path: Path, settings: dict[str, int]) -> TorchEngine:
    config = EngineConfig(precision="fp32", logprob_chunk=5, **settings)
    hf_config = AutoConfig.from_pretrained(path)
    return TorchEngine(hf_config, config, OptimConfig(), layout=layout, device=CPU)


def held(engine: TorchEngine) -> dict[str, Any]:
    """This rank's pieces, and the loss of the next step."""
    pieces = [
        (shard.spec.name, shard.box, shard.tensor.clone(), shard.spec.shape)
        for part in Part
        for shard in engine.shards(part)
    ]
    batch = cut(make_examples(VOCAB), engine.layout, 2)
    stats = engine.forward_backward(batch, loss)
    return {"pieces": pieces, "loss": stats.values_by_name()["loss"]}


def save_rank(
    layout: Layout, path: Path, root: Path, layouts: dict[str, dict[str, int]]
) -> dict[str, dict[str, Any]]:
    return {name: save(layout, path, root / name, told) for name, told in layouts.items()}


def save(layout: Layout, path: Path, root: Path, settings: dict[str, int]) -> dict[str, Any]:
    engine = make_engine(layout, path, settings)
    engine.load(SafetensorsSource(path), Part.WEIGHTS)
    batch = cut(make_examples(VOCAB), engine.layout, 2)
    for _ in range(2):
        engine.forward_backward(batch, loss)
        engine.optim_step(LR)
    weights, training = list(engine.shards(Part.WEIGHTS)), list(engine.shards(Part.TRAINING))
    model = ModelContents(weights, training, write_assets=lambda directory: None)
    contents = Contents(models={MAIN: model}, state={"steps": engine.steps})
    with Checkpoints(root, layout) as checkpoints:
        checkpoints.save(2, contents)
    return held(engine)


def load_rank(
    layout: Layout, path: Path, roots: list[Path], layouts: dict[str, dict[str, int]]
) -> dict[str, list[dict[str, Any]]]:
    """By layout what each of the checkpoints gives, one after the other into the same engine."""
    return {name: load(layout, path, roots, settings) for name, settings in layouts.items()}


def load(
    layout: Layout, path: Path, roots: list[Path], settings: dict[str, int]
) -> list[dict[str, Any]]:
    engine, found = make_engine(layout, path, settings), []
    for root in roots:
        step = newest(root)
        assert step is not None
        source = CheckpointSource(step, layout)
        for part in Part:
            engine.load(source, part)
        engine.steps = step.state["steps"]
        found.append(held(engine))
        engine.optim_step(LR)
    return found


def together(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    shapes = {name: shape for rank in ranks for name, _, _, shape in rank["pieces"]}
    return whole([[piece[:3] for piece in rank["pieces"]] for rank in ranks], shapes)


@pytest.mark.timeout(600)
def test_every_pair_of_layouts(tmp_path: Path) -> None:
    """With tied embeddings, and layers with experts and without."""
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32, tie_word_embeddings=True)
    saved: dict[str, list[dict[str, Any]]] = {}
    for world, layouts in LAYOUTS.items():
        ranks = run_ranks(save_rank, world, path, tmp_path, layouts, timeout=250)
        saved |= {name: [rank[name] for rank in ranks] for name in layouts}
    roots = [tmp_path / writer for writer in saved]
    for world, layouts in LAYOUTS.items():
        ranks = run_ranks(load_rank, world, path, roots, layouts, timeout=250)
        for reader in layouts:
            for number, writer in enumerate(saved):
                require_same(
                    [rank[reader][number] for rank in ranks], saved[writer], writer, reader
                )


def require_same(
    loaded: list[dict[str, Any]], saved: list[dict[str, Any]], writer: str, reader: str
) -> None:
    found, wanted = together(loaded), together(saved)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{writer} to {reader}: {name}"
    for rank in loaded:
        assert rank["loss"] == pytest.approx(saved[0]["loss"], rel=1e-6)
