"""Packed micro-batches of random numbers, and a loop-wise view of them for slow transcriptions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from burnish.records import MicroBatch, TokenOutputs


@dataclass
class Case:
    """A micro-batch, the model's outputs for it, and which tokens belong to which sequence."""

    micro: MicroBatch
    outputs: TokenOutputs

    def sequences(self) -> Iterator[list[int]]:
        """Loss token indices of each sequence, one after another, in plain Python."""
        bounds = self.micro.cu_seqlens.tolist()
        mask = self.micro.loss_mask.tolist()
        for start, end in itertools.pairwise(bounds):
            yield [t for t in range(start, end) if mask[t]]


CaseMaker = Callable[..., Case]


@pytest.fixture
def make_case() -> CaseMaker:
    return _make_case


def _make_case(
    lengths: tuple[tuple[int, int], ...] = ((2, 5), (1, 1), (3, 0), (4, 9)),
    seed: int = 0,
    spread: float = 0.5,
    poison: float = float("nan"),
) -> Case:
    """(prompt, completion) lengths; everything that is not trained on holds `poison`."""
    rng = np.random.default_rng(seed)
    mask = np.concatenate([[False] * prompt + [True] * done for prompt, done in lengths])
    sizes = [prompt + done for prompt, done in lengths]
    total = int(sum(sizes))

    def tokens(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(np.where(mask, values, poison), dtype=torch.float32)

    logprobs = -rng.exponential(size=total)
    micro = MicroBatch(
        input_ids=torch.zeros(total, dtype=torch.int64),
        cu_seqlens=torch.tensor(np.concatenate([[0], np.cumsum(sizes)]), dtype=torch.int32),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        # The global batch is larger than this micro-batch.
        num_tokens=int(mask.sum()) + 11,
        num_sequences=sum(done > 0 for _, done in lengths) + 2,
        advantages=tokens(rng.normal(size=total)),
        old_logprobs=tokens(logprobs + rng.normal(scale=spread, size=total)),
        ref_logprobs=tokens(logprobs + rng.normal(scale=spread, size=total)),
    )
    outputs = TokenOutputs(
        logprobs=tokens(logprobs).requires_grad_(),
        entropy=tokens(rng.uniform(0, 3, total)).requires_grad_(),
    )
    return Case(micro, outputs)
