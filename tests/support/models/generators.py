"""For the contract of generators: built-in ones, and how far their log-probs are from an engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from contracts.generator import make_requests
from transformers import PretrainedConfig, PreTrainedModel

from burnish.boxes.shards import Publication
from burnish.config.schema import LoraConfig
from burnish.data.batching import make_batch
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine
from burnish.models.meta_init import count_flops
from burnish.models.names import model_shards
from burnish.records import Completion, Example, Request
from burnish.rollout.base import Decode, Sampling
from burnish.rollout.builtin.generator import BuiltinGenerator

CPU = torch.device("cpu")
DRAWN = Sampling(12, temperature=0.7, top_p=0.9)
GREEDY = Sampling(12, temperature=0.0)


def make_generator(
    config: PretrainedConfig,
    layout: Layout,
    precision: str = "fp32",
    lora: LoraConfig | None = None,
    device: torch.device = CPU,
    *,
    eos: Sequence[int] = (),
) -> BuiltinGenerator:
    """Without weights; `lora` is held beside the model where that says so."""
    beside = lora if lora is not None and lora.publish == "adapter" else None
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return BuiltinGenerator(
        config, layout=layout, device=device, dtype=dtype, slots=4, eos_token_ids=eos, lora=beside
    )


def builtin(
    model: PreTrainedModel,
    *,
    slots: int | Literal["auto"] = 4,
    eos: Sequence[int] = (),
    version: int = 1,
    dtype: torch.dtype = torch.float32,
    decode: Decode | None = None,
) -> BuiltinGenerator:
    """With the weights of a model."""
    generator = BuiltinGenerator(
        model.config,
        layout=Layout(),
        device=CPU,
        dtype=dtype,
        slots=slots,
        eos_token_ids=eos,
        decode=decode,
    )
    generator.load_weights(Publication(model_shards(model)), version)
    return generator


@dataclass(frozen=True, slots=True)
class Scored:
    """A completion, and what an engine says of it."""

    completion: Completion
    logprobs: np.ndarray
    """Of the tokens that were drawn."""
    experts: np.ndarray
    """[T - 1, L, k] where they were asked for: where tokens went, but for the last, which the generator never reads."""


def scored(
    engine: Engine,
    generator: BuiltinGenerator,
    config: PretrainedConfig,
    sampling: Sampling = DRAWN,
    **how: bool,
) -> list[Scored]:
    """What the generator draws, of which the engine has this rank's sequences."""
    requests = make_requests()
    groups = generator.generate(requests, sampling)
    pairs = [(r, c) for r, group in zip(requests, groups, strict=True) for c in group]
    examples = [_example(*pair) for pair in pairs]
    batch = make_batch(examples, engine.layout, 128, count_flops(config))
    outputs = engine.forward(batch, **how)
    logprobs = batch.by_example([output.logprobs.cpu().numpy() for output in outputs])
    experts = batch.by_example([output.experts.cpu().numpy() for output in outputs])
    return [
        Scored(c := pairs[number][1], said[-len(c.token_ids) :], experts[number][:-1])
        for number, said in logprobs.items()
    ]


def _example(request: Request, completion: Completion) -> Example:
    ids = np.concatenate([request.token_ids, completion.token_ids])
    return Example(ids, np.arange(len(ids)) >= len(request.token_ids))


def differences(
    engine: Engine,
    generator: BuiltinGenerator,
    config: PretrainedConfig,
    sampling: Sampling = DRAWN,
    **how: bool,
) -> np.ndarray:
    """The engine's log-probs minus the generator's, of all tokens that it drew in this rank's sequences."""
    found = scored(engine, generator, config, sampling, **how)
    return np.concatenate([each.logprobs - each.completion.logprobs for each in found])


def require_close(found: np.ndarray, precision: str) -> None:
    """Differences of log-probs that rounding explains."""
    assert np.abs(found).max() < (1e-5 if precision == "fp32" else 0.3)
    assert np.abs(found).mean() < (1e-6 if precision == "fp32" else 0.03)
