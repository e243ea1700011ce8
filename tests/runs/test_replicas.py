"""Copies of the weights that differ end the run, with the rank and the tensor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.ranks.processes import RankFailed, run_processes, torchrun_environ
from support.runs.training_files import SFT, make_files
from torch.distributed import TCPStore

from burnish.api import run_method
from burnish.config.schema import RunConfig
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import UsageError
from burnish.methods.table import METHODS
from burnish.models.names import model_shards

TENSOR = "model.layers.1.mlp.up_proj.weight"


def _config(root: Path) -> RunConfig:
    return RunConfig.model_validate(
        SFT
        | {
            "output_dir": str(root / "runs"),
            "steps": 3,
            "model": SFT["model"] | {"tokenizer": str(root / "tokenizer")},
            "data": {"train": [str(root / "train.jsonl")]},
            "engine": {"precision": "fp32", "replicas": 3},
            "batch": {"examples": 6, "tokens_per_device": 64},
            "evaluation": {},
            "distributed": {"check_replicas_every": 2},
        }
    )


def _flips_a_bit(root: Path, rank: int, step: int) -> None:
    """A run of this rank; `rank` has a bit flipped in the update of `step`, which is none of the check before a run."""

    class Faulty(TorchEngine):
        def optim_step(self, lr: float):
            stats = super().optim_step(lr)
            if int(os.environ["RANK"]) == rank and self.steps == step:
                shard = next(s for s in model_shards(self._scorer.model) if s.spec.name == TENSOR)
                shard.tensor.view(torch.int32).view(-1)[0] ^= 1 << 20
            return stats

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("burnish.engines.torch.torch_engine.TorchEngine", Faulty)
        run_method(METHODS["sft"], _config(root))


@pytest.mark.parametrize(
    ("rank", "step", "found"), [pytest.param(1, 2, 2, marks=pytest.mark.nightly), (2, 3, 3)]
)
def test_the_rank_and_the_tensor_are_named(tmp_path, rank, step, found):
    root = make_files(tmp_path)
    store = TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
    environs = [torchrun_environ(number, 3, store.port) for number in range(3)]
    with pytest.raises(RankFailed) as raised:
        run_processes(_flips_a_bit, environs, root, rank, step)
    assert len(raised.value.failures) == 3
    for said in raised.value.failures.values():
        assert f"step {found}: copies of the weights differ" in said
        assert f"have: rank {rank}: {TENSOR} of the" in said
    assert not list((root / "runs").glob("*/checkpoints/step-*"))


def test_without_replicas_it_is_refused(tmp_path):
    config = _config(tmp_path)
    alone = config.model_copy(update={"engine": config.engine.model_copy(update={"replicas": 1})})
    with pytest.raises(UsageError, match=r"distributed\.check_replicas_every.*engine\.replicas"):
        METHODS["sft"].check(alone)
