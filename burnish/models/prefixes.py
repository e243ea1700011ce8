"""Sequences that begin alike are computed once as far as they are alike.

The samples of a prompt share the prompt, conversations share a system message, and a policy that has
become sure repeats whole answers. In a causal model a token's hidden state depends on the tokens up
to it and nothing else, so packed sequences form a tree (a trie), and each of its nodes is one row of
the forward and backward pass. Only attention still goes through every sequence from root to leaf.
Results and gradients are those of the sequences one by one, up to rounding.

Left out: sharing across micro-batches, and attention kernels that read a shared prefix once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from burnish.models.rows import Indices

_WORTHWHILE = 8
"""The tree is used where it saves a token in so many; below, taking rows costs more than it saves."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Which tokens of packed sequences are computed, and which of those each token is. T tokens, C computed."""

    computed: Indices
    """[C], the packed tokens that are computed, ascending."""
    rows: Indices
    """[T], for each packed token its place among the computed ones."""
    leaves: tuple[int, ...]
    """The sequences that are not the beginning of another one, in order."""

    @classmethod
    def of(cls, token_ids: Indices, lengths: Sequence[int]) -> PrefixTree:
        """The tree of sequences of these `lengths`, laid end to end in `token_ids` [T], where it is worthwhile."""
        tree = cls._merged(token_ids, lengths)
        saved = len(token_ids) - len(tree.computed)
        return tree if saved * _WORTHWHILE >= len(token_ids) else cls.trivial(lengths)

    @classmethod
    def trivial(cls, lengths: Sequence[int]) -> PrefixTree:
        """Every token on its own."""
        everything = np.arange(sum(lengths))
        return cls(everything, everything, tuple(range(len(lengths))))

    @classmethod
    def _merged(cls, token_ids: Indices, lengths: Sequence[int]) -> PrefixTree:
        ends = np.cumsum(lengths)
        sequences = np.split(token_ids, ends[:-1])
        keys = [sequence.astype(">i8").tobytes() for sequence in sequences]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        same = np.arange(len(token_ids))  # for each token the first in sorted order that it equals
        leaves = set(order)
        for earlier, later in pairwise(order):
            common = _common(sequences[earlier], sequences[later])
            begin, start = ends[earlier] - lengths[earlier], ends[later] - lengths[later]
            same[start : start + common] = same[begin : begin + common]
            if common == lengths[earlier]:
                leaves.discard(earlier)
        computed, rows = np.unique(same, return_inverse=True)
        return cls(computed, rows, tuple(sorted(leaves)))


def _common(one: Indices, other: Indices) -> int:
    """How many leading tokens are equal."""
    shorter = min(len(one), len(other))
    different = one[:shorter] != other[:shorter]
    return int(different.argmax()) if different.any() else shorter
