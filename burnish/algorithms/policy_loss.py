"""The surrogates of policy gradient methods, token by token.

Each takes the log-probs of the policy that is being trained, π, and returns for every token what
is minimised. The old policy π_old is what `MicroBatch.old_logprobs` was computed with; where that is
None, the update is exactly on-policy and π_old is π itself without gradient. The ratio is formed in
fp32 from a log-ratio that is 0 at masked tokens, so nothing they hold reaches the loss or the
gradient. Left out: how tokens are added up (`burnish.algorithms.aggregation`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.algorithms.aggregation import sequence_means, to_tokens
from burnish.errors import BurnishError
from burnish.records import MicroBatch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are kept within ± this before exp, so that no ratio overflows; no gradient flows beyond it."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """What a surrogate says of each token of a micro-batch. Masked tokens hold finite values without meaning."""

    loss: Tensor
    """[T] fp32, to be minimised."""
    clipped: Tensor
    """[T] bool, where the clip range holds the token back."""
    clipped_lower: Tensor
    """[T] bool, where the dual clip does."""
    log_ratio: Tensor
    """[T] fp32 without gradient, log π/π_old of the token."""


def ppo_clip(
    logprobs: Tensor,
    micro: MicroBatch,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7), its bounds apart as in DAPO (arXiv 2503.14476, equation 8).

    With r_t = π(y_t) / π_old(y_t):  ℓ_t = -min(r_t A_t, clip(r_t, 1 - `clip_low`, 1 + `clip_high`) A_t).
    With `dual_clip` c (arXiv 1912.09729, equation 5), where A_t < 0:  ℓ_t = -max(that minimum, c A_t).
    """
    advantages = _advantages(micro)
    log_ratio = _log_ratio(logprobs, micro)
    ratio = _bounded(log_ratio).exp()
    loss, clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    clipped_lower = torch.zeros_like(clipped)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        clipped_lower = (advantages < 0) & (loss > bound)
        loss = torch.where(clipped_lower, bound, loss)
    return TokenLosses(loss, clipped, clipped_lower, log_ratio.detach())


def gspo(logprobs: Tensor, micro: MicroBatch, clip_low: float, clip_high: float) -> TokenLosses:
    """Group sequence policy optimisation (arXiv 2507.18071), in its token form (equations 13 and 14).

    The ratio is the sequence's, s = exp(1/|y| Σ_t log π(y_t)/π_old(y_t)), and every token's is
    s_t = sg[s] · π(y_t) / sg[π(y_t)]: s in value, its own log-prob in gradient.
    ℓ_t = -min(s_t A_t, clip(s_t, 1 - `clip_low`, 1 + `clip_high`) A_t). With the aggregation
    sequence_mean and one advantage per sequence, gradient and value are those of equation 5.
    """
    advantages = _advantages(micro)
    log_ratio = _log_ratio(logprobs, micro)
    sequence_ratio = _bounded(sequence_means(log_ratio.detach(), micro)).exp()
    # log_ratio minus itself: 0 in value, ∇ log π in gradient, and safe at masked tokens.
    ratio = to_tokens(sequence_ratio, micro) * (log_ratio - log_ratio.detach()).exp()
    loss, clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return TokenLosses(loss, clipped, torch.zeros_like(clipped), log_ratio.detach())


def cispo(logprobs: Tensor, micro: MicroBatch, clip_low: float, clip_high: float) -> TokenLosses:
    """Clipped importance sampling weights (MiniMax-M1, arXiv 2506.13585, equations 4 and 5).

    ℓ_t = -sg[clip(r_t, 1 - `clip_low`, 1 + `clip_high`)] A_t log π(y_t): the weight is clipped, never
    the token, so every token keeps a gradient. The paper leaves the lower side open (`clip_low` ≥ 1).
    """
    advantages = _advantages(micro)
    log_ratio = _log_ratio(logprobs, micro)
    ratio = _bounded(log_ratio.detach()).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    safe_logprobs = torch.where(micro.loss_mask, logprobs.float(), 0.0)
    loss = -weight * advantages * safe_logprobs
    clipped = weight != ratio
    return TokenLosses(loss, clipped, torch.zeros_like(clipped), log_ratio.detach())


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    plain = -ratio * advantages
    held = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.maximum(plain, held), held > plain


def old_logprobs(logprobs: Tensor, micro: MicroBatch) -> Tensor:
    """[T] without gradient, log π_old of the tokens whose log π is `logprobs`."""
    return logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs


def _log_ratio(logprobs: Tensor, micro: MicroBatch) -> Tensor:
    difference = logprobs.float() - old_logprobs(logprobs, micro).float()
    return torch.where(micro.loss_mask, difference, 0.0)


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _advantages(micro: MicroBatch) -> Tensor:
    if micro.advantages is None:
        raise BurnishError(
            "A policy loss was given a micro-batch without advantages.",
            have="advantages=None",
            want="one fp32 advantage per token",
            do="make the examples of the batch with advantages (SFT data has none: use sft_loss)",
        )
    return torch.where(micro.loss_mask, micro.advantages, 0.0)
