"""Formulas with settings of their own: built-in ones, and functions in a user's file."""

from __future__ import annotations

from inspect import get_annotations, signature

import pytest
import torch

from burnish.algorithms import policy_loss
from burnish.algorithms.base import (
    advantages,
    load_advantage,
    load_policy_loss,
)
from burnish.config.algorithm import AdvantageConfig, AlgorithmConfig, PolicyLossConfig, PPOSettings
from burnish.config.section import Section
from burnish.errors import UsageError
from burnish.extend import POLICY_LOSSES

OWN = """
{future}
import burnish
import torch
from pydantic import Field, model_validator

from burnish.algorithms.base import TokenLosses
from burnish.config.algorithm import AlgorithmConfig


class Scale(burnish.Section):
    beta: float = Field(0.5, gt=0)
    '''Factor.'''
    shift: int = 0


class Needed(burnish.Section):
    beta: float


class Odd(burnish.Section):
    beta: float = 1.0

    @model_validator(mode="after")
    def look(self):
        raise LookupError("there is no such thing")


def scaled(logprobs, micro_batch, algorithm, settings: Scale):
    return -settings.beta * logprobs * micro_batch.advantages - algorithm.clip_low


def brief(logprobs, micro_batch, settings: Scale):
    return -settings.beta * logprobs * micro_batch.advantages


def needed(logprobs, micro_batch, settings: Needed):
    return -settings.beta * logprobs


def odd(logprobs, micro_batch, settings: Odd):
    return -logprobs


def annotated(logprobs: torch.Tensor, micro_batch, algorithm: AlgorithmConfig):
    return -logprobs * algorithm.clip_high


def plain(logprobs, micro_batch, algorithm):
    return -logprobs


def defaulted(logprobs, micro_batch, algorithm, beta=2.0):
    return -beta * logprobs


class Called:
    def __call__(self, logprobs, micro_batch, algorithm):
        return -logprobs


called = Called()


def shifted(rollouts, settings: Scale):
    return settings.beta * rollouts.rewards + settings.shift


def unshifted(rollouts):
    return rollouts.rewards
"""


@pytest.fixture(params=["", "from __future__ import annotations"])
def own(request, tmp_path):
    (tmp_path / "own.py").write_text(OWN.replace("{future}", request.param))
    return f"{tmp_path}/own.py"


def loss_of(name: str, make_case, **settings):
    config = AlgorithmConfig(policy_loss={"name": name, **settings}, clip_low=0.25, clip_high=4.0)
    case = make_case(poison=0.0)
    new = case.outputs.logprobs
    return load_policy_loss(config)(new, case.micro).loss, new * case.micro.advantages, new


def test_a_loss_gets_the_settings_beside_its_name(own: str, make_case) -> None:
    loss, product, _ = loss_of(f"{own}:scaled", make_case, beta=3.0)
    torch.testing.assert_close(loss, -3.0 * product - 0.25)
    loss, product, _ = loss_of(f"{own}:brief", make_case)
    torch.testing.assert_close(loss, -0.5 * product)
    loss, _, new = loss_of(f"{own}:needed", make_case, beta=2)
    torch.testing.assert_close(loss, -2.0 * new)


def test_a_loss_without_settings_is_called_as_ever(own: str, make_case) -> None:
    for name, factor in (("annotated", 4.0), ("plain", 1.0), ("defaulted", 2.0), ("called", 1.0)):
        loss, _, new = loss_of(f"{own}:{name}", make_case)
        torch.testing.assert_close(loss, -factor * new)


def test_an_advantage_gets_the_settings_beside_its_name(own: str, scored_of_two) -> None:
    for settings, wanted in (({}, [0.5, 1.0]), ({"beta": 2.0, "shift": 1}, [3.0, 5.0])):
        function = load_advantage(AdvantageConfig(name=f"{own}:shifted", **settings))
        assert advantages(function, scored_of_two).tolist() == wanted


@pytest.fixture
def scored_of_two():
    import numpy as np

    from burnish.algorithms.base import ScoredRollouts

    return ScoredRollouts(np.array([1.0, 2.0]), np.array([0, 0]), np.array([1, 1]))


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"name": "scaled", "beta": -1.0}, ["Scale.beta", "algorithm.policy_loss.beta: -1.0"]),
        ({"name": "scaled", "beta": "x"}, ["Scale.beta", "'x'"]),
        ({"name": "scaled", "shift": 0.5}, ["Scale.shift"]),
        ({"name": "brief", "bta": 1.0}, ["Scale.bta", "did you mean 'beta'"]),
        ({"name": "needed"}, ["Needed.beta", "set algorithm.policy_loss.beta"]),
        ({"name": "odd"}, ["Odd", "LookupError"]),
        ({"name": "plain", "beta": 1.0}, ["plain", "remove algorithm.policy_loss.beta"]),
        ({"name": "defaulted", "beta": 1.0}, ["defaulted", "burnish.Section"]),
        ({"name": "scaled", "beta": 0.0, "shift": "a"}, ["Scale.beta", "Scale.shift"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(own: str, settings: dict, parts: list[str]) -> None:
    config = AlgorithmConfig(policy_loss={**settings, "name": f"{own}:{settings['name']}"})
    with pytest.raises(UsageError) as caught:
        load_policy_loss(config)
    for part in parts:
        assert part in str(caught.value)


def test_settings_of_an_advantage_are_refused_alike(own: str) -> None:
    for name, part in (("shifted", "Scale.gamma"), ("unshifted", "algorithm.advantage.gamma")):
        with pytest.raises(UsageError, match=part):
            load_advantage(AdvantageConfig(name=f"{own}:{name}", gamma=0.9))


def test_the_schema_knows_the_settings_of_every_built_in_loss() -> None:
    for name in POLICY_LOSSES:
        function = getattr(policy_loss, name)
        last = [*signature(function).parameters][-1]
        section = get_annotations(function, eval_str=True)[last]
        declared = None if section is AlgorithmConfig else section
        assert PolicyLossConfig.own_settings.get(name) is declared, name
        assert declared is None or issubclass(declared, Section)


def test_a_built_in_takes_its_settings(make_case) -> None:
    case = make_case(lengths=((2, 30),), spread=1.0)
    low = AlgorithmConfig(policy_loss={"name": "ppo", "dual_clip": 1.01}, clip_low=0.1)
    bounded = load_policy_loss(low)(case.outputs.logprobs, case.micro)
    direct = policy_loss.ppo(case.outputs.logprobs, case.micro, low, PPOSettings(dual_clip=1.01))
    assert torch.equal(bounded.loss, direct.loss)
    assert bounded.clipped_lower.any()
