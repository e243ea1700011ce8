"""Every data set of the package reasoning-gym, against the package itself."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.runs.training_files import burnish, done, rollouts

from burnish.environments.base import Action
from burnish.environments.reasoning_gym import ReasoningGym
from burnish.errors import MissingError, UsageError

INSTALLED = find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(
    not INSTALLED, reason="make nightly-environments installs reasoning-gym"
)


def datasets() -> list[str]:
    if not INSTALLED:
        return ["chain_sum"]
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - {"composite"})  # it joins others, which its settings name


@needs_package
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of the package's own
@pytest.mark.parametrize("name", datasets())
def test_questions_and_scores_are_the_packages(name):
    import reasoning_gym

    theirs = reasoning_gym.create_dataset(name, size=3, seed=5)
    rows = list(ReasoningGym.rows(reasoning_gym=name, size=3, seed=5))
    assert [row["prompt"][-1]["content"] for row in rows] == [e["question"] for e in theirs]
    for entry, row in zip(theirs, rows, strict=True):
        for answer in (str(entry["answer"]), "no idea"):
            environment = ReasoningGym(name, size=3, seed=5)
            environment.begin(row, 0)
            text = f"I think.\n<answer>{answer}</answer>"
            observation = environment.step(Action(text, text))
            assert observation.done
            try:
                score = theirs.score_answer(answer.strip(), entry)
            except ValueError:
                score = 0.0
            assert observation.rewards["score"] == score


@needs_package
@pytest.mark.nightly
def test_a_run_needs_no_data_and_no_reward(work: Path):
    settings = [
        *(
            "rl",
            "rl.yaml",
            "reward.functions=[]",
            "data.train=[]",
            "data.validation=[]",
            "evaluation.every=0",
        ),
        *("rollout.environment.reasoning_gym=chain_sum", "rollout.environment.kwargs.size=8"),
        *("model.fresh.max_position_embeddings=1024", "batch.tokens_per_device=1024"),
        *("steps=2", "name=gym"),
    ]
    rows = rollouts(done(work, *settings), 2)
    assert {row["source"] for row in rows} == {"chain_sum"}
    assert all("score" in row["reward_parts"] for row in rows)


@needs_package
@pytest.mark.nightly
@pytest.mark.parametrize(
    "kwargs",
    [
        {"dataset": "chain_sums"},
        {"dataset": "chain_sum", "terms": 3},
        {"dataset": "chain_sum", "system": "kind"},
    ],
)
def test_what_the_package_does_not_have_is_refused(kwargs):
    with pytest.raises(UsageError):
        list(ReasoningGym.rows(**kwargs))


@pytest.mark.skipif(INSTALLED, reason="it is installed")
def test_without_the_package_the_extra_is_named(work: Path):
    with pytest.raises(MissingError, match="gym"):
        list(ReasoningGym.rows(reasoning_gym="chain_sum"))
    code, output = burnish(
        work,
        "rl",
        "rl.yaml",
        "rollout.environment.reasoning_gym=chain_sum",
        "data.train=[]",
        "--dry-run",
    )
    assert code == 5
    assert "burnish[gym]" in output
