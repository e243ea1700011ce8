"""Decoding in blocks on a GPU: the kernel, CUDA's graphs, and Triton's kernels."""

from __future__ import annotations

import inspect
import logging

import numpy as np
import pytest
import torch
from contracts.generator import assert_same, chosen, logits_by_hand, make_requests
from support.models.tiny import tiny_model
from support.ranks.devices import CUDA, DEVICES, on_gpu
from torch.nn.attention.varlen import varlen_attn

from burnish.boxes.shards import Publication
from burnish.distributed.layout import Layout
from burnish.models.names import model_shards
from burnish.records import Completion
from burnish.rollout.base import Sampling
from burnish.rollout.builtin import paged_decoding
from burnish.rollout.builtin.cuda_graphs import GraphedSteps
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.rollout.builtin.paged_decoding import block_error

ON_GPU = (
    *on_gpu,
    pytest.mark.skipif(
        "block_table" not in inspect.signature(varlen_attn).parameters,
        reason="torch's kernel reads no blocks before 2.13",
    ),
)
HEADS = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SAMPLING = Sampling(300, seed=1)


def generate(family: str) -> list[list[Completion]]:
    model = tiny_model(family, **HEADS, max_position_embeddings=1024)
    generator = BuiltinGenerator(
        model.config,
        layout=Layout(),
        device=CUDA,
        dtype=torch.bfloat16,
        slots="auto",
        eos_token_ids=(3, 4),
    )
    generator.load_weights(Publication(model_shards(model)), 1)
    return generator.generate(make_requests((1, 5, 300, 23), samples=5), SAMPLING)


@pytest.mark.parametrize("device", [DEVICES[0], pytest.param(CUDA, id="cuda", marks=ON_GPU)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "width"), [(8, 128), (1, 256), (2, 64)])
def test_blocks_are_read_right(
    device: torch.device, dtype: torch.dtype, kv_heads: int, width: int
) -> None:
    assert block_error(device, dtype, kv_heads, width) < 0.01


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=ON_GPU) for each in ("qwen3", "mistral")]
)
def test_graphs_replay_what_steps_compute(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        replayed = generate(family)
    assert not caplog.records, "a step could not be recorded"
    monkeypatch.setattr(GraphedSteps, "__call__", lambda steps, compute, rows: compute(rows))
    assert_same(replayed, generate(family), atol=0)


@pytest.mark.parametrize("is_fused", [pytest.param(each, marks=on_gpu) for each in (True, False)])
def test_long_completions_have_the_logprobs_of_plain_transformers(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_fused:
        monkeypatch.setattr(paged_decoding, "compiles_triton", lambda device: False)
    model = tiny_model("qwen3", **HEADS, max_position_embeddings=1024)
    found, wanted = [], []
    requests = make_requests((1, 5, 300, 23), samples=5)
    for request, group in zip(requests, generate("qwen3"), strict=True):
        for each in group:
            logprobs = logits_by_hand(model, request, each).log_softmax(-1)
            wanted.append(chosen(logprobs, each))
            found.append(each.logprobs)
    difference = np.concatenate(found) - np.concatenate(wanted)
    assert np.linalg.norm(difference) <= 5e-2 * np.linalg.norm(np.concatenate(wanted))
