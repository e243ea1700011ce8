"""Compare what the built-in generator draws with plain transformers, which scores each completion in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from burnish.boxes.shards import Publication
from burnish.check.comparison import Material, packed_model
from burnish.check.plain_model import Difference, difference
from burnish.distributed.layout import Layout
from burnish.models.names import model_shards
from burnish.records import Completion, Request, TokenIds
from burnish.rollout.base import Sampling
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.rollout.builtin.sampling import stream_key, uniforms

# Share of probability by which two roundings may differ on where a filter ends or a draw lies.
_BORDER = 1e-5
# Nats by which two tokens' scores differ beyond rounding.
_GAP = 1e-4
_SLOTS = 3


def made_generator(
    material: Material, device: torch.device, dtype: torch.dtype, slots: int = _SLOTS
) -> tuple[BuiltinGenerator, nn.Module]:
    """Return a generator with the material's weights, and its model."""
    generator = BuiltinGenerator(
        material.hf_config,
        layout=Layout(),
        device=device,
        dtype=dtype,
        slots=slots,
        eos_token_ids=(),
    )
    source, _ = packed_model(replace(material, lora=None), device)
    generator.load_weights(Publication(model_shards(source)), version=0)
    return generator, generator.module


def drawn(
    generator: BuiltinGenerator, prompts: Sequence[TokenIds], sampling: Sampling
) -> list[tuple[TokenIds, int, int, Completion]]:
    """Return each completion with its prompt, the prompt's number and the sample's. The first prompt has two samples."""
    requests = [Request(key, prompt, 2 if key == 0 else 1) for key, prompt in enumerate(prompts)]
    completions = generator.generate(requests, sampling)
    return [
        (prompt, key, sample, completion)
        for (key, prompt), samples in zip(enumerate(prompts), completions, strict=True)
        for sample, completion in enumerate(samples)
    ]


def logits_of(model: Any, prompt: TokenIds, completion: Completion) -> Tensor:
    """Return fp32 logits [n, V] for the completion's tokens, from one pass of transformers' model."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float()


def of_completion(
    logits: Tensor, completion: Completion, sampling: Sampling, key: int, sample: int
) -> list[Difference]:
    """Compare a completion's log-probs, and its tokens, with plain `logits`."""
    tokens = torch.from_numpy(completion.token_ids)[:, None]
    logprobs = torch.from_numpy(completion.logprobs)
    right = logits.log_softmax(-1)
    chosen = right.gather(1, tokens)[:, 0]
    differences = [difference("log-probs of a completion", logprobs, chosen, 1.0)]
    if sampling.temperature == 0:
        what = "log-probs of the likeliest tokens"
        return [*differences, difference(what, chosen, right.amax(-1), 1.0)]
    warped = [_warped(logits, sampling, border) for border in (0.0, -_BORDER, _BORDER)]
    clear = _is_clear(warped[0], logits / sampling.temperature)
    drawn_from = torch.stack([each.gather(1, tokens)[:, 0] for each in warped])
    sampled = torch.from_numpy(completion.sampled_logprobs)
    apart = (drawn_from - sampled).abs().amin(0).where(clear, 0.0)
    differences.append(difference("log-probs of the filtered draw", sampled + apart, sampled, 1.0))
    counts = torch.arange(len(tokens))
    keys = torch.full_like(counts, stream_key(sampling.seed, sampling.step, key, sample))
    outside = torch.stack([_outside(each, tokens, uniforms(keys, counts)) for each in warped])
    what = "tokens drawn by their random numbers"
    outside = outside.amin(0).where(clear, 0.0)
    return [*differences, difference(what, outside, torch.zeros_like(outside))]


def _warped(logits: Tensor, sampling: Sampling, border: float) -> Tensor:
    """Return log-probs [n, V] after transformers' filters, with borders moved by a share of probability."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(min(sampling.top_k, logits.shape[-1])))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(min(1.0, sampling.top_p + border)))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(max(0.0, sampling.min_p - border)))
    empty = torch.zeros(len(logits), 0, dtype=torch.int64)
    return torch.as_tensor(warpers(empty, logits.clone())).log_softmax(-1)


def _is_clear(warped: Tensor, scores: Tensor) -> Tensor:
    """Return for which tokens [n] the likeliest one that is dropped is less likely than all kept ones, beyond rounding."""
    is_kept = warped > -torch.inf
    least_kept = scores.masked_fill(~is_kept, torch.inf).amin(-1)
    most_dropped = scores.masked_fill(is_kept, -torch.inf).amax(-1)
    return least_kept - most_dropped > _GAP


def _outside(logprobs: Tensor, tokens: Tensor, numbers: Tensor) -> Tensor:
    """Return how far each random number [n] lies outside the share of its token in the distribution function."""
    upto = logprobs.double().exp().cumsum(-1).gather(1, tokens)[:, 0]
    below = upto - logprobs.double().exp().gather(1, tokens)[:, 0]
    over = torch.maximum(below - numbers, numbers - upto) - _BORDER
    return over.clamp(min=0).float()
