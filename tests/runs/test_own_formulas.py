"""Runs with a user's advantage and policy loss that declare settings of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.runs.same_runs import assert_same
from support.runs.training_files import done, ranks, weights

OWN = """
import burnish
from pydantic import Field

from burnish.algorithms.advantages import dr_grpo
from burnish.algorithms.policy_loss import ppo
from burnish.config.algorithm import PPOSettings


class Bound(burnish.Section):
    bound: float = Field(9.0, gt=1)


class Scale(burnish.Section):
    scale: float


def bounded(logprobs, micro_batch, algorithm, settings: Bound):
    return ppo(logprobs, micro_batch, algorithm, PPOSettings(dual_clip=settings.bound))


def scaled(rollouts, settings: Scale):
    return settings.scale * dr_grpo(rollouts)
"""
RL = ["rl", "rl.yaml", "batch.minibatches=2", "evaluation.every=0", "data.validation=[]"]
BUILT_IN = ["algorithm.policy_loss.dual_clip=1.01", "algorithm.advantage=dr_grpo"]
OF_ONES_OWN = [
    "algorithm.policy_loss={name: 'formulas.py:bounded', bound: 1.01}",
    *("algorithm.advantage=formulas.py:scaled", "algorithm.advantage.scale=1"),
]


@pytest.fixture(scope="module")
def formulas(work: Path) -> Path:
    (work / "formulas.py").write_text(OWN)
    return work


@pytest.mark.nightly
def test_it_is_the_built_in_with_these_settings_on_two_processes_and_resumed(
    formulas: Path,
) -> None:
    built_in = weights(done(formulas, *RL, *BUILT_IN, "name=built_in", "steps=3"))
    whole = done(formulas, *RL, *OF_ONES_OWN, "name=whole", "steps=3")
    assert all(torch.equal(found, built_in[name]) for name, found in weights(whole).items())
    done(formulas, *RL, *OF_ONES_OWN, "name=own", "steps=2", world=2)
    assert_same(done(formulas, *RL, *OF_ONES_OWN, "name=own", "steps=3"), whole)
    card = (whole.parent / "own/checkpoints/step-00000003/model/README.md").read_text()
    assert "formulas.py:bounded (bound 1.01)" in card
    changed = [*OF_ONES_OWN, "algorithm.policy_loss.bound=2"]
    (command,) = ranks(formulas, [*RL, *changed, "name=own", "steps=4"], 1)
    assert command.wait() == 4
    assert "algorithm.policy_loss.bound" in command.output
    (formulas / "formulas.py").write_text(f"{OWN}\n# Changed.\n")
    (command,) = ranks(formulas, [*RL, *OF_ONES_OWN, "name=own", "steps=4"], 1)
    assert command.wait() == 4
    (formulas / "formulas.py").write_text(OWN)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        (
            "algorithm.policy_loss={name: 'formulas.py:bounded', bound: 1}",
            "Bound.bound of formulas.py",
        ),
        pytest.param(
            "algorithm.policy_loss={name: 'formulas.py:bounded', bond: 2}",
            "Bound.bond of formulas.py",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "algorithm.advantage=formulas.py:scaled",
            "Scale.scale of formulas.py",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_settings_that_do_not_fit_end_dry_and_real_runs(
    formulas: Path, override: str, part: str
) -> None:
    for arguments, world in ((["--dry-run"], 1), (["name=refused"], 2)):
        commands = ranks(formulas, [*RL, override, *arguments], world)
        assert [command.wait() for command in commands] == [2] * world
        output = "".join(command.output for command in commands)
        said = [line for line in output.splitlines() if "error: " in line]
        assert said
        assert all(part in line for line in said)
    assert not list((formulas / "runs/refused/checkpoints").glob("step-*"))
