"""How far the policy that drew a step's tokens is from the one that is trained, and what to do about it.

Generator and engine hold the same weights and compute with other kernels, in another order and often in
another precision; and top-k, top-p and min-p are the generator's alone. So tokens come from a policy μ
that is not quite the π_old that they are taken for (Yao et al. 2025, "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training").

Of a token y, π_old(y) is the engine's, at the temperature it was drawn at, before any update of the step;
μ(y) is `MicroBatch.sampled_logprobs`, of the distribution that it was really drawn from, after
temperature and truncation. Importance sampling asks for that one: E_μ[π_old/μ · f] is the mean of f under
π_old, over the tokens that μ can draw. The generator's raw log-probs would do only at temperature 1 without
truncation, where both are the same. With truncation the weights are around the share of the
distribution that was kept, instead of around 1: what was cut off is missing, and that is no error of arithmetic.
Left out: correction by whole sequences, and leaving tokens out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.kl import kl_loss
from burnish.algorithms.policy_loss import LOG_RATIO_BOUND
from burnish.errors import BurnishError
from burnish.records import MicroBatch
from burnish.tracking.stats import Max, Mean, Stats


def mismatch_stats(old_logprobs: Tensor, micro: MicroBatch) -> Stats:
    """What there is between generator and engine, from π_old's log-probs [T] of the tokens:

    - `mismatch_kl`: mean over tokens of e^d - 1 - d, d = log π_old/μ, which estimates KL(μ‖π_old) (k3 of
      `burnish.algorithms.kl`); too low where μ is truncated
    - `mismatch_max`: the largest |d|

    Nothing where the micro-batch has no `sampled_logprobs`.
    """
    if micro.sampled_logprobs is None:
        return Stats()
    mask, sampled = micro.loss_mask, micro.sampled_logprobs
    estimates = kl_loss("k3", sampled, old_logprobs, mask)
    return Stats(
        mismatch_kl=Mean(estimates.sum(), mask.sum()),
        mismatch_max=Max(_log_ratio(old_logprobs, micro).abs().max()),
    )


def mismatch_weights(old_logprobs: Tensor, micro: MicroBatch, cap: float) -> tuple[Tensor, Stats]:
    """Truncated importance sampling: min(π_old(y)/μ(y), `cap`) [T] fp32, the factor on each token's policy loss.

    Without gradient; 1 where nothing is trained on. Statistics: `mismatch_capped`, the share of tokens that the cap holds.
    Raises `BurnishError` for a micro-batch without `sampled_logprobs`.
    """
    ratio = _log_ratio(old_logprobs, micro).clamp(max=LOG_RATIO_BOUND).exp()
    held = Mean((ratio > cap).sum(), micro.loss_mask.sum())
    return ratio.clamp(max=cap), Stats(mismatch_capped=held)


def _log_ratio(old_logprobs: Tensor, micro: MicroBatch) -> Tensor:
    if micro.sampled_logprobs is None:
        raise BurnishError(
            "A correction of the generator's mismatch was given a micro-batch without its log-probs.",
            have="sampled_logprobs=None",
            want="the log-prob of each token under the distribution it was drawn from",
            do="make the examples of the batch with sampled_logprobs, or set algorithm.mismatch_cap to null",
        )
    difference = old_logprobs.float() - micro.sampled_logprobs.float()
    return torch.where(micro.loss_mask, difference, 0.0)
