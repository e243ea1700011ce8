"""The generator's contract on one device, and the same completions on every device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from contracts.generator import (
    GeneratorContract,
    assert_same,
    chosen,
    logits_by_hand,
    make_requests,
)
from support.models.tiny import FAMILIES, tiny_model
from support.ranks.devices import CPU, CUDA, DEVICES, on_gpu
from transformers import PreTrainedModel

from burnish.boxes.shards import Publication
from burnish.distributed.layout import Layout
from burnish.models.names import model_shards
from burnish.rollout.base import Generator, Sampling
from burnish.rollout.builtin.generator import BuiltinGenerator


def builtin(
    model: PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    slots: int = 4,
    eos: Sequence[int] = (),
    version: int = 1,
) -> BuiltinGenerator:
    """A generator on `device`, whose weights come from a model that stays on the CPU."""
    generator = BuiltinGenerator(
        model.config,
        layout=Layout(),
        device=device,
        dtype=dtype,
        slots=slots,
        eos_token_ids=eos,
    )
    generator.load_weights(Publication(model_shards(model)), version)
    return generator


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestContractOnCuda(GeneratorContract):
    """On the CPU the contract runs in tests/rollout."""

    def make(self, model: PreTrainedModel, **options: Any) -> Generator:
        return builtin(model, CUDA, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logprobs_are_near_plain_transformers_in_fp32(
    family: str, device: torch.device
) -> None:
    model, requests = tiny_model(family), make_requests()
    groups = builtin(model, device, torch.bfloat16).generate(requests, Sampling(20, seed=1))
    ours, theirs = [], []
    for request, group in zip(requests, groups, strict=True):
        for completion in group:
            logprobs = logits_by_hand(model, request, completion).log_softmax(-1)
            theirs.append(chosen(logprobs, completion))
            ours.append(completion.logprobs)
            assert len(completion.token_ids) == 20
    found, wanted = np.concatenate(ours), np.concatenate(theirs)
    assert np.linalg.norm(found - wanted) <= 5e-2 * np.linalg.norm(wanted)
    assert not np.allclose(found, wanted, atol=1e-5), "this was not computed in bf16"


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.05}],
)
@pytest.mark.parametrize("device", [pytest.param(CUDA, id="cuda", marks=on_gpu), CPU], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_every_device_generates_what_the_cpu_does(
    family: str, device: torch.device, options: dict[str, Any]
) -> None:
    model, requests = tiny_model(family), make_requests(samples=4)
    sampling, eos = Sampling(24, seed=5, step=3, **options), range(3, 7)
    wanted = builtin(model, CPU, slots=64, eos=eos).generate(requests, sampling)
    assert len({len(completion.token_ids) for completion in chain(*wanted)}) > 1
    for slots in (2, 64):
        found = builtin(model, device, slots=slots, eos=eos).generate(requests, sampling)
        assert_same(found, wanted)
