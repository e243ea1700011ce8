from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from contracts.generator import warped
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws

from burnish.rollout.base import Sampling
from burnish.rollout.builtin.sampling import draw, uniforms

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.8, "min_p": 0.15},
]


def numbers(count: int, key: int = 11) -> torch.Tensor:
    return uniforms(torch.full((count,), key), torch.arange(count))


@pytest.mark.parametrize("options", OPTIONS)
def test_frequencies_are_the_probabilities(options: dict[str, Any]) -> None:
    """Chi-square against the exact distribution; the bound is 5 standard deviations."""
    torch.manual_seed(0)
    logits, count = torch.randn(1, 11) * 1.5, 40_000
    sampling = Sampling(1, **options)
    want = warped(logits, sampling).exp()[0].double().numpy()
    drawn = draw(logits.repeat(count, 1), sampling, numbers(count)).tokens.numpy()
    seen = np.bincount(drawn, minlength=11)
    assert seen[want == 0].sum() == 0
    kept = want > 0
    chi_square = ((seen - count * want)[kept] ** 2 / (count * want[kept])).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@draws(60)
@given(
    vocab=st.integers(1, 400),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 450),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.9),
    seed=st.integers(0, 1000),
)
def test_only_kept_tokens_with_their_log_probs(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Against transformers' warpers, on logits that leave no token at the border by a hair."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(16, vocab)) * 3).float()
    sampling = Sampling(1, temperature, min(top_k, vocab), top_p, min_p)
    exact = warped(logits.double(), sampling)
    near = warped(
        logits.double(),
        Sampling(1, temperature, min(top_k, vocab), top_p * 0.99999, min_p * 1.00001),
    )
    unsure = (exact.isneginf() != near.isneginf()).any(-1)
    drawn = draw(logits.clone(), sampling, numbers(16, seed))
    found = exact.gather(1, drawn.tokens[:, None])[:, 0].float()
    raw = logits.log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, raw, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(
        drawn.sampled_logprobs[~unsure], found[~unsure], atol=5e-5, rtol=1e-5
    )


@draws(60)
@given(vocab=st.integers(1, 300), seed=st.integers(0, 1000))
def test_the_token_is_where_the_running_sum_passes_the_number(vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(8, vocab)) * 2).float()
    logits[rng.random((8, vocab)) < 0.3] = -torch.inf
    logits[:, seed % vocab] = 0.0
    u = torch.from_numpy(rng.random(8))
    cdf = logits.double().softmax(-1).cumsum(-1)
    tokens = draw(logits.clone(), Sampling(1), u).tokens[:, None]
    before = torch.where(tokens > 0, cdf.gather(1, (tokens - 1).clamp(min=0)), 0.0)
    assert (cdf.gather(1, tokens)[:, 0] >= u - 1e-6).all()
    assert (before[:, 0] <= u + 1e-6).all()


@pytest.mark.parametrize("vocab", [5, 64, 200])
def test_the_ends_of_the_number_line_hit_only_tokens_that_have_mass(vocab: int) -> None:
    logits = torch.full((2, vocab), -torch.inf)
    logits[:, 2:4] = 1.0
    u = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    drawn = draw(logits, Sampling(1), u)
    assert drawn.tokens.tolist() == [2, 3]
    torch.testing.assert_close(drawn.logprobs, torch.full((2,), -float(np.log(2))))


def test_tokens_tied_at_the_border_stay_together() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0]).repeat(4000, 1)
    for options in ({"top_k": 2}, {"top_p": 0.6}):
        drawn = draw(logits.clone(), Sampling(1, **options), numbers(4000))
        assert set(drawn.tokens.tolist()) == {0, 1, 2}


def test_greedy_takes_the_first_of_the_most_probable() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    want = logits.log_softmax(-1)
    drawn = draw(logits.clone(), Sampling(1, temperature=0.0), numbers(2))
    assert drawn.tokens.tolist() == [1, 0]
    assert drawn.sampled_logprobs.tolist() == [0.0, 0.0]
    torch.testing.assert_close(drawn.logprobs, torch.stack((want[0, 1], want[1, 0])))


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_nan_gives_nan_and_a_valid_id(options: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0], [0.0, 1.0, 2.0]])
    drawn = draw(logits, Sampling(1, **options), numbers(2))
    assert bool(((drawn.tokens >= 0) & (drawn.tokens < 3)).all())
    assert drawn.logprobs.isnan().tolist() == [True, False]
