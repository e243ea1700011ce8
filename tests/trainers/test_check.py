from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from tiny import FAMILIES, save_tiny, tiny_config
from tokenizers_for_tests import char_tokenizer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from training_files import RL, SFT, burnish, done, make_files

from burnish.config.schema import CriticConfig, EngineConfig, RunConfig
from burnish.engines.base import Engine, LossFn, trained
from burnish.engines.fitting import require_fitting
from burnish.engines.making import make_engine
from burnish.engines.megatron import optimizer
from burnish.engines.megatron.engine import MegatronEngine
from burnish.engines.megatron.fitting import require_fitting as require_megatron_fitting
from burnish.engines.torch_engine import TorchEngine
from burnish.errors import BurnishError
from burnish.models import routing
from burnish.models.shrinking import shrunk
from burnish.parallel.layout import Layout
from burnish.records import Batch
from burnish.tracking.metrics import Stats
from burnish.trainers.check import (
    compared,
    critic_config,
    critic_material,
    fill,
    material,
    require_equal,
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
        for gradient in trained(self._optimizer).gradients().values():
            gradient /= self.layout.world
        return stats


def divided(loss: LossFn, ranks: int) -> LossFn:
    """A loss that every rank divides, as if gradients were added up where they are averaged."""

    def scaled(outputs: Any, micro: Any) -> Any:
        value, stats = loss(outputs, micro)
        return value / ranks, stats

    return scaled


class ScaledLoss(TorchEngine):
    """The loss is divided by the number of ranks."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        return super().forward_backward(batch, divided(loss, self.layout.world))


class MegatronScaledLoss(MegatronEngine):
    """The loss is divided by the number of ranks."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        return super().forward_backward(batch, divided(loss, self.layout.world))


class MegatronWithoutSync(MegatronEngine):
    """Each rank steps its part of the weights by the gradients that it computed alone, those of norms between tensor ranks and of tied embeddings between stages among them."""

    def optim_step(self, lr: float) -> Stats:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer, "finalize_model_grads", lambda *args, **options: None)
            return super().optim_step(lr)


def moved(batch: Batch) -> Batch:
    """With the masks of the tokens behind those that are meant."""
    micros = [replace(m, loss_mask=m.loss_mask.roll(1)) for m in batch.microbatches]
    return replace(batch, microbatches=tuple(micros))


class OffByOne(TorchEngine):
    """Trains on the tokens behind those that are meant."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        return super().forward_backward(moved(batch), loss)


class MegatronOffByOne(MegatronEngine):
    """Trains on the tokens behind those that are meant."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        return super().forward_backward(moved(batch), loss)


class WrongBalance(TorchEngine):
    """The load-balancing loss of experts is that of one rank's share of the tokens, times the ranks."""

    def _evened(self, batch: Batch) -> tuple[Batch, Tensor | None, Stats]:
        evened, factors, stats = super()._evened(batch)
        assert factors is not None
        return evened, factors * self.layout.world, stats


class WrongBalanceGradient(TorchEngine):
    """The loss of experts is right, and its gradient as many times too large as there are ranks."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        with pytest.MonkeyPatch.context() as patch:
            right = routing._WithLoss.backward

            def wrong(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
                values, of_loss = right(ctx, *gradients)
                return values, of_loss * self.layout.world

            patch.setattr(routing._WithLoss, "backward", staticmethod(wrong))
            return super().forward_backward(batch, loss)


ENGINES = {
    engine.__name__: engine
    for engine in (
        TorchEngine,
        WithoutSync,
        Averaging,
        ScaledLoss,
        OffByOne,
        WrongBalance,
        WrongBalanceGradient,
        MegatronScaledLoss,
        MegatronWithoutSync,
        MegatronOffByOne,
    )
}


def made(kind: str, hf_config: Any, config: RunConfig, layout: Layout) -> Engine:
    """An engine with a fault, or the one that the configuration names."""
    lora = config.model.adapter
    if kind == "right":
        return make_engine(
            hf_config, config.engine, config.optim, layout=layout, device=CPU, lora=lora
        )
    options = {} if issubclass(ENGINES[kind], MegatronEngine) else {"lora": lora}
    return ENGINES[kind](
        hf_config, config.engine, config.optim, layout=layout, device=CPU, **options
    )


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
    engine = made(kind, hf_config, config, layout)
    fill(engine, config, hf_config)
    differences = compared(engine, config, examples, loss, hf_config)
    engine.close()
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


MEGATRON = [
    ("qwen3", RL, {"tensor_parallel": 2}),
    ("llama", SFT, {"pipeline_parallel": 2, "virtual_stages": 2}),
    ("qwen3_moe", RL, {"expert_parallel": 2}),
]


@pytest.mark.parametrize(("family", "settings", "degrees"), MEGATRON, ids=str)
def test_layouts_of_the_megatron_engine_pass(
    root: Path, family: str, settings: dict[str, Any], degrees: dict[str, int]
) -> None:
    fresh = {**tiny_config(family, num_hidden_layers=4).to_diff_dict()}
    fresh["vocab_size"] = len(char_tokenizer())
    engine = {"kind": "megatron", "precision": "fp32"} | degrees
    config = config_of(root, settings, engine=engine)
    config = config.model_copy(update={"model": config.model.model_copy(update={"fresh": fresh})})
    for refusal, compared_things, worst in run_ranks(check_rank, 2, config, "right"):
        assert (refusal, worst < 1e-5) == ("", True)
        kinds = {what.split(" ")[0] for what in compared_things}
        assert kinds == {"log-probs", "loss", "gradient", "weight"}


MEGATRON_FAULTS = {
    "MegatronWithoutSync": "gradient norm",
    "MegatronScaledLoss": "loss",
    "MegatronOffByOne": "loss",
}
"""And what differs first."""
MEGATRON_DEGREES = (
    {},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"sequence_parallel": 2},
    {"expert_parallel": 2},
)


def faulty_rank(layout: Layout, configs: Sequence[RunConfig]) -> list[dict[str, str]]:
    """By configuration and fault the refusal."""
    return [
        {fault: check_rank(layout, config, fault)[0] for fault in MEGATRON_FAULTS}
        for config in configs
    ]


def test_faults_of_the_megatron_engine_are_found_and_named_at_every_layout(root: Path) -> None:
    configs = []
    for degrees in MEGATRON_DEGREES:
        family = "qwen3_moe" if "expert_parallel" in degrees else "qwen3"
        fresh = {**tiny_config(family).to_diff_dict(), "vocab_size": len(char_tokenizer())}
        engine = {"kind": "megatron", "precision": "fp32"} | degrees
        config = config_of(root, SFT, engine=engine)
        model = config.model.model_copy(update={"fresh": fresh})
        configs.append(config.model_copy(update={"model": model}))
    for rank in run_ranks(faulty_rank, 2, configs):
        for degrees, refusals in zip(MEGATRON_DEGREES, rank, strict=True):
            for fault, first in MEGATRON_FAULTS.items():
                said = f"2 processes do not compute what one plain process does: {first} differs"
                assert said in refusals[fault], (degrees, fault)


def evened(root: Path, family: str, settings: dict[str, Any], **engine: Any) -> RunConfig:
    """A configuration of a mixture with a load-balancing loss."""
    fresh = {**tiny_config(family).to_diff_dict(), "vocab_size": len(char_tokenizer())}
    engine = settings["engine"] | {"precision": "fp32", "router_aux_loss": 0.01} | engine
    config = config_of(root, settings, engine=engine)
    return config.model_copy(update={"model": config.model.model_copy(update={"fresh": fresh})})


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"sequence_parallel": 2, "activation_checkpointing": "full"}),
        ("qwen3_moe", {"tensor_parallel": 2}),
        ("qwen3_moe", {"kind": "megatron", "expert_parallel": 2}),
    ],
    ids=str,
)
def test_the_balance_of_experts_is_compared(
    root: Path, family: str, layout: dict[str, Any]
) -> None:
    config = evened(root, family, RL, **layout)
    for refusal, compared_things, _ in run_ranks(check_rank, 2, config, "right"):
        assert refusal == ""
        assert compared_things[12:15] == ["load-balancing loss", "loss", "gradient norm"]


@pytest.mark.parametrize(
    ("fault", "first"),
    [("WrongBalance", "load-balancing loss"), ("WrongBalanceGradient", "gradient norm")],
)
def test_a_wrong_balance_is_found_and_named(root: Path, fault: str, first: str) -> None:
    for refusal, _, _ in run_ranks(check_rank, 2, evened(root, "mixtral", SFT), fault):
        assert f"does: {first} differs" in refusal


def check_critic_rank(layout: Layout, config: RunConfig, kind: str) -> tuple[str, list[str]]:
    """The refusal, if any; what was compared."""
    examples, loss, hf_config = critic_material(config)
    config = critic_config(config, hf_config)
    engine = made(kind, hf_config, config, layout)
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
        ({"kind": "megatron", "pipeline_parallel": 2}, "right", ""),
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


@pytest.mark.parametrize(("dense", "counts"), [(True, 0), (False, 1)])
def test_the_experts_of_a_critic_are_evened_out_where_it_has_some(
    root: Path, tmp_path: Path, dense: bool, counts: int
) -> None:
    path = save_tiny(tmp_path / "dense", "qwen3", vocab_size=len(char_tokenizer()))
    critic = {"path": str(path)} if dense else {}
    config = evened(root, "mixtral", RL).model_copy(
        update={"critic": CriticConfig.model_validate(critic)}
    )
    for refusal, compared_things in run_ranks(check_critic_rank, 2, config, "TorchEngine"):
        assert (refusal, compared_things.count("load-balancing loss")) == ("", counts)


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
    ("fields", "left"),
    [
        ({"mlp_only_layers": [0, 1, 2], "num_hidden_layers": 6}, [1]),
        ({"mlp_only_layers": [], "decoder_sparse_step": 3, "num_hidden_layers": 6}, [1]),
        ({"mlp_only_layers": [], "num_hidden_layers": 6}, [0, 1]),
        ({"mlp_only_layers": [0, 1, 2]}, []),
    ],
    ids=str,
)
def test_a_shrunken_mixture_keeps_its_kinds_of_layers(
    fields: dict[str, Any], left: list[int]
) -> None:
    assert routing.layers_with_experts(shrunk(tiny_config("qwen3_moe", **fields))) == left


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


@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        ("qwen3", {"pipeline_parallel": 3, "virtual_stages": 2}),
        ("llama", {"tensor_parallel": 3, "pipeline_parallel": 2}),
        ("qwen3_moe", {"expert_parallel": 6, "expert_tensor_parallel": 3}),
    ],
    ids=str,
)
def test_a_shrunken_model_can_be_cut_as_the_whole_one(
    root: Path, family: str, degrees: dict[str, int]
) -> None:
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 6}
    sizes |= {"hidden_size": 96}
    sizes |= {"num_experts": 12, "moe_intermediate_size": 96} if "moe" in family else {}
    whole = tiny_config(family, intermediate_size=384, **sizes)
    config = config_of(root, SFT, engine={"kind": "megatron"} | degrees)
    fresh = {**whole.to_diff_dict(), "vocab_size": len(char_tokenizer())}
    config = config.model_copy(update={"model": config.model.model_copy(update={"fresh": fresh})})
    require_megatron_fitting(material(config)[-1], config.engine)


def test_a_shrunken_model_has_no_more_key_heads_than_the_whole_one() -> None:
    """Where tensor ranks share them, they do in the small one."""
    config = tiny_config("qwen3", num_attention_heads=16, num_key_value_heads=2)
    small = shrunk(config, tensor=4)
    assert (small.num_attention_heads, small.num_key_value_heads) == (16, 2)
    require_megatron_fitting(small, EngineConfig(kind="megatron", tensor_parallel=4))


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
