"""Turn logits into tokens.

Every completion has a 64-bit key, derived from (run seed, step, prompt, sample, turn). Its number t is the t-th output of splitmix64
seeded with that key (Steele, Lea and Flood, OOPSLA 2014): z = key + (t + 1)·γ mod 2^64, then two rounds of xor-shift and
multiply.

Filters run in the order of transformers: temperature, top-k, top-p, min-p. Equal masses are kept or dropped together. The draw
inverts the distribution function in order of ids. Masses are fp32, running sums fp64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from burnish.distributed.device import compiles_triton, has_fp64
from burnish.records.seeds import derive_seed
from burnish.rollout.base import Sampling

_BLOCK = 64
"""Tokens per block of the two-level search."""


class Drawn(NamedTuple):
    """One token for each of n rows."""

    tokens: Tensor
    """[n] int64."""
    sampled_logprobs: Tensor
    """[n] fp32, under the distribution after temperature and filters; 0 when greedy."""
    logprobs: Tensor
    """[n] fp32, under softmax(logits)."""


def draw(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Drawn:
    """Draw a token per row from `logits` [n, V] fp32 (overwritten).

    `uniforms` [n] float64 lie in [0, 1), perhaps on the CPU. Temperature 0 takes the first most probable token. A NaN gives NaN
    log-probs and some valid id.
    """
    if sampling.temperature == 0:
        return _greedy(logits)
    # The largest mass is 1, so none overflows. Two log-probs are kept of a token. The raw one is of the distribution that the
    # engine trains, before any filter. The other is of the distribution that was drawn from.
    z = logits.sub_(logits.amax(dim=-1, keepdim=True))
    masses = z.exp()
    log_total = masses.sum(dim=-1).log()
    if sampling.temperature != 1:
        torch.div(z, sampling.temperature, out=masses).exp_()
    truncate(masses, sampling)
    tokens, log_kept = _invert(masses, uniforms)
    chosen = z.gather(1, tokens[:, None])[:, 0]
    sampled = chosen / sampling.temperature - log_kept
    return Drawn(tokens, sampled, chosen - log_total)


def truncate(masses: Tensor, sampling: Sampling) -> None:
    """Set to 0 the `masses` [n, V] that top-k, top-p and min-p drop; each row's largest mass is 1."""
    if 0 < sampling.top_k < masses.shape[-1]:
        masses.mul_(masses >= masses.topk(sampling.top_k, dim=-1).values[:, -1:])
    if sampling.top_p < 1:
        masses.mul_(masses >= _nucleus_border(masses, sampling.top_p))
    if sampling.min_p > 0:
        masses.mul_(masses >= sampling.min_p)


def _greedy(logits: Tensor) -> Drawn:
    if logits.device.type == "cpu":
        tokens = torch.from_numpy(np.argmax(logits.numpy(), axis=-1))
    else:
        tokens = logits.argmax(dim=-1)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return Drawn(tokens, torch.zeros_like(chosen), chosen - logits.logsumexp(dim=-1))


def _nucleus_border(masses: Tensor, top_p: float) -> Tensor:
    """Return the lightest mass [n, 1] to keep: it and heavier ones hold `top_p` of the total."""
    if masses.device.type == "cpu":  # numpy sorts 20 times as fast as torch
        rising = torch.from_numpy(np.sort(masses.numpy(), axis=-1))
    else:
        rising = masses.sort(dim=-1).values
    running = rising.cumsum(dim=-1)
    border = torch.searchsorted(running, running[:, -1:] * (1 - top_p), right=True)
    return rising.gather(1, border.clamp_(max=masses.shape[-1] - 1))


def _invert(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token [n] whose running sum exceeds uniform · total, and log total [n] fp32.

    Never returns a token of mass 0.
    """
    device = masses.device
    sum_device = uniforms.device
    padding = -masses.shape[-1] % _BLOCK
    padded = functional.pad(masses, (0, padding)) if padding else masses
    blocks = padded.view(len(masses), -1, _BLOCK)
    block_sums = blocks.sum(dim=-1)
    if compiles_triton(device):
        return _kernels().invert(masses, block_sums, uniforms, _BLOCK)
    sums = block_sums.to(sum_device).double()
    upto = sums.cumsum(dim=-1)
    goal = uniforms[:, None] * upto[:, -1:]
    block = _first_above(upto, goal)
    goal -= (upto - sums).gather(1, block)
    inside = blocks.gather(1, block.to(device)[..., None].expand(-1, -1, _BLOCK))[:, 0]
    inner = inside.to(sum_device).double().cumsum(dim=-1)
    tokens = (block * _BLOCK + _first_above(inner, goal)).clamp_(max=masses.shape[-1] - 1)
    return tokens[:, 0].to(device), upto[:, -1].log().float().to(device)


def _first_above(running: Tensor, goal: Tensor) -> Tensor:
    """Return the index [n, 1] of the first sum in `running` [n, m] above `goal` [n, 1], never of one that adds nothing."""
    reachable = torch.nextafter(running[:, -1:], torch.zeros_like(goal))
    index = torch.searchsorted(running, goal.clamp(min=0).minimum(reachable), right=True)
    return index.clamp_(max=running.shape[-1] - 1)


def stream_key(seed: int, step: int, prompt_key: int, sample: int, turn: int = 0) -> int:
    """Return the signed 64-bit key of a completion's random numbers."""
    turns = (turn,) if turn else ()  # the first turn has the key of a single answer
    return _signed(derive_seed(seed, "rollout", step, prompt_key, sample, *turns))


def uniforms(keys: Tensor, counts: Tensor) -> Tensor:
    """Return number `counts[i]` of key `keys[i]`, both [n] int64, as float64 [n] in [0, 1), with 53 random bits.

    A device without fp64 gets them on the CPU.
    """
    if not has_fp64(keys.device):
        cpu = torch.device("cpu")
        keys = keys.to(cpu)
        counts = counts.to(cpu)
    if compiles_triton(keys.device):
        return _kernels().uniform_numbers(keys, counts)
    z = keys + (counts + 1) * _GAMMA
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).double() * 2.0**-53


def _kernels() -> Any:
    from burnish.models.kernels import triton_draws

    return triton_draws


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift logically; torch's own shift keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
