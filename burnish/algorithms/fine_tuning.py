"""Losses of supervised fine-tuning. Each function takes log π of a micro-batch's tokens, [T] fp32, and returns their losses, [T]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from burnish.algorithms.aggregation import aggregation
from burnish.algorithms.base import tried_loss
from burnish.extend import FINE_TUNING_LOSSES
from burnish.functions import load_function
from burnish.records import MicroBatch, TokenOutputs
from burnish.tracking.stats import Stats, Sum


def token_nll(logprobs: Tensor, micro: MicroBatch) -> Tensor:
    """-log π(y_t), the negative log-likelihood."""
    return -logprobs


def dft(logprobs: Tensor, micro: MicroBatch) -> Tensor:
    """-sg(π(y_t)) log π(y_t): tokens that the model finds unlikely weigh less (DFT, arXiv 2508.05629, equation 9)."""
    return -logprobs.detach().exp() * logprobs


def sft_loss(
    name: str = "nll", smoothing: float = 0.0
) -> Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Stats]]:
    """Return Σ_t m_t w_t ℓ_t / (loss tokens of the global batch), with the loss ℓ that `name` names and the weights w.

    With `smoothing` ε, ℓ has the share 1 - ε, and ε the mean of -log π over the vocabulary, which the engine has computed
    (`burnish.models.divergence.UniformReference`).

    Statistics: `tokens`, the number of loss tokens; and `nll`, the mean of -log π without weights, where ℓ is another loss.

    Raises `UsageError` for a name that is unknown, or a user's function that fails on made-up tokens.
    """
    function = load_function(name, "method.loss", FINE_TUNING_LOSSES)
    token_losses = tried_loss(function, name, "method.loss", FINE_TUNING_LOSSES)

    def loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        mean = aggregation("token_mean", micro, 1)
        logprobs = torch.where(micro.loss_mask, outputs.logprobs.float(), 0.0)
        losses = token_losses(logprobs, micro).loss
        stats = Stats({"tokens": Sum(mean.local_units)})
        if name != "nll" or smoothing:
            stats["nll"] = mean.mean_of(mean(-logprobs.detach()))
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * outputs.probed
        if micro.weights is not None:
            losses = losses * micro.weights
        return mean(losses), stats

    return loss
