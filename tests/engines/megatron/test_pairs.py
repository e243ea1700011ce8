"""Saved at one layout of either engine, loaded at any other: every weight and slot bit-equal, the next loss the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.layout_pairs import Layouts, require_every_pair
from support.models.tiny import save_tiny

from burnish.checkpoint.steps import newest
from burnish.config.schema import OptimConfig

EVEN, UNEVEN = 4, 5
"""Layers, which two stages share evenly or do not."""
PLAIN_TP: dict[str, Any] = {"tensor_parallel": 2, "megatron_sequence_parallel": False}
TORCH: dict[int, dict[str, dict[str, Any]]] = {
    1: {"torch 1": {}},
    2: {"torch fsdp 2": {}, "torch tp 2": {"tensor_parallel": 2}},
    4: {"torch fsdp 4": {}, "torch hsdp 2x2": {"replicas": 2}},
}
MEGATRON: dict[int, dict[str, dict[str, Any]]] = {
    1: {"1": {}},
    2: {
        "dp 2": {},
        "tp 2 + sp": {"tensor_parallel": 2},
        "pp 2": {"pipeline_parallel": 2},
        "vpp": {"pipeline_parallel": 2, "virtual_stages": 2},
        "sequence 2": {"sequence_parallel": 2},
    },
    4: {
        "tp 2 x pp 2": {"tensor_parallel": 2, "pipeline_parallel": 2},
        "dp 2 x tp 2": {"tensor_parallel": 2},
    },
}


def layouts(more: dict[str, dict[str, Any]]) -> Layouts:
    """Of both engines, with more of two processes."""
    megatron = {**MEGATRON, 2: MEGATRON[2] | more}
    return {
        world: TORCH[world]
        | {name: {"kind": "megatron", **told} for name, told in megatron[world].items()}
        for world in TORCH
    }


def of_mixtures() -> Layouts:
    """Those whose experts processes share as well."""
    shared = {"expert_parallel": 2}
    told = layouts({"ep 2": shared})
    return {**told, 2: {"torch ep 2": shared, **told[2]}}


def save_mixture(directory: Path, layers: int) -> Path:
    """With tied embeddings, and layers with experts and without."""
    changes = {"tie_word_embeddings": True, "num_hidden_layers": layers}
    return save_tiny(directory, "qwen3_moe", torch.float32, **changes)


def save_dense(directory: Path, layers: int) -> Path:
    """With biases and an output layer of its own."""
    changes = {"tie_word_embeddings": False, "num_hidden_layers": layers}
    return save_tiny(directory, "qwen2", torch.float32, **changes)


@pytest.mark.nightly
def test_layouts_are_saved_and_loaded(tmp_path: Path) -> None:
    """Of one process and of two; of each engine by the other."""
    path = save_mixture(tmp_path / "m", UNEVEN)
    two = of_mixtures()[2]
    few = {
        1: TORCH[1],
        2: {name: two[name] for name in ("torch tp 2", "torch ep 2", "vpp", "ep 2")},
    }
    require_every_pair(path, tmp_path, few, each=[2])


@pytest.mark.nightly
def test_every_layout_is_saved_and_loaded_on_up_to_four_processes(tmp_path: Path) -> None:
    path = save_mixture(tmp_path / "m", UNEVEN)
    require_every_pair(path, tmp_path, of_mixtures(), each=[1, 5, 6])


@pytest.mark.nightly
def test_every_pair_in_bf16(tmp_path: Path) -> None:
    """The fp32 weights of the optimizer are saved, and the bf16 ones made of them; its moments are bf16 on disk as well."""
    told = {"torch fsdp 2": {}, "ep 2": {"expert_parallel": 2}, "pp 2": {"pipeline_parallel": 2}}
    in_bf16 = {
        name: {"precision": "bf16", "kind": "torch" if "torch" in name else "megatron", **settings}
        for name, settings in told.items()
    }
    path = save_mixture(tmp_path / "m", EVEN)
    optim = OptimConfig(moments="bf16")
    require_every_pair(path, tmp_path, {2: in_bf16}, relative=1e-2, optim=optim)
    for name in in_bf16:
        step = newest(tmp_path / name)
        assert step is not None
        file = step.manifest.files["training/exp_avg.safetensors"]
        assert file.size < 1.1 * step.manifest.files["training/residual.safetensors"].size


@pytest.mark.contract
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layers", [EVEN, UNEVEN])
def test_every_pair_with_a_mixture(tmp_path: Path, layers: int) -> None:
    path = save_mixture(tmp_path / "m", layers)
    require_every_pair(path, tmp_path, of_mixtures())


@pytest.mark.contract
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layers", [EVEN, UNEVEN])
def test_every_pair_with_a_dense_model(tmp_path: Path, layers: int) -> None:
    path = save_dense(tmp_path / "m", layers)
    require_every_pair(path, tmp_path, layouts({"tp 2": PLAIN_TP}))
