from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from support.fuzz.configurations import sections
from support.nightly import draws

from burnish.config.keys import known_keys
from burnish.config.load import read_config
from burnish.config.resume import (
    RunIdentity,
    digest,
    settings_difference,
)
from burnish.config.schema import RunConfig
from burnish.errors import IncompatibleError


def with_(*overrides: str) -> RunConfig:
    return read_config(None, overrides)


@pytest.mark.parametrize(
    "override",
    [
        "steps=7",
        "epochs=7",
        "resume=never",
        "name=other",
        "output_dir=other",
        "checkpoint.keep_last=9",
        "tracking.report=false",
        "distributed.timeout_seconds=1",
        "evaluation.every=3",
        "evaluation.temperature=0",
        "data.validation=[a]",
        "batch.tokens_per_device=99",
        "rollout.slots=3",
        "rollout.ahead=3",
        "model.lora.publish=adapter",
        "reward.workers=9",
        "reward.concurrency=9",
        "reward.timeout_seconds=9",
        "engine.reshard_after_forward=false",
        "engine.reduce_each_microbatch=false",
        "engine.logprob_chunk=7",
    ],
)
def test_what_may_change(override: str) -> None:
    assert settings_difference(RunConfig(), with_(override)) == {}
    assert known_keys()[override.partition("=")[0]].may_change
    assert digest(RunConfig()) == digest(with_(override))


@pytest.mark.parametrize(
    ("override", "after"),
    [
        ("seed=1", 1),
        ("optim.lr=1e-3", 1e-3),
        ("optim.betas=[0.9,0.95]", [0.9, 0.95]),
        ("algorithm.kl.coef=0.1", 0.1),
        ("batch.prompts=8", 8),
        ("rollout.temperature=0.5", 0.5),
        (
            "reward.functions=[{function: f}]",
            [{"function": "f", "weight": 1.0, "kwargs": {}, "per_call": None}],
        ),
        ("model.fresh={a: 1}", {"a": 1}),
        ("engine.precision=fp32", "fp32"),
        ("reward.on_error=-1", -1.0),
        ("data.shuffle=false", False),
        ("model.chat_template=x", "x"),
    ],
)
def test_what_makes_another_run(override: str, after: object) -> None:
    other = with_(override)
    (key,) = found = settings_difference(RunConfig(), other)
    before, _ = found[key]
    assert found == {override.partition("=")[0]: (before, after)}
    assert settings_difference(other, RunConfig()) == {key: (after, before)}
    assert digest(RunConfig()) != digest(other)


@draws(30)
@given(one=sections(), other=sections())
def test_digests_agree_exactly_where_nothing_differs(one: RunConfig, other: RunConfig) -> None:
    assert (settings_difference(one, other) == {}) == (digest(one) == digest(other))
    assert settings_difference(one, one) == {}


def test_a_digest_is_64_hex_digits_and_lasting() -> None:
    assert len(digest(RunConfig())) == 64
    assert digest(with_("seed=3", "steps=2")) == digest(with_("steps=5", "seed=3"))


def test_another_runs_directory_is_refused_with_both_values() -> None:
    RunIdentity("rl", with_("steps=3")).require_same(Path("runs/x"), RunConfig())
    with pytest.raises(IncompatibleError) as caught:
        RunIdentity("rl", with_("optim.lr=0.5", "steps=3")).require_same(
            Path("runs/x"), with_("seed=1", "optim.lr=1e-6")
        )
    message = str(caught.value)
    assert caught.value.exit_code == 4
    rows = [line.split() for line in message.splitlines()]
    assert ["setting", "have", "want"] in rows
    assert ["seed", "1", "0"] in rows
    assert ["optim.lr", "1e-06", "0.5"] in rows
    assert "steps" not in message
    assert "runs/x" in message
    assert "name=NAME" in message
