"""Each loss of preferences against its paper's formula in numpy, and its gradient against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy import exp, log

from burnish.algorithms.preferences import LabelledAnswers, Side, answer_loss, kto, pair_loss
from burnish.config.preferences import PreferenceSettings
from burnish.extend import ANSWER_LOSSES, PREFERENCE_LOSSES
from burnish.functions import load_function
from burnish.records import MicroBatch, TokenOutputs

LENGTHS = np.array([[3.0, 5.0], [1.0, 4.0], [6.0, 2.0]])
"""Tokens of the chosen and of the rejected answers."""


def sigmoid(x: Any) -> Any:
    return 1 / (1 + exp(-x))


def smoothed(x: Any, s: PreferenceSettings) -> Any:
    e = s.label_smoothing
    return -(1 - e) * log(sigmoid(x)) - e * log(sigmoid(-x))


def odds(p: Any) -> Any:
    return log(exp(p) / (1 - exp(p)))


FORMULAS: dict[str, Any] = {
    "sigmoid": lambda r, p, s: smoothed(s.beta * (r[0] - r[1]), s),
    "ipo": lambda r, p, s: (r[2] - r[3] - 1 / (2 * s.beta)) ** 2,
    "hinge": lambda r, p, s: np.maximum(0, 1 - s.beta * (r[0] - r[1])),
    "simpo": lambda r, p, s: smoothed(s.beta * (p[0] - p[1]) - s.simpo_gamma, s),
    "orpo": lambda r, p, s: -log(sigmoid(odds(p[0]) - odds(p[1]))),
    "apo_zero": lambda r, p, s: 1 - sigmoid(s.beta * r[0]) + sigmoid(s.beta * r[1]),
    "apo_down": lambda r, p, s: sigmoid(s.beta * r[0]) + 1 - sigmoid(s.beta * (r[0] - r[1])),
    "robust": lambda r, p, s: (
        (
            -(1 - s.label_smoothing) * log(sigmoid(s.beta * (r[0] - r[1])))
            + s.label_smoothing * log(sigmoid(s.beta * (r[1] - r[0])))
        )
        / (1 - 2 * s.label_smoothing)
    ),
    "nll": lambda r, p, s: -p[0],
}
"""By the log-ratios of chosen and rejected answers, those per token, log-probs per token, and settings."""


def by_formula(name: str, policy: Any, reference: Any, settings: PreferenceSettings) -> Any:
    ratios = policy - reference
    means = ratios / LENGTHS
    used = means if settings.length_normalized else ratios
    per_token = policy / LENGTHS
    columns = [used[:, 0], used[:, 1], means[:, 0], means[:, 1]]
    return FORMULAS[name](columns, (per_token[:, 0], per_token[:, 1]), settings)


def test_every_loss_has_a_formula() -> None:
    assert FORMULAS.keys() == PREFERENCE_LOSSES.keys()


@pytest.mark.parametrize("length_normalized", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_it_is_the_formula_with_its_gradient(name: str, length_normalized: bool) -> None:
    settings = PreferenceSettings(
        beta=0.3, label_smoothing=0.1, length_normalized=length_normalized
    )
    draw = np.random.default_rng(1)
    policy, reference = -LENGTHS * draw.uniform(0.1, 2.0, (2, 3, 2))
    tensor = torch.tensor(policy, requires_grad=True)
    sides = [
        Side(tensor[:, i], torch.tensor(reference[:, i]), torch.tensor(LENGTHS[:, i]))
        for i in (0, 1)
    ]
    loss = load_function(name, "method.loss", PREFERENCE_LOSSES)(*sides, settings)
    np.testing.assert_allclose(
        loss.detach(), by_formula(name, policy, reference, settings), rtol=1e-12
    )
    loss.sum().backward()
    step = 1e-6
    for place in np.ndindex(policy.shape):
        moved = np.zeros_like(policy)
        moved[place] = step
        ends = [by_formula(name, policy + d, reference, settings).sum() for d in (moved, -moved)]
        slope = (ends[0] - ends[1]) / (2 * step)
        assert tensor.grad is not None
        assert float(tensor.grad[place]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_a_margin_counts_as_so_much_less_of_a_lead() -> None:
    """m is subtracted from β (r_c - r_l), or of simpo from β times the difference of means. Other losses do not read it."""
    settings = PreferenceSettings(beta=0.3, label_smoothing=0.1)
    draw = np.random.default_rng(2)
    policy, reference = -LENGTHS * draw.uniform(0.1, 2.0, (2, 3, 2))
    margins = np.array([0.5, 0.0, 2.0])
    reads = {"sigmoid", "hinge", "robust", "simpo"}
    for name in PREFERENCE_LOSSES:
        sides = [
            Side(
                *(torch.tensor(each[:, i]) for each in (policy, reference, LENGTHS)),
                torch.tensor(margins),
            )
            for i in (0, 1)
        ]
        loss = load_function(name, "method.loss", PREFERENCE_LOSSES)(*sides, settings)
        behind = policy.copy()
        if name in reads:
            behind[:, 0] -= margins / settings.beta * (LENGTHS[:, 0] if name == "simpo" else 1.0)
        wanted = by_formula(name, behind, reference, settings)
        np.testing.assert_allclose(loss, wanted, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("kl", [0.0, 0.7])
def test_kto_is_the_formula_with_its_gradient(kl: float) -> None:
    assert ANSWER_LOSSES.keys() == {"kto"}
    settings = PreferenceSettings(beta=0.3, desirable_weight=0.8, undesirable_weight=1.5)
    draw = np.random.default_rng(1)
    lengths = LENGTHS.ravel()
    policy, reference = -lengths * draw.uniform(0.1, 2.0, (2, 6))
    labels = np.array([1.0, -1.0, 1.0, 1.0, -1.0, 0.0])  # the last one is filler
    tensor = torch.tensor(policy, requires_grad=True)
    others = [torch.tensor(each) for each in (reference, lengths, labels)]
    loss = kto(LabelledAnswers(tensor, *others), kl, settings)

    def by_paper(policy: Any) -> Any:
        z = settings.beta * (policy - reference - kl)
        good = settings.desirable_weight * (1 - sigmoid(z))
        bad = settings.undesirable_weight * (1 - sigmoid(-z))
        return np.where(labels > 0, good, np.where(labels < 0, bad, 0.0))

    np.testing.assert_allclose(loss.detach(), by_paper(policy), rtol=1e-7)  # weights are fp32
    loss.sum().backward()
    step = 1e-6
    assert tensor.grad is not None
    for place in range(len(policy)):
        moved = np.zeros_like(policy)
        moved[place] = step
        ends = [by_paper(policy + d).sum() for d in (moved, -moved)]
        slope = (ends[0] - ends[1]) / (2 * step)
        assert float(tensor.grad[place]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_filler_adds_nothing_and_has_a_gradient() -> None:
    micro = MicroBatch(
        input_ids=torch.zeros(2, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        loss_mask=torch.zeros(2, dtype=torch.bool),
        num_tokens=8,
        num_sequences=4,
    )
    logprobs = torch.full((2,), torch.nan, requires_grad=True)
    for made, names in ((pair_loss, PREFERENCE_LOSSES), (answer_loss, ANSWER_LOSSES)):
        settings = PreferenceSettings(loss=dict.fromkeys(names, 1.0))
        loss, stats = made(settings)(TokenOutputs(logprobs=logprobs), micro)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() == 0.0
        assert logprobs.grad is not None
        assert not logprobs.grad.any()
        assert stats["accuracy"].count == 0  # type: ignore[union-attr]
