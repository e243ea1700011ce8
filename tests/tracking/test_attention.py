"""What needs attention in a run's numbers, and what does not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.tracking.attention import find_attention, is_due, sentence
from burnish.tracking.curves import Curve

Series = dict[str, Sequence[float]]
SETTINGS = {"optim.lr": 1e-5, "rollout.max_response_length": 24, "steps": 60}


def curves(series: Series) -> dict[str, Curve]:
    made = {}
    for name, values in series.items():
        made[name] = Curve()
        made[name].steps.extend(range(1, len(values) + 1))
        made[name].values.extend(values)
    return made


def keys(series: Series, **settings: Any) -> list[str]:
    return [each.key for each in find_attention(curves(series), SETTINGS | settings)]


def noisy(value: Callable[[int], float], steps: int = 60, noise: float = 0.02) -> list[float]:
    drawn = random.Random(0)
    return [value(step) + drawn.uniform(-noise, noise) for step in range(steps)]


LEARNS: Series = {
    "reward/mean": noisy(lambda n: min(0.95, 0.1 + n / 60)),
    "reward/zero_std_frac": noisy(lambda n: 0.35),
    "response_length/clip_ratio": noisy(lambda n: max(0.05, 0.8 - n / 50)),
    "actor/entropy": noisy(lambda n: 2.0 * 0.93**n, noise=0.001),
    "actor/grad_norm": noisy(lambda n: 1.0, noise=0.8),
    "actor/ppo_kl": noisy(lambda n: 0.0, noise=0.01),
    "rollout/mismatch_kl": noisy(lambda n: 0.001, noise=0.0005),
    "perf/tokens_per_s": noisy(lambda n: 1000.0, noise=300.0),
    "actor/skipped": [0.0] * 60,
    "reward/errors": [0.0] * 60,
}
FITS: Series = {
    "train/loss": noisy(lambda n: 0.5 + 3 * 0.9**n),
    "val/loss": noisy(lambda n: 0.7 + 3 * 0.9**n, 12),
    "train/grad_norm": noisy(lambda n: 3 * 0.9**n + 0.05),
}


@pytest.mark.parametrize("series", [LEARNS, FITS, {}])
def test_a_good_run_needs_none_at_any_step(series: Series) -> None:
    for steps in range(61):
        assert keys({name: values[:steps] for name, values in series.items()}) == []


BAD: dict[str, tuple[Series, str | None]] = {
    "cut_off": ({"response_length/clip_ratio": [0.56] * 20}, "rollout.max_response_length=48"),
    "no_variance": ({"reward/zero_std_frac": [0.75] * 20, "reward/mean": [0.0] * 20}, "algorithm.dynamic_sampling.enabled=true"),
    "constant_reward": ({"reward/zero_std_frac": [1.0] * 3, "reward/mean": [0.5] * 3}, None),
    "reward_falls": ({"reward/mean": noisy(lambda n: min(n, 30) / 40 if n < 45 else 0.05)}, "optim.lr=5e-06"),
    "reward_jumps": ({"reward/mean": noisy(lambda n: 0.2 if n < 55 else 0.8, noise=0.005)}, None),
    "entropy": ({"actor/entropy": noisy(lambda n: 1.0 if n < 20 else 0.01, noise=0.001)}, "algorithm.entropy_coef=0.002"),
    "mismatch": ({"rollout/mismatch_kl": [0.2] * 20}, "algorithm.mismatch_cap=2"),
    "ppo_kl": ({"actor/ppo_kl": [0.3] * 20}, "optim.lr=5e-06"),
    "gradients": ({"train/grad_norm": [1.0, 1.0, 1.0, 1.0, 50.0] * 6}, "optim.lr=5e-06"),
    "skipped": ({"train/skipped": [0.0, 1.0, 0.0]}, "optim.lr=5e-06"),
    "nan_loss": ({"train/loss": [1.0, math.nan]}, "optim.lr=5e-06"),
    "reward_errors": ({"reward/errors": [0.0, 3.0]}, None),
    "overfit": ({"train/loss": [3 * 0.9**n for n in range(40)], "val/loss": [2.0, 1.5, 1.0, 1.1, 1.3]}, "steps=3"),
    "stuck": ({"train/loss": noisy(lambda n: 4.09, 16, 0.001)}, "optim.lr=0.0001"),
    "slow": ({"perf/tokens_per_s": noisy(lambda n: 1000 if n < 40 else 300)}, None),
}  # fmt: skip


@pytest.mark.parametrize("key", BAD)
def test_each_rule_names_its_setting(key: str) -> None:
    series, setting = BAD[key]
    (found,) = find_attention(curves(series), SETTINGS)
    assert (found.key, found.setting) == (key, setting)
    assert found.metric in series
    assert found.step == len(series[found.metric])
    assert (setting or found.also or "") in sentence(found)


def test_noise_is_no_fall() -> None:
    for noise in (0.0, 0.05, 0.15):
        shares = noisy(lambda n: 0.75, noise=noise)
        assert keys({"response_length/clip_ratio": shares}) == ["cut_off"]
    falling = noisy(lambda n: 0.9 - n / 100, noise=0.05)
    assert keys({"response_length/clip_ratio": falling}) == []


def test_what_the_aim_is_or_what_is_set_already_needs_none() -> None:
    solved = {"reward/mean": [0.94, 0.96] * 15}
    assert keys(solved | {"reward/zero_std_frac": [1.0] * 30}) == []
    assert keys(solved | {"actor/entropy": [1.0] * 5 + [0.01] * 25}) == []
    groups = {"reward/zero_std_frac": [0.75] * 30}
    assert keys(groups, **{"algorithm.dynamic_sampling.enabled": True}) == []
    assert keys({"train/loss": [4.0] * 30}, **{"optim.warmup_steps": 20}) == []


@given(
    st.dictionaries(
        st.sampled_from([name for series, _ in BAD.values() for name in series]),
        st.lists(st.floats() | st.floats(0, 1), max_size=80),
    ),
    st.dictionaries(st.sampled_from([*SETTINGS, "optim.warmup_steps"]), st.sampled_from([None, 1, 0, 1e-6, "10%"])),
)  # fmt: skip
def test_any_numbers_and_settings_are_read(series: Series, settings: dict[str, Any]) -> None:
    settings["steps"] = 60 if settings.get("steps") else None
    for found in find_attention(curves(series), settings):
        assert sentence(found)


def test_looks_become_rare() -> None:
    assert all(map(is_due, range(1, 100)))
    assert sum(map(is_due, range(1, 10_001))) < 500
