"""Rewards that fail, are missing, or end their process, in whole runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints.states import committed
from support.runs.training_files import burnish, done, make_files, metrics, outcome, ranks, rollouts

REWARDS = """\
import os, signal
from pathlib import Path

HERE = Path(__file__).parent

def score(text):
    return sum(each.islower() for each in text) / 4

def number_of_call(name):
    calls = HERE / name
    calls.touch()
    with calls.open("a") as file:
        file.write("x")
    return len(calls.read_text())

def letters(completions, **columns):
    return [score(each) for each in completions]

def some(completions, **columns):
    "The first of four is judged by nobody."
    return [None if i % 4 == 0 else score(each) for i, each in enumerate(completions)]

def breaks(completions, **columns):
    if number_of_call("breaks.calls") > 4 and not (HERE / "mended").exists():
        raise RuntimeError("judge.example is out")
    return letters(completions)

def ends(completions, how, at, **columns):
    if number_of_call(f"{how}-{at}.calls") == at:
        if how == "exit":
            os._exit(3)
        if how == "memory":
            raise MemoryError
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSEGV)
    return letters(completions)
"""
RL = ["rl", "rl.yaml", "data.validation=[]", "evaluation.every=0"]
CRITIC = [
    *("algorithm.advantage=gae", "rollout.ahead=2", "algorithm.mismatch_cap=2", "reward.workers=2"),
]
IN_PARTS = ["reward.workers=3"]
IN_A_CHILD = ["rollout.place=child", "rollout.ahead=1"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_files(tmp_path_factory.mktemp("rewards"))
    (root / "failing.py").write_text(REWARDS)
    return root


def reward(name: str, per_call: int = 64, **kwargs: object) -> str:
    function = f"function: 'failing.py:{name}', kwargs: {kwargs}, per_call: {per_call}"
    return f"reward.functions=[{{{function}}}]"


def test_a_completion_that_nobody_judges_is_no_member_of_its_group(work: Path) -> None:
    run = done(work, *RL, "steps=2", "name=some", reward("some"))
    for step in (1, 2):
        rows = sorted(rollouts(run, step), key=lambda row: (row["prompt_index"], row["sample"]))
        for group in (rows[i : i + 4] for i in range(0, 16, 4)):
            (first, *others), values = group, np.array([row["reward"] for row in group[1:]], float)
            assert (first["reward"], first["advantage"], first["reward_parts"]) == ("NaN", 0.0, {})
            assert first["reward_error"]
            wanted = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
            assert np.allclose([row["advantage"] for row in others], wanted, atol=1e-6)
    for row in metrics(run):
        assert (row["reward/errors"], row["reward/dropped"]) == (4, 4)
        assert np.isfinite(row["reward/mean"])


@pytest.mark.nightly
def test_an_evaluation_leaves_out_what_nobody_judges(work: Path) -> None:
    for name, dropped in (("letters", 0), ("some", 6)):
        code, said = burnish(
            work, "eval", "rl.yaml", "evaluation.n=4", "evaluation.prompts=6", reward(name)
        )
        assert code == 0, said
        told = dict(line.split()[:2] for line in said.splitlines() if line.startswith("val/"))
        assert float(told["val/dropped"]) == dropped
        assert 0 < float(told["val/mean@4"]) < 1


@pytest.mark.parametrize(
    ("settings", "world"),
    [
        ([], 1),
        (["rollout.ahead=2", "algorithm.mismatch_cap=2"], 1),
        ([*IN_A_CHILD, "algorithm.mismatch_cap=2"], 1),
        (["algorithm.dynamic_sampling.enabled=true"], 1),
        ([], 2),
    ],
    ids=["plain", "ahead", "child", "dynamic", "ranks"],
)
@pytest.mark.nightly
def test_a_run_that_loses_its_rewards_saves_and_goes_on_when_they_are_mended(
    work: Path, settings: list[str], world: int, request: pytest.FixtureRequest
) -> None:
    for name in ("breaks.calls", "mended"):
        (work / name).unlink(missing_ok=True)
    kind = request.node.callspec.id
    argv = [*RL, "steps=5", f"name=breaks_{kind}", *settings, reward("breaks")]
    started = ranks(work, argv, world)
    codes = [each.wait() for each in started]
    said = "\n".join(each.output for each in started)
    assert codes == [2] * world, said
    assert len(re.findall("error: .*\n.*judge.example is out", said)) == 1, said
    assert "Traceback" not in said
    steps = [each.step for each in committed(work / "runs" / f"breaks_{kind}" / "checkpoints")]
    assert steps
    assert 0 < steps[-1] < 5
    (work / "mended").touch()
    run = done(work, *argv, world=world)
    peace = done(work, *argv, f"name=mended_{kind}", world=world)
    assert outcome(run) == outcome(peace)


@pytest.mark.parametrize(
    ("how", "at", "settings", "world"),
    [
        ("kill", 2, [], 1),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in [
                ("exit", 1, [], 1),
                ("segfault", 3, CRITIC, 1),
                ("memory", 4, CRITIC, 2),
                ("kill", 3, IN_A_CHILD, 1),
                ("kill", 2, IN_PARTS, 2),
            ]
        ),
    ],
)
def test_a_process_that_ends_once_leaves_no_trace(
    work: Path, how: str, at: int, settings: list[str], world: int
) -> None:
    """`at`: the call, of all ranks and steps, whose process ends."""
    function = reward("ends", 4 if settings is IN_PARTS else 64, how=how, at=at)
    name, calls, found = f"{how}_{at}_{len(settings)}_{world}", work / f"{how}-{at}.calls", []
    for in_peace in (False, True):
        calls.write_text("x" * 1000 if in_peace else "")
        argv = [*RL, "steps=3", f"name=ends_{name}_{in_peace}", function, *settings]
        found.append(outcome(done(work, *argv, world=world)))
        assert len(calls.read_text()) > at
    assert found[0] == found[1]
