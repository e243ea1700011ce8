"""The Megatron engine trains adapters as PEFT on plain transformers does, and either engine goes on with the other's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import assert_relative
from safetensors.torch import load_file
from support.checkpoints.layout_pairs import require_every_pair
from support.models.adapted_training import (
    off_rank,
    on_ranks,
    published_rank,
    require_like_peft,
    require_trained_as_peft,
    together,
    train_rank,
    trained_by_peft,
)
from support.models.adapters import EXPERTS, plain_adapted
from support.models.engines import OPTIM, make_engine
from support.models.tiny import save_tiny
from support.models.transformer_engine import use_stand_ins
from support.ranks.processes import run_ranks

from burnish.config.schema import LoraConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError

LINEAR = LoraConfig(rank=3, alpha=5.0)
WITH_EXPERTS = LoraConfig(rank=3, alpha=5.0, targets=["q_proj", *EXPERTS])
ONLY_EXPERTS = LoraConfig(rank=8, alpha=5.0, rslora=True, targets=EXPERTS)
LATENT = LoraConfig(
    rank=3,
    alpha=5.0,
    targets=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
)
"""With matrices that are whole on every tensor rank."""
OF_STATES = LoraConfig(
    rank=3, alpha=5.0, targets=["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]
)
"""Of Gated DeltaNet, and of attention."""
OF_ROUTERS = LoraConfig(rank=3, alpha=5.0, targets=["wg", "o_proj"])
"""Of Hunyuan's, which are linear layers."""
SOME = LoraConfig(rank=2, alpha=3.0, targets=["down_proj", "k_proj"])
TP: dict[str, Any] = {"tensor_parallel": 2}
FULL = {"activation_checkpointing": "full"}
DEEPER = {"qwen3": {"num_hidden_layers": 4}}
"""For virtual stages."""
Case = tuple[str, LoraConfig, Mapping[str, Any]]
"""A family, the adapter, the engine's settings."""
CASES: dict[int, list[Case]] = {
    1: [
        ("qwen2", LINEAR, {"layers": "transformer_engine"}),
        ("qwen3_moe", WITH_EXPERTS, {"layers": "transformer_engine"}),
        ("gemma3_text", SOME, {"activation_checkpointing": "selective"}),
        ("glm4", LINEAR, FULL),  # with gate and up in one tensor
        ("qwen3_next", OF_STATES, FULL),
        ("qwen3_5_text", LINEAR, {}),
        ("hunyuan_v1_moe", OF_ROUTERS, FULL),
    ],
    2: [
        ("qwen2", LINEAR, {}),
        ("qwen2", LINEAR, TP),
        ("qwen2", LINEAR, TP | {"megatron_sequence_parallel": False}),
        ("gemma3_text", SOME, TP | {"layers": "transformer_engine"}),
        ("phi3", LINEAR, TP | FULL),  # with q, k and v in one tensor
        ("qwen3", LINEAR, {"pipeline_parallel": 2, **FULL}),
        ("qwen3", LINEAR, {"pipeline_parallel": 2, "virtual_stages": 2}),
        ("qwen3", LINEAR, {"sequence_parallel": 2}),
        ("deepseek_v3", LATENT, TP | FULL),
        ("deepseek_v3", LATENT, {"sequence_parallel": 2}),
        ("qwen3_next", OF_STATES, TP),
        ("qwen2_moe", LINEAR, TP | FULL),  # with the gate of the shared expert
        ("qwen3_next", OF_STATES, {"sequence_parallel": 2}),
        ("qwen3_5_text", LINEAR, {"sequence_parallel": 2}),  # with four input projections
        ("qwen3_5_text", LINEAR, TP),
        ("hunyuan_v1_moe", OF_ROUTERS, TP),
        ("hunyuan_v1_moe", OF_ROUTERS, {"expert_parallel": 2}),
        ("qwen3_moe", WITH_EXPERTS, {"expert_parallel": 2}),
        ("qwen3_moe", WITH_EXPERTS, TP),
        ("qwen3_moe", WITH_EXPERTS, TP | {"expert_tensor_parallel": 1}),
        ("mixtral", ONLY_EXPERTS, {"expert_tensor_parallel": 2, **FULL}),
    ],
    4: [
        ("llama", LINEAR, {"tensor_parallel": 4}),  # twice as many as there are key heads
        ("qwen3_moe", WITH_EXPERTS, TP | {"expert_parallel": 2}),
        ("qwen3_moe", WITH_EXPERTS, {"expert_parallel": 2, "pipeline_parallel": 2}),
    ],
}


def test_it_trains_as_peft_on_plain_transformers_does(tmp_path: Path) -> None:
    """Experts and a layer that holds q alone of q, k and v, computed again in the backward pass."""
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32)
    require_trained_as_peft(path, WITH_EXPERTS, 1, 3, {"kind": "megatron", **FULL})


def train_ranks(
    layout: Layout, cases: Sequence[tuple[Path, LoraConfig, dict[str, Any]]]
) -> list[dict[str, Any]]:
    use_stand_ins()
    found = []
    for path, lora, settings in cases:
        found.append(train_rank(layout, path, lora, 3 if layout.world < 4 else 1, settings))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("world", CASES)
def test_it_trains_so_at_every_layout(tmp_path: Path, world: int) -> None:
    paths = {
        family: save_tiny(tmp_path / family, family, torch.float32, **DEEPER.get(family, {}))
        for family, _, _ in CASES[world]
    }
    told = [
        (paths[family], lora, {"kind": "megatron", **settings})
        for family, lora, settings in CASES[world]
    ]
    ranks = run_ranks(train_ranks, world, told, timeout=300)
    for number, (path, lora, settings) in enumerate(told):
        found = [rank[number] for rank in ranks]
        require_like_peft(found, trained_by_peft(path, lora), f"{path.name} with {settings}")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "lora", "settings"),
    [("qwen3", LINEAR, {"pipeline_parallel": 2}), ("qwen3_moe", WITH_EXPERTS, TP)],
)
def test_off_it_is_the_model_it_was_made_for(
    tmp_path: Path, family: str, lora: LoraConfig, settings: dict[str, Any]
) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    for rank in run_ranks(off_ranks, 2, path, lora, settings):
        assert rank["same"]
        assert rank["differ"]
        assert rank["norm"] > 0


def off_ranks(
    layout: Layout, path: Path, lora: LoraConfig, settings: Mapping[str, Any]
) -> dict[str, Any]:
    return off_rank(layout, path, lora, kind="megatron", **settings)


@pytest.mark.nightly
@pytest.mark.parametrize("optim", [OPTIM, None])
@pytest.mark.parametrize(
    ("world", "settings"),
    [(2, TP), (2, {"pipeline_parallel": 2}), (2, {"expert_parallel": 2}), (4, TP)],
)
def test_what_is_published_is_pefts_merged_model(
    tmp_path: Path, world: int, settings: dict[str, Any], optim: OptimConfig | None
) -> None:
    require_published(tmp_path, ("qwen3_moe", WITH_EXPERTS, settings), world, optim)


@pytest.mark.nightly
def test_an_adapter_of_routers_is_published(tmp_path: Path) -> None:
    require_published(tmp_path, ("hunyuan_v1_moe", OF_ROUTERS, TP), 2, OPTIM)


def require_published(root: Path, case: Case, world: int, optim: OptimConfig | None) -> None:
    family, lora, settings = case
    path = save_tiny(root / "m", family, torch.float32)
    plain_adapted(path, lora).merge_and_unload().save_pretrained(root / "merged")
    state = load_file(root / "merged/model.safetensors")
    told = {"kind": "megatron", **settings}
    found = together(run_ranks(published_rank, world, path, lora, optim, told), "pieces")
    assert found.keys() == state.keys()
    for name, weight in state.items():
        assert_relative(found[name], weight, 2e-7, name)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_layout_of_either_engine_loads_what_others_saved(
    tmp_path: Path, precision: str
) -> None:
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32, num_hidden_layers=4)
    megatron: dict[str, dict[str, Any]] = {
        "tp 2": TP,
        "pp 2": {"pipeline_parallel": 2},
        "ep 2": {"expert_parallel": 2},
    }
    common = {"lora": WITH_EXPERTS, "precision": precision}
    layouts = {
        1: {"torch 1": common, "megatron 1": {"kind": "megatron", **common}},
        2: {"torch fsdp 2": common}
        | {name: {"kind": "megatron", **common, **told} for name, told in megatron.items()},
    }
    relative = 1e-6 if precision == "fp32" else 1e-2
    require_every_pair(path, tmp_path, layouts, relative=relative)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen3", LoraConfig(rank=2, alpha=3.0, dora=True)),
        ("qwen3", LoraConfig(rank=2, alpha=3.0, modules_to_save=["lm_head"])),
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, family: str, lora: LoraConfig) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    (said,) = on_ranks(refused_rank, 1, path, lora)
    assert "engine.kind=torch" in said


def refused_rank(layout: Layout, path: Path, lora: LoraConfig) -> str:
    with pytest.raises(IncompatibleError) as raised:
        make_engine(layout, path, lora=lora, kind="megatron")
    return str(raised.value)
