"""Built-in generators, and how far what they say of their completions is from what an engine says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from contracts.generator import make_requests
from transformers import PretrainedConfig

from burnish.config.schema import LoraConfig
from burnish.data.batching import make_batch
from burnish.engines.base import Engine
from burnish.models.counting import count_flops
from burnish.parallel.layout import Layout
from burnish.records import Completion, Example, Request
from burnish.rollout.base import Sampling
from burnish.rollout.builtin import BuiltinGenerator
from burnish.rollout.held import HeldModel

CPU = torch.device("cpu")
DRAWN = Sampling(12, temperature=0.7, top_p=0.9)
GREEDY = Sampling(12, temperature=0.0)


def make_generator(
    config: PretrainedConfig,
    layout: Layout,
    precision: str = "fp32",
    lora: LoraConfig | None = None,
    device: torch.device = CPU,
) -> BuiltinGenerator:
    """Without weights; `lora` is held beside the model where that says so."""
    beside = lora if lora is not None and lora.publish == "adapter" else None
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = HeldModel(config, device=device, dtype=dtype, lora=beside)
    return BuiltinGenerator(model, layout=layout, slots=4, eos_token_ids=())


def differences(
    engine: Engine,
    generator: BuiltinGenerator,
    config: PretrainedConfig,
    sampling: Sampling = DRAWN,
    **how: bool,
) -> np.ndarray:
    """The engine's log-probs minus the generator's, of all tokens that it drew in this rank's sequences."""
    requests = make_requests()
    groups = generator.generate(requests, sampling)
    pairs = [(r, c) for r, group in zip(requests, groups, strict=True) for c in group]
    batch = make_batch(_examples(pairs), engine.layout, 128, count_flops(config))
    found = []
    outputs = engine.forward(batch, **how)
    for micro, numbers, output in zip(batch.microbatches, batch.examples, outputs, strict=True):
        lengths = micro.cu_seqlens.diff().tolist()
        for number, logprobs in zip(numbers, output.logprobs.cpu().split(lengths), strict=True):
            if number >= 0:
                drawn = pairs[number][1].logprobs
                found.append(logprobs[-len(drawn) :].numpy() - drawn)
    return np.concatenate(found)


def _examples(pairs: Sequence[tuple[Request, Completion]]) -> list[Example]:
    tokens = [np.concatenate([r.token_ids, c.token_ids]) for r, c in pairs]
    return [
        Example(ids, np.arange(len(ids)) >= len(request.token_ids))
        for ids, (request, _) in zip(tokens, pairs, strict=True)
    ]
