"""Saved at one layout of the torch engine, loaded at any other: every weight and slot bit-equal, the next loss the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints.layout_pairs import require_every_pair
from support.models.tiny import save_tiny

from burnish.checkpoint.steps import newest
from burnish.config.schema import LoraConfig, OptimConfig

LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    1: {"1": {}},
    2: {
        "fsdp 2": {},
        "tp 2": {"tensor_parallel": 2},
        "sp 2": {"sequence_parallel": 2},
        "ep 2": {"expert_parallel": 2},
    },
    3: {"fsdp 3": {}},
    4: {
        "fsdp 4": {},
        "hsdp 2x2": {"replicas": 2},
        "fsdp 2 x tp 2": {"tensor_parallel": 2},
        "fsdp 2 x sp 2": {"sequence_parallel": 2},
        "hsdp 2 x tp 2": {"replicas": 2, "tensor_parallel": 2},
        "fsdp 2 x ep 2": {"expert_parallel": 2},
        "ep 2 x tp 2": {"expert_parallel": 2, "tensor_parallel": 2},
    },
}
"""By processes: what the engine is told."""
SOME = {1: {"1": {}}, 2: {name: LAYOUTS[2][name] for name in ("fsdp 2", "tp 2")}}
OF_EXPERTS = {1: {"1": {}}, 2: {name: LAYOUTS[2][name] for name in ("fsdp 2", "tp 2", "ep 2")}}


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """With tied embeddings, and layers with experts and without."""
    return save_tiny(tmp_path / "m", "qwen3_moe", torch.float32, tie_word_embeddings=True)


@pytest.mark.nightly
def test_layouts_are_saved_and_loaded(mixture: Path, tmp_path: Path) -> None:
    """Those of one process and of two, each by another one."""
    few = {world: LAYOUTS[world] for world in (1, 2)}
    require_every_pair(mixture, tmp_path, few, each=[2])


@pytest.mark.nightly
def test_every_layout_is_saved_and_loaded(mixture: Path, tmp_path: Path) -> None:
    require_every_pair(mixture, tmp_path, LAYOUTS, each=[1, 3, 5, 7])


@pytest.mark.contract
@pytest.mark.timeout(3600)
def test_every_pair_of_layouts(mixture: Path, tmp_path: Path) -> None:
    require_every_pair(mixture, tmp_path, LAYOUTS)


@pytest.mark.nightly
def test_the_state_of_muon_through_pairs_of_layouts(tmp_path: Path) -> None:
    shapes = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128}
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32, num_hidden_layers=1, **shapes)
    require_every_pair(path, tmp_path, SOME, optim=OptimConfig(kind="muon"))
    step = newest(tmp_path / "tp 2")
    assert step is not None
    assert "training/momentum_buffer.safetensors" in step.manifest.files


@pytest.mark.nightly
def test_adapters_and_moments_in_bf16_through_pairs_of_layouts(tmp_path: Path) -> None:
    """On experts and layers of both cuts; a rank of 3 divides by no number of processes."""
    targets = ["q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"]
    adapted = {"lora": LoraConfig(rank=3, targets=targets)}
    layouts = {
        world: {name: settings | adapted for name, settings in of_world.items()}
        for world, of_world in OF_EXPERTS.items()
    }
    path = save_tiny(tmp_path / "m", "mixtral", torch.float32)
    require_every_pair(path, tmp_path, layouts, optim=OptimConfig(moments="bf16"))
