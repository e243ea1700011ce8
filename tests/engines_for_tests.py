"""Engines with the settings of `contracts.engine`, their weights loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from adapters_for_tests import RandomAdapter
from contracts.engine import BETAS, CLIP
from transformers import AutoConfig

from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.engines.base import Part
from burnish.engines.torch_engine import TorchEngine
from burnish.models.sources import SafetensorsSource
from burnish.parallel.layout import Layout

OPTIM = OptimConfig(betas=BETAS, weight_decay=0.1)
CPU = torch.device("cpu")


def make_engine(
    layout: Layout,
    path: Path,
    optim: OptimConfig | None = OPTIM,
    *,
    lora: LoraConfig | None = None,
    device: torch.device = CPU,
    **settings: Any,
) -> TorchEngine:
    """Of the model in a directory, in fp32 unless the settings differ. With `lora` it trains a `RandomAdapter`."""
    settings = {"precision": "fp32", "max_grad_norm": CLIP, "logprob_chunk": 5, **settings}
    config = EngineConfig(**settings)
    hf_config = AutoConfig.from_pretrained(path)
    engine = TorchEngine(hf_config, config, optim, layout=layout, device=device, lora=lora)
    engine.load(SafetensorsSource(path), Part.FROZEN if lora else Part.WEIGHTS)
    if lora:
        engine.load(RandomAdapter(), Part.WEIGHTS)
    return engine
