"""A step's `model/` as it lies on disk is a Hugging Face model."""

from __future__ import annotations

import functools

import pytest
import torch
from support.checkpoints.states import save_once, shards_of, written_by
from support.models.tiny import tiny_model
from transformers import AutoModelForCausalLM

from burnish.checkpoint import write_plan as planner
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.steps import newest
from burnish.distributed.layout import Layout


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("max_file_bytes", [1 << 32, 20_000])
def test_transformers_loads_the_model(tmp_path, monkeypatch, split, max_file_bytes):
    monkeypatch.setattr(
        planner, "plan_files", functools.partial(planner.plan_files, max_file_bytes=max_file_bytes)
    )
    model = tiny_model("llama")
    dtype = torch.bfloat16 if split else torch.float32

    def write_assets(directory):
        model.config.dtype = dtype
        model.config.save_pretrained(directory)

    weights = {name: p.detach() for name, p in model.named_parameters()}
    path = save_once(
        tmp_path,
        weights=shards_of(weights, Layout()),
        training=[],
        assets=written_by(write_assets),
        split=split,
    )
    is_sharded = len(list((path / "model").glob("*.safetensors"))) > 1
    assert is_sharded == (max_file_bytes == 20_000)
    loaded = AutoModelForCausalLM.from_pretrained(path / "model")
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == dtype
        is_tie = (
            (weights[name].view(torch.int32) & 0xFFFF) == 0x8000 if split else torch.tensor(False)
        )
        assert torch.equal(parameter[~is_tie], weights[name].to(dtype)[~is_tie])
    again = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    CheckpointSource(newest(tmp_path), Layout()).fill(shards_of(again, Layout()))
    assert all(torch.equal(again[name], weights[name]) for name in weights)
