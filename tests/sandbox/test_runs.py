"""Training on programs: the guide's own files, with a model from nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.runs.training_files import done, metrics

GUIDE = Path(__file__).parents[2] / "docs/guides/code-rewards.md"


@pytest.mark.nightly
def test_a_model_learns_to_write_what_passes_the_guides_tests(work):
    for title, text in re.findall(
        r'^```\w+ title="([^"]+)"\n(.*?)^```$', GUIDE.read_text(), re.M | re.S
    ):
        (work / title).write_text(text)
    settings = [
        "data.train=[tasks.jsonl]",
        "data.validation=[]",
        "rollout.n=32",
        "reward.workers=2",
    ]
    settings += ["rollout.max_response_length=1", "reward.functions=[{function: factor.py:factor}]"]
    run = done(
        work,
        "rl",
        "rl.yaml",
        *settings,
        "name=code",
        "steps=20",
        "optim.lr=0.01",
        "evaluation.every=0",
    )
    rewards = [row["reward/mean"] for row in metrics(run) if "reward/mean" in row]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
