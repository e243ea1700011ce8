from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from tiny import FAMILIES, save_tiny, tiny_config
from tokenizers_for_tests import char_tokenizer
from torch.distributed.fsdp import FSDPModule
from training_files import RL, SFT, burnish, done, make_files

from burnish.config.schema import EngineConfig, RunConfig
from burnish.engines.base import LossFn
from burnish.engines.fitting import require_fitting
from burnish.engines.torch_engine import TorchEngine
from burnish.errors import BurnishError
from burnish.models.shrinking import shrunk
from burnish.parallel.layout import Layout
from burnish.records import Batch
from burnish.tracking.metrics import Stats
from burnish.trainers.check import (
    compared,
    critic_material,
    fill,
    material,
    require_equal,
    without_adapter,
)

CPU = torch.device("cpu")


class WithoutSync(TorchEngine):
    """Gradients stay on the rank that computed them."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        with pytest.MonkeyPatch.context() as patch:
            keep = FSDPModule.set_requires_gradient_sync
            patch.setattr(
                FSDPModule, "set_requires_gradient_sync", lambda module, _: keep(module, False)
            )
            return super().forward_backward(batch, loss)


class Averaging(TorchEngine):
    """Gradients are averaged over ranks, though the loss is divided by global counts already."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        stats = super().forward_backward(batch, loss)
        for gradient in self._trained().gradients().values():
            gradient /= self.layout.world
        return stats


class ScaledLoss(TorchEngine):
    """The loss is divided by the number of ranks."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        def scaled(outputs: Any, micro: Any) -> Any:
            value, stats = loss(outputs, micro)
            return value / self.layout.world, stats

        return super().forward_backward(batch, scaled)


class OffByOne(TorchEngine):
    """Trains on the tokens behind those that are meant."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        moved = [replace(m, loss_mask=m.loss_mask.roll(1)) for m in batch.microbatches]
        return super().forward_backward(replace(batch, microbatches=tuple(moved)), loss)


ENGINES = {
    engine.__name__: engine
    for engine in (TorchEngine, WithoutSync, Averaging, ScaledLoss, OffByOne)
}


def config_of(root: Path, settings: dict[str, Any], **changes: Any) -> RunConfig:
    data = {"train": [str(root / "train.jsonl")]}
    model = {"tokenizer": str(root / "tokenizer"), "fresh": settings["model"]["fresh"]}
    reward = {"functions": [{"function": "exact_match"}]} if "reward" in settings else {}
    return RunConfig.model_validate(
        settings | {"data": data, "model": model, "reward": reward} | changes
    )


def check_rank(layout: Layout, config: RunConfig, kind: str) -> tuple[str, list[str], float]:
    """The refusal, if any; what was compared; the largest difference."""
    examples, loss, hf_config = material(config)
    lora = config.model.adapter
    engine = ENGINES[kind](
        hf_config, config.engine, config.optim, layout=layout, device=CPU, lora=lora
    )
    fill(engine, config, hf_config)
    differences = compared(engine, config, examples, loss, hf_config)
    refusal = ""
    try:
        require_equal(differences, layout)
    except BurnishError as error:
        refusal = str(error)
    return refusal, [d.what for d in differences], max(d.error for d in differences)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("check"))


@pytest.mark.parametrize("settings", [SFT, RL], ids=["sft", "rl"])
@pytest.mark.parametrize("world", [1, 3])
def test_right_layouts_pass(root: Path, settings: dict[str, Any], world: int) -> None:
    ranks = run_ranks(check_rank, world, config_of(root, settings), "TorchEngine")
    assert all(rank == ranks[0] for rank in ranks)
    refusal, compared_things, worst = ranks[0]
    assert refusal == ""
    assert 0 < worst < 1e-5
    kinds = [what.split(" ")[0] for what in compared_things]
    assert kinds == sorted(kinds, key=["log-probs", "loss", "gradient", "weight"].index)
    assert set(kinds) == {"log-probs", "loss", "gradient", "weight"}


@pytest.mark.parametrize("shared", ["sequence_parallel", "tensor_parallel"])
def test_layouts_that_share_a_micro_batch_pass(root: Path, shared: str) -> None:
    config = config_of(root, RL, engine={"precision": "fp32", shared: 2})
    for refusal, _, worst in run_ranks(check_rank, 2, config, "TorchEngine"):
        assert (refusal, worst < 1e-5) == ("", True)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_passes(root: Path, family: str) -> None:
    fresh = {**tiny_config(family).to_diff_dict(), "vocab_size": len(char_tokenizer())}
    config = config_of(root, SFT)
    config = config.model_copy(update={"model": config.model.model_copy(update={"fresh": fresh})})
    refusal, _, worst = run_ranks(check_rank, 1, config, "TorchEngine")[0]
    assert (refusal, worst < 1e-5) == ("", True)


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("WithoutSync", "gradient norm"),
        ("Averaging", "gradient norm"),
        ("ScaledLoss", "loss"),
        ("OffByOne", "loss"),
    ],
)
def test_planted_faults_are_found_and_named(root: Path, fault: str, first: str) -> None:
    config = config_of(root, SFT)
    for refusal, _, _ in run_ranks(check_rank, 2, config, fault):
        assert f"2 processes do not compute what one plain process does: {first} differs" in refusal


@pytest.mark.parametrize(("fault", "first"), [("TorchEngine", ""), ("Averaging", "gradient norm")])
def test_an_adapter_is_compared(root: Path, tmp_path: Path, fault: str, first: str) -> None:
    save_tiny(tmp_path / "base", "qwen3", vocab_size=len(char_tokenizer()))
    model = {
        "path": str(tmp_path / "base"),
        "tokenizer": str(root / "tokenizer"),
        "lora": {"rank": 3},
    }
    config = config_of(root, RL, model=model)
    for refusal, compared_things, _ in run_ranks(check_rank, 2, config, fault):
        assert (first in refusal) if first else refusal == ""
        gradients = {each for each in compared_things if each.startswith("gradient of")}
        assert len(gradients) == 2 * 2 * 7
        assert all("base_model.model." in each for each in gradients)


def check_critic_rank(layout: Layout, config: RunConfig, kind: str) -> tuple[str, list[str]]:
    """The refusal, if any; what was compared."""
    config = without_adapter(config)
    examples, loss, hf_config = critic_material(config)
    engine = ENGINES[kind](hf_config, config.engine, config.optim, layout=layout, device=CPU)
    fill(engine, config, hf_config)
    differences = compared(engine, config, examples, loss, hf_config)
    refusal = ""
    try:
        require_equal(differences, layout)
    except BurnishError as error:
        refusal = str(error)
    return refusal, [d.what for d in differences]


@pytest.mark.parametrize(
    ("layout", "fault", "first"),
    [
        ({}, "TorchEngine", ""),
        ({}, "OffByOne", "loss"),
        ({"sequence_parallel": 2}, "TorchEngine", ""),
        ({"tensor_parallel": 2}, "TorchEngine", ""),
        ({"activation_checkpointing": "full", "replicas": 2}, "TorchEngine", ""),
    ],
    ids=str,
)
def test_a_critic_is_compared(root: Path, layout: dict[str, Any], fault: str, first: str) -> None:
    engine = RL["engine"] | layout
    config = config_of(root, RL, algorithm={"advantage": "gae"}, engine=engine)
    for refusal, compared_things in run_ranks(check_critic_rank, 2, config, fault):
        assert (f"{first} differs" in refusal) if first else refusal == ""
        assert {"gradient of score.weight", "weight score.bias"} <= set(compared_things)
        assert sum(each.startswith("values of sequence") for each in compared_things) == 12


def test_a_shrunken_model_keeps_its_kind() -> None:
    config = tiny_config(
        "gemma3_text",
        num_hidden_layers=6,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        sliding_window=1024,
    )
    small = shrunk(config)
    assert (config.hidden_size, config.num_hidden_layers) == (4096, 6)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert (small.num_attention_heads, small.num_key_value_heads) == (8, 2)
    assert (small.hidden_size, small.head_dim, small.sliding_window) == (128, 16, 16)
    assert small.tie_word_embeddings
    assert small.vocab_size == config.vocab_size


@pytest.mark.parametrize(
    ("tensor", "sequence", "heads", "key_heads"), [(1, 1, 8, 2), (4, 1, 16, 4), (2, 8, 16, 4)]
)
def test_a_shrunken_model_can_be_shared(
    tensor: int, sequence: int, heads: int, key_heads: int
) -> None:
    config = tiny_config("qwen3", num_attention_heads=32, num_key_value_heads=8)
    small = shrunk(config, tensor, sequence)
    assert (small.num_attention_heads, small.num_key_value_heads) == (heads, key_heads)
    require_fitting(small, EngineConfig(tensor_parallel=tensor, sequence_parallel=sequence))


def test_as_a_command(root: Path) -> None:
    done(root, "check", "sft.yaml", world=2)
    code, output = burnish(root, "check", "rl.yaml", "--processes", "2", "engine.replicas=2")
    assert code == 0, output
    assert "2 processes compute what one plain process does" in output
    code, output = burnish(root, "check", "sft.yaml", "--processes", "3", "engine.replicas=2")
    assert code == 2
    assert "engine.replicas: 2, 3 processes" in output
    code, output = burnish(root, "check", "sft.yaml", "--processes", "0")
    assert code == 2
    assert "--processes is not a number of processes" in output
