"""Select tokens of high covariance or high entropy, to treat them apart.

All ranks' tokens of a mini-batch are compared, so the cut does not change the choice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from burnish.config.schema import AlgorithmConfig

_Array = npt.NDArray[np.floating]
_Chosen = npt.NDArray[np.bool_]


def select_tokens(
    logprobs: _Array, entropies: _Array, advantages: _Array, config: AlgorithmConfig, seed: int
) -> _Chosen:
    """Choose among N trained tokens, in a fixed order; all arrays are [N].

    With c_t = (log π(y_t) - mean log π)(A_t - mean A) (arXiv 2505.22617, equation 10) and
    k = `cov_ratio` · N, at least 1:

    - clip_cov: k random tokens with `cov_low` < c_t < `cov_high` (equation 11)
    - kl_cov: the k tokens of largest c_t (equation 13)
    - `top_entropy`: that share of tokens, of highest entropy (arXiv 2506.01939, equation 5)
    """
    chosen = np.zeros(len(logprobs), dtype=bool)
    if not len(logprobs):
        return chosen
    if config.top_entropy is not None:
        threshold = np.quantile(entropies, 1 - config.top_entropy)
        selected: _Chosen = entropies >= threshold
        return selected
    own, credit = logprobs.astype(np.float64), advantages.astype(np.float64)
    covariance = (own - own.mean()) * (credit - credit.mean())
    count = max(1, int(config.cov_ratio * len(own)))
    if config.policy_loss == "kl_cov":
        chosen[np.argsort(-covariance, kind="stable")[:count]] = True
        return chosen
    candidates = np.flatnonzero((covariance > config.cov_low) & (covariance < config.cov_high))
    chosen[np.random.default_rng(seed).permutation(candidates)[:count]] = True
    return chosen
