"""Liger's kernels beside plain transformers, where they are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contracts.engine import make_examples, train, train_by_hand
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny
from transformers import AutoModelForCausalLM

from burnish.distributed.layout import Layout
from burnish.engines.torch.torch_engine import has_liger


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "olmo2"])
def test_it_trains_as_plain_transformers_does(
    tmp_path: Path,
    alone: Layout,
    device: torch.device,
    family: str,
    checkpointing: str,
    precision: str,
    tolerance: float,
) -> None:
    if not has_liger(device):
        pytest.skip(f"no Liger kernels for {device.type}")
    path = save_tiny(tmp_path / "m", family, torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    wanted = train_by_hand(plain, make_examples(VOCAB))
    settings = {"precision": precision, "activation_checkpointing": checkpointing}
    engine = make_engine(alone, path, device=device, **settings)
    found = train(engine, make_examples(VOCAB), 2)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=tolerance)
