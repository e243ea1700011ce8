"""Saved at one layout of the torch engine, loaded at any other: every weight and slot bit-equal, the next loss the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_pairs import require_every_pair
from tiny import save_tiny
from transformers import AutoConfig

from burnish.config.schema import EngineConfig, OptimConfig
from burnish.engines.torch_engine import TorchEngine
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
        "hsdp 2 x tp 2": {"replicas": 2, "tensor_parallel": 2},
    },
}
"""By processes: what the engine is told."""


def make_engine(layout: Layout, path: Path, settings: Mapping[str, Any]) -> TorchEngine:
    config = EngineConfig(precision="fp32", logprob_chunk=5, **settings)
    hf_config = AutoConfig.from_pretrained(path)
    return TorchEngine(hf_config, config, OptimConfig(), layout=layout, device=CPU)


@pytest.mark.timeout(600)
def test_every_pair_of_layouts(tmp_path: Path) -> None:
    """With tied embeddings, and layers with experts and without."""
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32, tie_word_embeddings=True)
    require_every_pair(make_engine, path, tmp_path, LAYOUTS)
