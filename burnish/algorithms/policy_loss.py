"""Policy losses by token, with r_t = π(y_t) / π_old(y_t) and advantages A_t.

sg stops the gradient, σ is the logistic function. Masked tokens reach neither loss nor gradient.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from burnish.algorithms.aggregation import sequence_means, to_tokens
from burnish.algorithms.base import LOG_RATIO_BOUND, TokenLosses, log_ratio, old_logprobs
from burnish.config.algorithm import (
    AlgorithmConfig,
    ClipCovSettings,
    KLCovSettings,
    PPOSettings,
    SAPOSettings,
)
from burnish.records import MicroBatch


def ppo(
    logprobs: Tensor, micro: MicroBatch, config: AlgorithmConfig, settings: PPOSettings
) -> TokenLosses:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7) with DAPO's two bounds (arXiv 2503.14476, equation 8).

    ℓ_t = -min(r_t A_t, clip(r_t, 1 - `clip_low`, 1 + `clip_high`) A_t).
    With `dual_clip` c (arXiv 1912.09729, equation 5), where A_t < 0:  ℓ_t = -max(that minimum, c A_t).
    """
    advantages = _advantages(micro)
    ratios = log_ratio(logprobs, micro)
    loss, clipped = _clipped_surrogate(_bounded(ratios).exp(), advantages, config)
    clipped_lower = torch.zeros_like(clipped)
    if settings.dual_clip is not None:
        bound = -advantages * settings.dual_clip
        clipped_lower = (advantages < 0) & (loss > bound)
        loss = torch.where(clipped_lower, bound, loss)
    return TokenLosses(loss, clipped, clipped_lower)


def gspo(logprobs: Tensor, micro: MicroBatch, config: AlgorithmConfig) -> TokenLosses:
    """Group sequence policy optimisation in its token form (arXiv 2507.18071, equations 13 and 14).

    ℓ_t is as in `ppo`, with s_t = sg[s] · π(y_t) / sg[π(y_t)] for r_t and s = exp(1/|y| Σ_t log r_t).
    With aggregation sequence_mean and one advantage per sequence, it equals equation 5.
    """
    ratios = log_ratio(logprobs, micro)
    sequence_ratio = _bounded(sequence_means(ratios.detach(), micro)).exp()
    # ratios minus itself: 0 in value, ∇ log π in gradient, and safe at masked tokens.
    ratio = to_tokens(sequence_ratio, micro) * (ratios - ratios.detach()).exp()
    return TokenLosses(*_clipped_surrogate(ratio, _advantages(micro), config))


def cispo(logprobs: Tensor, micro: MicroBatch, config: AlgorithmConfig) -> TokenLosses:
    """Clipped importance sampling weights (MiniMax-M1, arXiv 2506.13585, equations 4 and 5).

    ℓ_t = -sg[clip(r_t, 1 - `clip_low`, 1 + `clip_high`)] A_t log π(y_t), so every token keeps a gradient.
    """
    ratio = _bounded(log_ratio(logprobs, micro).detach()).exp()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLosses(-weight * _advantages(micro) * _safe(logprobs, micro), weight != ratio)


def sapo(logprobs: Tensor, micro: MicroBatch, settings: SAPOSettings) -> TokenLosses:
    """Soft adaptive policy optimisation (SAPO, arXiv 2511.20347, equations 5 and 6).

    ℓ_t = -4/τ · σ(τ (r_t - 1)) A_t, τ = `temperature_pos` where A_t > 0, else `temperature_neg`.
    """
    advantages = _advantages(micro)
    ratios = log_ratio(logprobs, micro)
    tau = torch.where(advantages > 0, settings.temperature_pos, settings.temperature_neg)
    gate = torch.sigmoid(tau * (_bounded(ratios).exp() - 1)) * 4 / tau
    return TokenLosses(-gate * advantages)


def gmpo(logprobs: Tensor, micro: MicroBatch, config: AlgorithmConfig) -> TokenLosses:
    """Geometric-mean policy optimisation in a token form (GMPO, arXiv 2507.20673, equation 4).

    c_t = min(log r_t, `clip_high`) where A_t > 0, else max(log r_t, -`clip_low`): the clip range bounds log-ratios.
    s = exp(1/|y| Σ_t c_t), s_t = sg[s] · exp(c_t - sg[c_t]), ℓ_t = -s_t A_t. It equals the paper's where `gspo` does.
    """
    advantages = _advantages(micro)
    ratios = log_ratio(logprobs, micro)
    bounded = torch.where(
        advantages > 0, ratios.clamp(max=config.clip_high), ratios.clamp(min=-config.clip_low)
    )
    sequence_ratio = _bounded(sequence_means(bounded.detach(), micro)).exp()
    ratio = to_tokens(sequence_ratio, micro) * (bounded - bounded.detach()).exp()
    return TokenLosses(-ratio * advantages, bounded.detach() != ratios.detach())


def dppo_tv(logprobs: Tensor, micro: MicroBatch, config: AlgorithmConfig) -> TokenLosses:
    """Divergence PPO with the binary total variation (DPPO, arXiv 2602.04879).

    ℓ_t = -r_t A_t, with D_t = |π(y_t) - π_old(y_t)|. It is 0 if D_t > `clip_high` with A_t > 0 and
    r_t > 1, or D_t > `clip_low` with A_t < 0 and r_t < 1.
    """
    old = _safe(old_logprobs(logprobs, micro), micro).exp()
    new = _safe(logprobs.detach(), micro).exp()
    return _masked_by_divergence(logprobs, micro, (new - old).abs(), config)


def dppo_kl(logprobs: Tensor, micro: MicroBatch, config: AlgorithmConfig) -> TokenLosses:
    """`dppo_tv` with the binary KL (DPPO, arXiv 2602.04879).

    D_t = p log(p/q) + (1 - p) log((1 - p)/(1 - q)), p = π_old(y_t), q = π(y_t).
    """
    old = _safe(old_logprobs(logprobs, micro), micro)
    new = _safe(logprobs.detach(), micro)
    p = old.exp()
    rest, rest_old = ((-torch.expm1(logs)).clamp(min=1e-8) for logs in (new, old))
    divergence = p * (old - new) + (1 - p) * (rest_old.log() - rest.log())
    return _masked_by_divergence(logprobs, micro, divergence, config)


def clip_cov(
    logprobs: Tensor, micro: MicroBatch, config: AlgorithmConfig, settings: ClipCovSettings
) -> TokenLosses:
    """PPO's loss, 0 at `MicroBatch.selected` (Clip-Cov, arXiv 2505.22617, equation 12)."""
    tokens = ppo(logprobs, micro, config, settings)
    selected = micro.given("selected")
    loss = torch.where(selected, 0.0, tokens.loss)
    return replace(
        tokens, loss=loss, clipped=selected if tokens.clipped is None else tokens.clipped | selected
    )


def kl_cov(logprobs: Tensor, micro: MicroBatch, settings: KLCovSettings) -> TokenLosses:
    """ℓ_t = -r_t A_t, plus `cov_penalty` · |log r_t| at `MicroBatch.selected` (KL-Cov, arXiv 2505.22617, equation 14)."""
    ratios = log_ratio(logprobs, micro)
    loss = -_bounded(ratios).exp() * _advantages(micro)
    selected = micro.given("selected")
    return TokenLosses(
        loss + torch.where(selected, settings.cov_penalty * ratios.abs(), 0.0), selected
    )


def _masked_by_divergence(
    logprobs: Tensor, micro: MicroBatch, divergence: Tensor, config: AlgorithmConfig
) -> TokenLosses:
    advantages = _advantages(micro)
    ratios = log_ratio(logprobs, micro)
    up = (advantages > 0) & (ratios > 0) & (divergence > config.clip_high)
    down = (advantages < 0) & (ratios < 0) & (divergence > config.clip_low)
    masked = up | down
    return TokenLosses(torch.where(masked, 0.0, -_bounded(ratios).exp() * advantages), masked)


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return torch.maximum(plain, bounded), bounded > plain


def _safe(logprobs: Tensor, micro: MicroBatch) -> Tensor:
    return torch.where(micro.loss_mask, logprobs.float(), 0.0)


def _bounded(ratios: Tensor) -> Tensor:
    return ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _advantages(micro: MicroBatch) -> Tensor:
    return torch.where(micro.loss_mask, micro.given("advantages"), 0.0)
