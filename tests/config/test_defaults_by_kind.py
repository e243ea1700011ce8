"""What `auto` stands for depends on the method, the adapter and its rank."""

from __future__ import annotations

import math

import pytest

from burnish.config.load import load_settings, read_config
from burnish.config.schema import LoraConfig
from burnish.method import Method
from burnish.methods.sft import SFT
from burnish.methods.table import METHODS
from burnish.models.lora.adapter_config import peft_config


class _Own(SFT):
    name = "own"
    title = "own training"
    lr = 3e-7
    lora_lr = 5e-6


ADAPTER = "model.lora.rank=8"


@pytest.mark.parametrize(
    ("method", "overrides", "lr"),
    [
        (METHODS["sft"], [], 1e-5),
        (METHODS["sft"], [ADAPTER], 2e-4),
        (METHODS["sft"], ["model.lora.path=adapter"], 2e-4),
        (METHODS["rl"], [], 1e-6),
        (METHODS["rl"], [ADAPTER], 1e-5),
        (_Own(), [], 3e-7),
        (_Own(), [ADAPTER], 5e-6),
        (METHODS["sft"], [ADAPTER, "optim.lr=0.5"], 0.5),
        (METHODS["rl"], ["optim.lr=0"], 0.0),
        (METHODS["rl"], ["optim.lr=auto"], 1e-6),
    ],
)
def test_a_learning_rate(method: Method, overrides: list[str], lr: float) -> None:
    config = method.with_defaults(read_config(None, overrides))
    assert config.optim.lr == config.optim.peak_lr == lr
    assert method.with_defaults(config) == config


@pytest.mark.parametrize("rank", [1, 16, 64])
def test_a_higher_rank_alone_changes_no_scale(rank: int) -> None:
    """By PEFT's alpha / r; rsLoRA's alpha / √r depends on the rank."""
    config = METHODS["sft"].with_defaults(read_config(None, [f"model.lora.rank={rank}"]))
    assert config.model.lora.alpha == LoraConfig(rank=rank).scale_alpha == 2 * rank
    peft = peft_config(LoraConfig(rank=rank), ["q_proj"])
    assert peft.lora_alpha / peft.r == 2
    stable = peft_config(LoraConfig(rank=rank, rslora=True), ["q_proj"])
    assert stable.lora_alpha / math.sqrt(stable.r) == pytest.approx(32 / math.sqrt(rank))
    assert peft_config(LoraConfig(rank=rank, alpha=3), ["q_proj"]).lora_alpha == 3


def test_an_alpha_that_an_earlier_version_recorded_without_an_adapter_is_none() -> None:
    recorded = read_config(None, ["model.path=m", "model.lora.alpha=32", "data.train=[t]"])
    METHODS["sft"].check(recorded)
    continued = read_config(recorded, ["model.lora.path=adapter"])
    METHODS["sft"].check(continued)
    assert read_config(None, ["model.lora={rank: 4, alpha: 32}"]).model.lora.scale_alpha == 32


def test_a_loss_of_pairs_may_be_named_alone() -> None:
    for name in ("dpo", "online-dpo"):
        for loss in ("ipo", {"ipo": 1.0}):
            config = load_settings(None, {"method": {"loss": loss}})
            assert METHODS[name].settings(config).loss == {"ipo": 1.0}
