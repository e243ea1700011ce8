"""From logits and one uniform number per row to a token and its log-probs.

The order is that of transformers: temperature, top-k, top-p among what top-k left, min-p. Each keeps
the tokens whose mass e^(z/T) reaches a threshold, so tokens tied at the border stay or go together.
The token is then found by inverting the distribution function over the kept tokens in the order of
their ids: one number decides, and no other row matters. Masses are fp32, their
running sums fp64, made where the numbers lie: a device without fp64 sends the CPU one sum of each
block of tokens, and then the one block that is looked into. Left out: the numbers themselves (`burnish.rollout.builtin.rng`), penalties, grammars.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from burnish.rollout.base import Sampling

_BLOCK = 64
"""Tokens per block of the two-level search."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """One token for each of n rows."""

    tokens: Tensor
    """[n] int64."""
    sampled_logprobs: Tensor
    """[n] fp32, under the distribution that was drawn from; 0 when greedy."""
    logprobs: Tensor
    """[n] fp32, under softmax(logits)."""


def draw(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Drawn:
    """Draw from `logits` [n, V] fp32 (overwritten) with `uniforms` [n] float64 in [0, 1).

    What is drawn lies where the logits lie; `uniforms` may be on the CPU instead. Temperature 0 takes the most probable token, the one with the lowest id among equals. A row that
    holds a NaN gives NaN log-probs and some valid id.
    """
    if sampling.temperature == 0:
        return _greedy(logits)
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
    """Set to 0 what top-k, top-p and min-p drop from `masses` [n, V], whose largest in a row is 1."""
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
    """The lightest mass [n, 1] that stays: tokens at or above it hold `top_p` of the total, without it they do not."""
    if masses.device.type == "cpu":  # numpy sorts numbers 20 times as fast as torch
        rising = torch.from_numpy(np.sort(masses.numpy(), axis=-1))
    else:
        rising = masses.sort(dim=-1).values
    running = rising.cumsum(dim=-1)
    border = torch.searchsorted(running, running[:, -1:] * (1 - top_p), right=True)
    return rising.gather(1, border.clamp_(max=masses.shape[-1] - 1))


def _invert(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first token [n] at which the running sum exceeds uniform · total, and log of that total [n] fp32.

    Two levels: sums of blocks, then the tokens of one block. A token of mass 0 is never found.
    """
    here, summing = masses.device, uniforms.device
    missing = -masses.shape[-1] % _BLOCK
    padded = functional.pad(masses, (0, missing)) if missing else masses
    blocks = padded.view(len(masses), -1, _BLOCK)
    sums = blocks.sum(dim=-1).to(summing).double()
    upto = sums.cumsum(dim=-1)
    goal = uniforms[:, None] * upto[:, -1:]
    block = _first_above(upto, goal)
    goal -= (upto - sums).gather(1, block)
    inside = blocks.gather(1, block.to(here)[..., None].expand(-1, -1, _BLOCK))[:, 0]
    inner = inside.to(summing).double().cumsum(dim=-1)
    found = (block * _BLOCK + _first_above(inner, goal)).clamp_(max=masses.shape[-1] - 1)
    return found[:, 0].to(here), upto[:, -1].log().float().to(here)


def _first_above(running: Tensor, goal: Tensor) -> Tensor:
    """Index [n, 1] of the first of the rising sums [n, m] above `goal` [n, 1], never one that adds nothing."""
    reachable = torch.nextafter(running[:, -1:], torch.zeros_like(goal))
    index = torch.searchsorted(running, goal.clamp(min=0).minimum(reachable), right=True)
    return index.clamp_(max=running.shape[-1] - 1)
