"""Every family of the Megatron engine trains as plain transformers does: log-probs, gradients, weights, moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from contracts.engine import make_examples, require_alike, train, train_by_hand
from packaging.version import Version
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.models.transformer_engine import use_stand_ins
from support.ranks.processes import run_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from burnish.config.schema import EngineConfig
from burnish.distributed.layout import Layout
from burnish.engines.factory import require_fitting
from burnish.engines.megatron import VERSION, gated_delta_net
from burnish.engines.megatron.gated_delta_net import SHARES_GATES
from burnish.engines.megatron.latent_attention import LatentAttention
from burnish.errors import UsageError
from burnish.families import FAMILIES
from burnish.models.names import model_shards

TRAINED = sorted(name for name, each in FAMILIES.items() if each.on_megatron)
MIXTURES = [name for name in TRAINED if FAMILIES[name].has_router]
BY_DAY = ("glm4_moe", "olmo2")
SEEDS = {
    "deepseek_v2": 1,
    "ernie4_5_moe": 3,
    "flex_olmo": 1,
    "glm4_moe": 1,
    "glm4_moe_lite": 2,
    "hunyuan_v1_moe": 1,
    "qwen3_5_text": 2,
    "youtu": 2,
}
"""Of random weights. Of others AdamW makes whole steps of gradients that are nearly 0, of which rounding decides."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": 2, "layers": "transformer_engine"},
    "tensor without sequence parallelism": {
        "tensor_parallel": 2,
        "megatron_sequence_parallel": False,
    },
    "pipeline": {"pipeline_parallel": 2},
    "sequence": {"sequence_parallel": 2, "activation_checkpointing": "full"},
    "experts": {"expert_parallel": 2, "activation_checkpointing": "selective"},
}
PER_MICRO = 2
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "seed_oss": {"attention_out_bias": True},
    "olmo2": {"attention_bias": True},
    "glm4_moe": {"use_qk_norm": False, "attention_bias": False},
}
"""What a type may be beside its tiny model."""


def train_rank(
    layout: Layout, cases: Sequence[tuple[Path, Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    use_stand_ins()
    found = []
    for path, settings in cases:
        engine = make_engine(layout, path, kind="megatron", **settings)
        found.append(train(engine, make_examples(VOCAB), PER_MICRO))
        engine.close()
    return found


def count_rank(layout: Layout, path: Path, cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """How often latents become heads while each of these engines trains."""
    found = []
    make_heads = LatentAttention.get_query_key_value_tensors
    for settings in cases:
        patched = mock.patch.object(
            LatentAttention, make_heads.__name__, autospec=True, side_effect=make_heads
        )
        with patched as called:
            engine = make_engine(layout, path, kind="megatron", **settings)
            train(engine, make_examples(VOCAB), PER_MICRO)
            engine.close()
        found.append(called.call_count)
    return found


def canonical(
    model: PreTrainedModel, of_parameters: Mapping[str, Tensor] | None = None, prefix: str = ""
) -> dict[str, Tensor]:
    """The model's weights, or what there is of each, by the names that checkpoints have for them."""
    return {s.spec.name: s.tensor for s in model_shards(model, of_parameters, prefix)}


def wanted_of(path: Path) -> dict[str, Any]:
    """What comes of the same steps by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, each in model.named_parameters():  # ERNIE's chooses experts, so it has no gradient
        each.requires_grad_(not name.endswith("e_score_correction_bias"))
    wanted = train_by_hand(model, make_examples(VOCAB))
    slots: dict[str, Tensor] = {}
    for slot in ("exp_avg", "exp_avg_sq"):
        trained = [name for name, each in model.named_parameters() if each.requires_grad]
        of_slot = {name: wanted["slots"][f"{slot}/{name}"] for name in trained}
        slots |= canonical(model, of_slot, f"{slot}/")
    gradients = canonical(model, wanted["gradients"])
    return {**wanted, "gradients": gradients, "weights": canonical(model), "slots": slots}


def check(
    root: Path,
    cases: Mapping[str, Sequence[Mapping[str, Any]]],
    world: int,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Compare each family, trained with each of its settings, on `world` processes. `changes` are those of its configuration."""
    paths = {
        family: save_tiny(
            root / family, family, torch.float32, seed=SEEDS.get(family, 0), **(changes or {})
        )
        for family in cases
    }
    told = [(paths[family], each) for family, settings in cases.items() for each in settings]
    wanted = {path: wanted_of(path) for path in paths.values()}
    ranks = run_ranks(train_rank, world, told, timeout=300)
    for number, (path, settings) in enumerate(told):
        found = [rank[number] for rank in ranks]
        parts = ("gradients", "slots")
        what = f"{path.name} with {settings}"
        require_alike(found, wanted[path], parts, what)
        require_alike(*_without_key_biases(found, wanted[path]), ("weights",), what)


def _without_key_biases(
    ranks: Sequence[Mapping[str, Any]], wanted: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A bias of keys has next to no gradient where it is not rotated: AdamW makes whole steps of its rounding."""
    kept = {name: w for name, w in wanted["weights"].items() if not name.endswith("k_proj.bias")}
    found = [
        {**rank, "weights": [piece for piece in rank["weights"] if piece[0] in kept]}
        for rank in ranks
    ]
    return found, {**wanted, "weights": kept}


def test_a_family_of_each_kind_trains_like_one_plain_model(tmp_path: Path) -> None:
    check(tmp_path, {family: [{}] for family in BY_DAY}, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("family", TRAINED)
def test_a_family_trains_like_one_plain_model(family: str, tmp_path: Path) -> None:
    check(tmp_path, {family: [{}, {"layers": "transformer_engine"}]}, 1)


@pytest.mark.nightly
def test_latents_are_recomputed(tmp_path: Path) -> None:
    recomputed = {
        "activation_checkpointing": "selective",
        "megatron": {"recompute_modules": ["core_attn", "mla_up_proj"]},
    }
    degrees = ("tensor_parallel", "pipeline_parallel", "sequence_parallel")
    check(tmp_path, {"deepseek_v3": [{**recomputed, degree: 2} for degree in degrees]}, 2)
    path = tmp_path / "deepseek_v3"
    [(plain, again)] = run_ranks(count_rank, 1, path, [{}, recomputed])
    layers, steps, passes = 3, 3, 3  # three micro-batches; one pass more of each says log-probs
    assert plain == layers * passes * (steps + 1)
    assert again == layers * passes * (2 * steps + 1)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_trains_so_on_four_processes(family: str, tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [
        {"tensor_parallel": 4},
        {"tensor_parallel": 2, "sequence_parallel": 2},
        {"tensor_parallel": 2, "expert_tensor_parallel": 1, "expert_parallel": 2},
        {"pipeline_parallel": 2, "expert_parallel": 2},
        {"pipeline_parallel": 2, "sequence_parallel": 2},
    ]
    check(tmp_path, {family: layouts}, 4)


@pytest.mark.nightly
@pytest.mark.parametrize("family", TRAINED)
def test_a_family_trains_so_on_two_processes(family: str, tmp_path: Path) -> None:
    left_out = "tensor without sequence parallelism" if family in MIXTURES else "experts"
    settings = [each for name, each in LAYOUTS.items() if name != left_out]
    check(tmp_path, {family: settings}, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("family", VARIANTS)
def test_a_family_with_other_biases_or_norms_trains_so(family: str, tmp_path: Path) -> None:
    changes = VARIANTS[family]
    check(tmp_path / "1", {family: [{}, {"layers": "transformer_engine"}]}, 1, changes)
    of_tensor = [LAYOUTS["tensor"], LAYOUTS["tensor without sequence parallelism"]]
    settings = of_tensor[:1] if family in MIXTURES else of_tensor
    check(tmp_path / "2", {family: settings}, 2, changes)


@pytest.mark.nightly
@pytest.mark.skipif(VERSION < SHARES_GATES, reason="Megatron-Core does not divide the gates")
def test_gates_are_divided_between_ranks_that_share_a_key_head(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "one", "qwen3_5_text", torch.float32, num_key_value_heads=1)
    told = [(path, {"tensor_parallel": 2})]
    found = [rank[0] for rank in run_ranks(train_rank, 2, told, timeout=300)]
    require_alike(found, wanted_of(path), ("gradients", "slots"), "one key head")


def test_an_older_megatron_core_that_does_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_config = tiny_config("qwen3_5_text", num_key_value_heads=1)
    config = EngineConfig(kind="megatron", tensor_parallel=2)
    monkeypatch.setattr(gated_delta_net, "VERSION", Version("0.16.1"))
    with pytest.raises(UsageError, match="1 key heads"):
        require_fitting(hf_config, config)
    monkeypatch.setattr(gated_delta_net, "VERSION", SHARES_GATES)
    require_fitting(hf_config, config)
