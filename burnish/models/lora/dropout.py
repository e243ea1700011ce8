"""Drop inputs of an adapter's layers (Srivastava et al. 2014), as PEFT's `lora_dropout` does.

    y = W x + s B A (m ⊙ x) / (1 - p),    P(m = 0) = p

PEFT draws m from a random state. Here m is a function of the run's seed, the step, the tokens up to this one, the layer and the
input's number. So recomputation, another layout and a resumed run drop the same inputs, and a common prompt is still computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from burnish.distributed.device import uncompiled
from burnish.errors import IncompatibleError
from burnish.models.packing import Indices
from burnish.records.seeds import derive_seed

_BLOCK_ELEMENTS = 1 << 22
"""Inputs whose numbers are mixed at one time."""
# Odd constants of MurmurHash3 and SplitMix64.
_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class TokenDropout(nn.Module):
    """Drop a share of a layer's inputs while the module is in training mode."""

    def __init__(self, share: float, layer: str, features: int) -> None:
        super().__init__()
        self.share = share
        self.layer = layer
        self.features: Sequence[range] = (range(features),)
        """The numbers of the inputs that this rank holds."""
        self.tokens: Tensor | None = None
        """[T] int32, the `token_keys` of the pass that runs now."""
        self._columns: Tensor | None = None

    @uncompiled
    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs [..., features], those kept scaled by 1 / (1 - share).

        Raises `IncompatibleError` if the layer does not see every token once.
        """
        if not self.training:
            return inputs
        rows = inputs.flatten(0, -2)
        if self.tokens is None or len(self.tokens) != len(rows):
            raise IncompatibleError(
                f"model.lora.dropout does not know which tokens {self.layer} sees",
                have=f"{len(rows)} rows, {0 if self.tokens is None else len(self.tokens)} tokens",
                want="a layer that sees every token once",
                do="set model.lora.dropout=0, or take the layer out of model.lora.targets",
            )
        if self._columns is None:
            self._columns = _column_keys(self.layer, self.features).to(inputs.device)
        dropped = dropped_inputs(self.tokens, self._columns, self.share).view_as(inputs)
        return inputs.masked_fill(dropped, 0.0) / (1.0 - self.share)


def token_keys(token_ids: Indices, lengths: Sequence[int], seed: int) -> Indices:
    """Return a number of 32 bits for each token of packed sequences, from `seed` and the sequence's tokens up to it."""
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(len(token_ids)) - np.repeat(starts, lengths)
    powers = np.multiply.accumulate(np.full(max(lengths, default=0), _GOLDEN))
    # A polynomial in an odd number, modulo 2^64: the sum up to a token is that of all tokens less that of earlier sequences.
    sums = np.cumsum(_split_mixed(token_ids.astype(np.uint64)) * powers[positions])
    before = np.concatenate(([np.uint64(0)], sums))[starts]
    prefixes = sums - np.repeat(before, lengths)
    mixed = _split_mixed(_split_mixed(prefixes) ^ np.uint64(seed))
    return (mixed >> np.uint64(32)).astype(np.uint32).view(np.int32).astype(np.int64)


def _split_mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of each number (SplitMix64, Steele et al. 2014)."""
    mixed = numbers + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _column_keys(layer: str, features: Sequence[range]) -> Tensor:
    numbers = np.fromiter(chain.from_iterable(features), np.uint64)
    mixed = _split_mixed(numbers ^ np.uint64(derive_seed(0, "dropout", layer)))
    return torch.from_numpy((mixed >> np.uint64(32)).astype(np.uint32).view(np.int32))


def dropped_inputs(tokens: Tensor, columns: Tensor, share: float) -> Tensor:
    """Return which inputs are dropped, bool [T, C], for keys [T] and [C], int32."""
    dropped = torch.empty((len(tokens), len(columns)), dtype=torch.bool, device=tokens.device)
    limit = min(round(share * 2**32), 2**32 - 1) - 2**31
    step = max(1, _BLOCK_ELEMENTS // max(1, len(columns)))
    for start in range(0, len(tokens), step):
        rows = slice(start, start + step)
        mixed = tokens[rows, None] ^ columns
        for factor, shift in zip(_FACTORS, (13, 16), strict=True):
            mixed.mul_(factor - 2**32)
            mixed.bitwise_xor_((mixed >> shift) & (2 ** (32 - shift) - 1))
        torch.lt(mixed, limit, out=dropped[rows])
    return dropped
