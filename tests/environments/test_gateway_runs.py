"""Training with agents that speak HTTP: it ends in the weights of the same conversations with an environment."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from environments.test_runs import RL
from support.runs.same_runs import assert_same
from support.runs.training_files import At, burnish, done, metrics, outcome, rollouts, weights

CALLERS = Path(__file__).with_name("callers.py")
ENVIRONMENT = next(part for part in RL if part.startswith("rollout.environment.function"))
AGENT = [part for part in RL if part != ENVIRONMENT]
AGENT += [f"rollout.environment.agent={CALLERS}:capitals"]


@pytest.mark.nightly
def test_a_run_with_an_agent_ends_as_one_with_an_environment(work):
    theirs = done(work, *RL, "name=direct")
    ours = done(work, *AGENT, "name=gateway")
    found = weights(ours)
    for name, tensor in weights(theirs).items():
        assert torch.equal(found[name], tensor), name
    for numbers, wanted in zip(metrics(ours), metrics(theirs), strict=True):
        assert {name: numbers[name] for name in wanted} == wanted
    for mine, other in zip(rollouts(ours, 4), rollouts(theirs, 4), strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine["reward"] == other["reward"]
    assert metrics(ours)[-1]["environment/branches"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize(("nth", "ahead"), [(2, 0), (9, 1)])
def test_a_killed_run_with_agents_ends_in_the_same_weights(work, nth, ahead):
    settings = [*AGENT, "checkpoint.save_every=1", f"rollout.ahead={ahead}"]
    whole = done(work, *settings, f"name=whole_{ahead}")
    argv = [*settings, f"name=killed_{nth}"]
    place = "burnish.environments.pool:EnvironmentPool.step"
    code, _ = burnish(work, *argv, at=At(place, nth, signal.SIGKILL))
    assert code == -signal.SIGKILL
    assert outcome(done(work, *argv)) == outcome(whole)


@pytest.mark.nightly
def test_two_processes_have_agents_of_their_own(work):
    one = done(work, *AGENT, "name=one")
    assert_same(done(work, *AGENT, "name=two", world=2), one)


@pytest.mark.parametrize(
    "settings",
    [
        ["rollout.environment.agent=nowhere.py:agent"],
        [f"rollout.environment.agent={CALLERS}:two_arguments"],
        [f"rollout.environment.agent={CALLERS}:echo", "rollout.environment.max_calls=3"],
        [f"rollout.environment.agent={CALLERS}:echo", ENVIRONMENT],
    ],
    ids=["no file", "no agent", "unused limit", "two environments"],
)
@pytest.mark.nightly
def test_settings_that_make_no_agent_are_refused(work, settings):
    argv = [part for part in RL if part != ENVIRONMENT]
    code, output = burnish(work, *argv, *settings, "--dry-run")
    assert code == 2, output
    assert "Traceback" not in output


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_branches_are_trained_on_with_the_advantage_of_their_conversation(work, world):
    argv = [part for part in AGENT if not part.startswith("rollout.environment.agent")]
    argv += [f"rollout.environment.agent={CALLERS}:forgets", "steps=2", "checkpoint.save_every=1"]
    run = done(work, *argv, f"name=branches_{world}", "rollout.ahead=1", world=world)
    rows = rollouts(run, 2)
    by_conversation = defaultdict(list)
    for row in rows:
        by_conversation[row["prompt_index"], row["sample"]].append(row)
    rewards = defaultdict(list)
    for (prompt, _), branches in by_conversation.items():
        assert sorted(row.get("branch", 0) for row in branches) == [0, 1]
        assert len({row["reward"] for row in branches}) == 1
        assert len({row["advantage"] for row in branches}) == 1
        rewards[prompt].append((branches[0]["reward"], branches[0]["advantage"]))
    for group in rewards.values():
        numbers = np.array([reward for reward, _ in group])
        wanted = (numbers - numbers.mean()) / (numbers.std(ddof=1) + 1e-6)
        np.testing.assert_allclose([each for _, each in group], wanted, atol=1e-3)
    last = metrics(run)[-1]
    assert last["environment/branches"] == 1
    assert last["reward/mean"] == pytest.approx(
        np.mean([r for g in rewards.values() for r, _ in g])
    )
    assert (
        metrics(run)[1]["rollout/mismatch_kl"] < 1e-5
    )  # later steps train on completions of older weights
