"""For the contract of engines: engines with its settings and loaded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from contracts.engine import BETAS, CLIP
from transformers import AutoConfig

from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines import factory as making
from burnish.engines.base import Engine, Part
from burnish.models.loading import SafetensorsSource
from support.models.adapters import RandomAdapter

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
) -> Engine:
    """Of the model in a directory, of either `kind`, in fp32 unless the settings differ. With `lora` it trains a `RandomAdapter`."""
    config, hf_config = engine_config(**settings), AutoConfig.from_pretrained(path)
    engine = making.make_engine(hf_config, config, optim, layout=layout, device=device, lora=lora)
    engine.load(SafetensorsSource(path), Part.FROZEN if lora else Part.WEIGHTS)
    if lora:
        engine.load(RandomAdapter(), Part.WEIGHTS)
    return engine


def make_frozen(layout: Layout, path: Path, beside: Engine, **settings: Any) -> Engine:
    """Of the same model and settings as the engine beside it, on the CPU."""
    config, hf_config = engine_config(**settings), AutoConfig.from_pretrained(path)
    frozen = making.make_engine(hf_config, config, None, layout=layout, device=CPU, beside=beside)
    frozen.load(SafetensorsSource(path), Part.WEIGHTS)
    return frozen


def engine_config(**settings: Any) -> EngineConfig:
    """These settings over those of `contracts.engine`."""
    common = {"precision": "fp32", "max_grad_norm": CLIP, "logprob_chunk": 5}
    return EngineConfig(**{**common, **settings})
