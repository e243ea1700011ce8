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
LAYOUTS = {"1": (1, 1), "fsdp 2": (2, 1), "fsdp 3": (3, 1), "fsdp 4": (4, 1), "hsdp 2x2": (4, 2)}
"""Processes, and copies of the model."""


def make_engine(layout: Layout, path: Path, replicas: int) -> TorchEngine:
    config = EngineConfig(precision="fp32", logprob_chunk=5, replicas=replicas)
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


def save_rank(layout: Layout, path: Path, root: Path, replicas: int) -> dict[str, Any]:
    engine = make_engine(layout, path, replicas)
    engine.load(SafetensorsSource(path), Part.WEIGHTS)
    batch = cut(make_examples(VOCAB), layout, 2)
    for _ in range(2):
        engine.forward_backward(batch, loss)
        engine.optim_step(LR)
    weights, training = (list(engine.shards(part)) for part in Part)
    model = ModelContents(weights, training, write_assets=lambda directory: None)
    contents = Contents(models={MAIN: model}, state={"steps": engine.steps})
    with Checkpoints(root, layout) as checkpoints:
        checkpoints.save(2, contents)
    return held(engine)


def load_rank(layout: Layout, path: Path, roots: list[Path], replicas: int) -> list[dict[str, Any]]:
    """What each of the checkpoints gives, one after the other into the same engine."""
    engine, found = make_engine(layout, path, replicas), []
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


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_every_pair_of_layouts(tmp_path: Path, family: str) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32, tie_word_embeddings=True)
    saved = {
        writer: run_ranks(save_rank, world, path, tmp_path / writer, replicas)
        for writer, (world, replicas) in LAYOUTS.items()
    }
    roots = [tmp_path / writer for writer in LAYOUTS]
    for reader, (world, replicas) in LAYOUTS.items():
        ranks = run_ranks(load_rank, world, path, roots, replicas)
        for number, writer in enumerate(LAYOUTS):
            loaded = [rank[number] for rank in ranks]
            found, wanted = together(loaded), together(saved[writer])
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(found[name], tensor), f"{writer} to {reader}: {name}"
            for rank in loaded:
                assert rank["loss"] == pytest.approx(saved[writer][0]["loss"], rel=1e-6)
