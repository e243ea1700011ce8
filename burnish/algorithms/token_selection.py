"""Select tokens of high covariance or high entropy, to treat them apart.

All ranks' tokens of a mini-batch are compared.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from burnish.config.algorithm import AlgorithmConfig, ClipCovSettings, KLCovSettings
from burnish.distributed.collectives import gather_rows, total
from burnish.distributed.layout import Layout

_Array = npt.NDArray[np.floating]
_Integers = npt.NDArray[np.integer]
_Keys = npt.NDArray[np.uint64]
_Chosen = npt.NDArray[np.bool_]


def select_tokens(
    logprobs: _Array,
    entropies: _Array,
    advantages: _Array,
    sequences: _Integers,
    config: AlgorithmConfig,
    seed: int,
    layout: Layout,
) -> _Chosen:
    """Choose among this rank's n trained tokens; all arrays are [n]. A sequence's tokens are neighbours. Collective.

    With c_t = (log π(y_t) - mean log π)(A_t - mean A) (arXiv 2505.22617, equation 10) and
    k = `cov_ratio` · N, at least 1, of all ranks' N tokens:

    - clip_cov: k random tokens with `cov_low` < c_t < `cov_high` (equation 11)
    - kl_cov: the k tokens of largest c_t in fp32 (equation 13), of equal ones the first
    - `top_entropy`: that share of tokens, of highest entropy (arXiv 2506.01939, equation 5)
    """
    if config.top_entropy is not None:
        count = int(_sum(np.array([len(entropies)]), layout)[0])
        place = math.ceil((count - 1) * (1 - config.top_entropy))
        keys = _sortable(entropies)
        return keys >= _largest(keys, count - place, layout)[0]
    own = logprobs.astype(np.float64)
    credit = advantages.astype(np.float64)
    numbers, starts, which = np.unique(sequences, return_index=True, return_inverse=True)
    sums = [
        np.bincount(which, weights, len(numbers)) for weights in (np.ones(len(own)), own, credit)
    ]
    tokens, own_sum, credit_sum = gather_rows(numbers, np.stack(sums, axis=1), layout)[1].sum(0)
    covariance = (own - own_sum / max(tokens, 1)) * (credit - credit_sum / max(tokens, 1))
    formula = config.policy_loss
    if formula.name == "kl_cov":
        count = max(1, int(formula.settings_as(KLCovSettings).cov_ratio * tokens))
        return _choose(_sortable(covariance), count, sequences, layout)
    settings = formula.settings_as(ClipCovSettings)
    count = max(1, int(settings.cov_ratio * tokens))
    chosen = np.zeros(len(own), dtype=bool)
    draws = np.zeros(len(own), np.uint64)
    for number, start, size in zip(numbers, starts, np.bincount(which), strict=True):
        rng = np.random.default_rng([seed, number])
        draws[start : start + size] = rng.integers(1 << 32, size=size, dtype=np.uint64)
    between = (covariance > settings.cov_low) & (covariance < settings.cov_high)
    chosen[between] = _choose(draws[between], count, sequences[between], layout)
    return chosen


def _sortable(values: _Array) -> _Keys:
    """Return integers below 2^32 in the same order."""
    bits = (values.astype(np.float32) + np.float32(0)).view(np.uint32)  # adding 0 makes -0 positive
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)


def _choose(keys: _Keys, count: int, sequences: _Integers, layout: Layout) -> _Chosen:
    """Choose the `count` largest keys, of equal ones the first."""
    least, room = _largest(keys, count, layout)
    chosen: _Chosen = keys > least
    equal = np.flatnonzero(keys == least)
    equal = equal[np.argsort(sequences[equal], kind="stable")]
    numbers, counts = np.unique(sequences[equal], return_counts=True)
    all_numbers, sizes = gather_rows(numbers, counts.astype(np.float64), layout)
    before = np.append(sizes.cumsum() - sizes, np.inf)[np.searchsorted(all_numbers, numbers)]
    ranks = np.arange(len(equal)) + np.repeat(before - (counts.cumsum() - counts), counts)
    chosen[equal[ranks < room]] = True
    return chosen


def _largest(keys: _Keys, count: int, layout: Layout) -> tuple[int, int]:
    """Return the `count`-th largest key of all ranks, and how many equal keys to choose."""
    prefix = 0
    remaining = count
    for shift in (24, 16, 8, 0):  # count the next 8 bits of keys that begin with `found`
        equal = keys[keys >> np.uint64(shift + 8) == prefix]
        digits = (equal >> np.uint64(shift)).astype(np.int64) & 255
        bins = _sum(np.bincount(digits, minlength=256), layout)
        reached = bins[::-1].cumsum()[::-1]
        remaining = min(remaining, int(reached[0]))
        digit = int(np.flatnonzero(reached >= remaining)[-1])
        remaining -= int(reached[digit] - bins[digit])
        prefix = prefix << 8 | digit
    return prefix, remaining


def _sum(counts: npt.NDArray[np.int64], layout: Layout) -> npt.NDArray[np.int64]:
    # Peers train on the same tokens, so only the first counts them.
    own = counts if layout.is_first_peer else np.zeros_like(counts)
    return total(torch.from_numpy(own), layout).numpy()
