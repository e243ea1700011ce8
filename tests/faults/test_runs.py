"""Runs that are killed or stopped come to the same end, bit for bit, as one that is left in peace."""

from __future__ import annotations

import json
import random
import signal
import time
from functools import cache

import pytest
from support.checkpoints.states import committed
from support.faults.killed_runs import AHEAD, REWARD_RUNS, generators_killed, judges_killed
from support.runs.training_files import At, Command, burnish, done, make_files, outcome

KINDS = {
    "sft": ["sft", "sft.yaml"],
    "rl": ["rl", "rl.yaml"],
    "rl_everything": [
        "rl",
        "rl.yaml",
        "batch.minibatches=2",
        "rollout.n=2",
        "algorithm.kl.coef=0.1",
        "algorithm.dynamic_sampling.enabled=true",
    ],
    "rl_ahead": [*AHEAD, "batch.minibatches=2", "rollout.n=2", "critic.warmup_steps=1"],
}
KILLS = {"sft": 2, "rl": 3, "rl_everything": 3, "rl_ahead": 3}
"""At random moments."""
SAVING = "checkpoint.save_every=1"
ENGINE = "burnish.engines.torch.torch_engine:TorchEngine"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def in_peace(work):
    """What a kind of run comes to uninterrupted."""
    return cache(lambda kind: outcome(done(work, *KINDS[kind], f"name=peace_{kind}")))


@pytest.mark.nightly
def test_the_runs_have_something_to_lose(work, in_peace):
    assert all(len(json.loads(each["metrics"])) == 7 for each in map(in_peace, KINDS))
    state = in_peace("rl_everything")["state"]
    assert state["optimizer_steps"] == 12
    assert state["cursor"] > 24  # dynamic sampling has taken further prompts
    assert (
        len(
            [
                name
                for name in in_peace("rl")
                if name.startswith("rollouts/") and ".rest." not in name
            ]
        )
        == 6 + 3
    )


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments(work, in_peace, kind):
    moments, codes = random.Random(kind), set()
    argv = [*KINDS[kind], SAVING]
    for attempt in range(5):  # a run may end before it can be killed
        named = [*argv, f"name=random_{kind}_{attempt}"]
        for _ in range(KILLS[kind]):
            command = Command(work, named)
            command.reached(0)
            time.sleep(moments.uniform(0, 0.2))
            command.send(signal.SIGKILL)
            codes.add(command.wait())
        assert outcome(done(work, *named)) == in_peace(kind)
        if -signal.SIGKILL in codes:
            break
    assert codes in ({-signal.SIGKILL}, {-signal.SIGKILL, 0})


@pytest.mark.parametrize("kind", ["sft", pytest.param("rl", marks=pytest.mark.nightly)])
def test_killed_at_chosen_moments(work, in_peace, kind):
    places = [
        ("burnish.tracking.report:write_report", 1),
        ("burnish.checkpoint.save:Saver._lay_out", 1),
        ("burnish.checkpoint.save:Saver._commit", 2),
        (f"{ENGINE}.optim_step", 2),
        ("burnish.tracking.trackers:JsonlTracker.log", 1),
        ("burnish.tracking.tensorboard:TensorBoardTracker.log", 1),
        ("burnish.checkpoint.retention:move_aside", 1),
        ("burnish.checkpoint.retention:Retention.apply", 1),
    ]
    argv = [*KINDS[kind], f"name=chosen_{kind}", SAVING]
    for place, nth in places:
        code, output = burnish(work, *argv, at=At(place, nth, signal.SIGKILL))
        assert code == -signal.SIGKILL, output
    assert outcome(done(work, *argv)) == in_peace(kind)


STOPS = {
    "sft": [
        ("burnish.methods.parts.offline_training:lay_foundation", 1),
        ("burnish.methods.parts.validation:reduce_stats", 1),
        (f"{ENGINE}.forward_backward", 2),
        ("burnish.methods.parts.validation:reduce_stats", 1),
        ("burnish.checkpoint.save:Saver._commit", 1),
        (f"{ENGINE}.optim_step", 2),
    ],
    "rl": [
        ("burnish.methods.parts.online_training:lay_foundation", 1),
        ("burnish.rewards.pool:RewardPool.score", 1),
        ("burnish.methods.parts.rollouts:GroupSampler.sample", 2),
        (f"{ENGINE}.forward_backward", 1),
        ("burnish.runs.run:Run._record", 1),
        ("burnish.rewards.pool:RewardPool.score", 1),
        ("burnish.checkpoint.save:Saver._commit", 1),
        ("burnish.rollout.builtin.generator:BuiltinGenerator.load_weights", 3),
    ],
    "rl_ahead": [
        ("burnish.methods.parts.rollouts:GroupSampler.sample", 2),
        ("burnish.checkpoint.save:Saver._commit", 2),
        ("burnish.methods.parts.rollouts:RolloutQueue.take", 2),
        (f"{ENGINE}.forward_backward", 2),
        ("burnish.runs.run:Run._record", 1),
    ],
}
"""What is called, for which time, when the signal comes."""


@pytest.mark.parametrize(
    ("kind", "number", "places"),
    [
        pytest.param("sft", signal.SIGINT, STOPS["sft"], marks=pytest.mark.nightly),
        pytest.param("sft", signal.SIGHUP, STOPS["sft"], marks=pytest.mark.nightly),
        ("rl", signal.SIGTERM, STOPS["rl"][1::2]),
        pytest.param("rl", signal.SIGTERM, STOPS["rl"], marks=pytest.mark.nightly),
        pytest.param("rl_ahead", signal.SIGTERM, STOPS["rl_ahead"], marks=pytest.mark.nightly),
    ],
)
def test_stopped_by_a_signal(work, in_peace, kind, number, places):
    name = f"stopped_{kind}_{number}_{len(places)}"
    argv = [*KINDS[kind], f"name={name}", SAVING]
    run = work / "runs" / name
    before = 0
    for place, nth in places:
        code, output = burnish(work, *argv, at=At(place, nth, number))
        assert code == 128 + number, output
        step = committed(run / "checkpoints")[-1].step
        assert f"stopped by {number.name}: step {step} is committed in runs/{run.name}" in output
        assert before <= step <= before + nth  # no step begins after the signal
        before = step
        assert (run / "report.html").exists()
    assert outcome(done(work, *argv)) == in_peace(kind)


HANGS = """

from pathlib import Path

at_once = letters

def letters(completions, **columns):
    "The fourth time it is called it hangs."
    with open("calls", "a") as calls:
        calls.write("x")
    if Path("calls").stat().st_size == 4:
        Path("hangs").touch()
        time.sleep(100_000)
    return at_once(completions, **columns)
"""


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM]
)
def test_stopped_while_a_reward_function_hangs(tmp_path, in_peace, number):
    """Its deadline is beyond the test's patience, so it is the signal that ends the wait."""
    root = make_files(tmp_path)
    rewards = root / "rewards.py"
    mended = rewards.read_text()
    rewards.write_text(mended + HANGS)
    argv = [*KINDS["rl"], "name=hangs"]
    command = Command(root, [*argv, "reward.timeout_seconds=100000"])
    while not (root / "hangs").exists():
        assert command.is_running(), command.output
        time.sleep(0.01)
    command.send(number)
    assert command.wait() == 128 + number, command.output
    assert (
        "step 1 is committed" in command.output
    )  # before it, row 0 was tried and the start validated
    rewards.write_text(mended)
    assert outcome(done(root, *argv)) == in_peace("rl")


def test_a_finished_run_stays_as_it_is(work, in_peace):
    before = in_peace("rl")
    assert outcome(done(work, *KINDS["rl"], "name=peace_rl")) == before


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("kind", "world"), REWARD_RUNS)
def test_killed_while_they_compute_rewards_processes_leave_no_trace(work, kind, world):
    assert judges_killed(work, kind, world, kills=3 if (kind, world) == REWARD_RUNS[0] else 12) == 0


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("world", [1, 2])
def test_killed_generators_end_a_run_which_comes_to_the_same(work, world):
    assert generators_killed(work, world, kills=4) == 0
