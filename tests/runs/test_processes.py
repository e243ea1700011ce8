"""The same run on one process and on two: launched by torchrun or by hand, resumed across, cut short."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.checkpoints.states import committed
from support.nightly import by_day
from support.ranks.fork_server import with_given_path
from support.runs.same_runs import RL, assert_same
from support.runs.training_files import done, metrics, ranks, rollouts

REPOSITORY = Path(__file__).parents[2]
PPO = [*RL, "algorithm.kl.place=reward", "algorithm.advantage=gae", "critic.lr=0.01"]
CHOOSING = [
    *(*RL, "algorithm.policy_loss=kl_cov", "algorithm.policy_loss.cov_ratio=0.3"),
    *("algorithm.advantage=reinforce_plus_plus", "algorithm.kl.place=reward"),
    "algorithm.mask_truncated=true",
]
"""Chooses tokens of the whole step, and whitens over it."""
RUNS = {"sft": ["sft", "sft.yaml"], "rl": RL, "ppo": PPO}


@pytest.fixture(scope="module")
def of_one(work):
    """By kind, the run of one process."""
    return cache(lambda kind: done(work, *RUNS[kind], f"name=one_{kind}"))


@pytest.mark.parametrize(
    "kind", ["sft", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("rl", "ppo"))]
)
def test_two_processes_do_what_one_does(work, of_one, kind):
    argv, one = RUNS[kind], of_one(kind)
    assert_same(done(work, *argv, f"name=two_{kind}", world=2), one)
    for first, second in ((1, 2), (2, 1)):
        name = f"name={kind}_{first}_then_{second}"
        run = done(work, *argv, name, "steps=3", world=first)
        assert len(metrics(run)) == 4
        assert_same(done(work, *argv, name, world=second), one)


@pytest.mark.nightly
def test_three_processes_go_on_from_two(work, of_one):
    done(work, "sft", "sft.yaml", "name=by_three", "steps=3", world=2)
    assert_same(done(work, "sft", "sft.yaml", "name=by_three", world=3), of_one("sft"))


@pytest.mark.parametrize("kind", ["sft", "rl"])
@pytest.mark.nightly
def test_an_epoch_is_every_sample_once_on_any_number_of_processes_and_when_prolonged(work, kind):
    """Of 30 samples, one is left for its last step, which is less than a process each."""
    size = ["batch.examples=29", "batch.prompts=29", "batch.minibatches=1"]
    argv = [*RUNS[kind], *size, "steps=null", "data.validation=[]", "evaluation.every=0"]
    one = done(work, *argv, f"name=epochs_{kind}", "epochs=2")
    assert [row["step"] for row in metrics(one)] == [1, 2, 3, 4]
    assert committed(one / "checkpoints")[-1].state["cursor"] == 60
    name = f"name=prolonged_{kind}"
    done(work, *argv, name, "epochs=1", world=2)
    assert_same(done(work, *argv, name, "epochs=2", world=2), one)


@pytest.mark.nightly
def test_shared_matrices_and_then_shared_tokens_do_what_one_process_does(work, of_one):
    argv = ["sft", "sft.yaml", "name=sft_shared"]
    done(work, *argv, "engine.tensor_parallel=2", "steps=3", world=2)
    run = done(work, *argv, "engine.sequence_parallel=2", world=2)
    assert_same(run, of_one("sft"))


@pytest.mark.nightly
def test_shared_tokens_do_what_one_process_does_in_reinforcement_learning(work):
    shared = done(work, *RL, "name=rl_shared", "engine.sequence_parallel=2", "steps=3", world=2)
    assert_same(shared, done(work, *RL, "name=rl_alone", "steps=3"))


@pytest.mark.nightly
@pytest.mark.parametrize("argv", [PPO, CHOOSING], ids=["ppo", "choosing"])
def test_what_is_computed_of_tokens_stays_where_it_is_and_is_that_of_one_process(work, argv):
    """Ranks that share micro-batches speak once."""
    name = argv[-1].partition("=")[0]
    one = done(work, *argv, f"name={name}_alone", "steps=3")
    for degree in ("tensor_parallel", "sequence_parallel"):
        shared = [f"name={name}_{degree}", f"engine.{degree}=2", "steps=3"]
        assert_same(done(work, *argv, *shared, world=2), one)


@pytest.mark.nightly
def test_two_processes_evaluate_what_one_trained(work):
    run = done(work, "sft", "sft.yaml", "name=evaluated_by_two", "steps=3")
    started = ranks(work, ["eval", str(run), "reward.functions=[]"], 2)
    assert [each.wait() for each in started] == [0, 0], "".join(each.output for each in started)
    (said,) = re.findall(r"^val/loss +(\S+)", started[0].output, re.MULTILINE)
    assert float(said) == pytest.approx(metrics(run)[-1]["val/loss"], rel=1e-5)


@pytest.mark.nightly
def test_two_processes_answer_what_one_answered(work):
    run = done(work, *RL, "name=answered_by_two", "steps=2", "evaluation.every=2")
    for command in (started := ranks(work, ["eval", str(run)], 2)):
        assert command.wait() == 0, "".join(each.output for each in started)
    rows = rollouts(run / "evaluations" / "1", 2, "validation")
    alike = ("completion", "reward", "answer", "prompt", "sample")
    trained = rollouts(run, 2, "validation")
    assert [[row[name] for name in alike] for row in rows] == [
        [row[name] for name in alike] for row in trained
    ]


@pytest.mark.nightly
def test_torchrun(work):
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": with_given_path(REPOSITORY)}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("-m", "burnish", "sft", "sft.yaml", "name=torchrun", "steps=3"),
    ]
    ended = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert_same(
        work / "runs/torchrun",
        done(work, "sft", "sft.yaml", "name=by_hand", "steps=3", world=2),
    )


def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(work):
    argv = ["rl", "rl.yaml", "name=one_signal", "steps=5000", "tracking.rollouts_every=0"]
    started = ranks(work, argv, 2)
    assert started[0].reached(2), started[0].output
    started[1].send(signal.SIGUSR1)
    assert [each.wait() for each in started] == [128 + signal.SIGUSR1] * 2
    assert "is committed in runs/one_signal" in started[0].output
    assert len(list((work / "runs/one_signal/checkpoints").glob("step-*"))) == 1


FAILING = """
import os

calls = []

def loss(logprobs, micro_batch, algorithm):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) > 8:
        raise RuntimeError("as planned")
    return -micro_batch.advantages * logprobs
"""


def test_the_error_of_a_rank_is_printed_once_and_its_last_lines_by_rank_0(work):
    (work / "failing.py").write_text(FAILING)
    argv = ["rl", "rl.yaml", "name=raised", "steps=50", "algorithm.policy_loss=failing.py:loss"]
    started = ranks(work, argv, 2)
    assert [each.wait() for each in started] == [1, 1]
    of_rank_0, of_rank_1 = (each.output for each in started)
    assert of_rank_1.count("RuntimeError: as planned") == 1
    assert "RuntimeError: as planned\n" in of_rank_0
    assert "failing.py" not in of_rank_0, "the traceback is rank 1's"
    assert re.search(r"^ +\S+ \S+ debug rank 1 step \d+ update burnish: begins$", of_rank_0, re.M)
    log = (work / "runs/raised/logs/rank-1.log").read_text()
    assert "failing.py" in log
    assert log.rstrip().endswith("RuntimeError: as planned")


@pytest.mark.parametrize("victim", by_day([0, 1], [0]))
def test_a_killed_rank_ends_the_others_soon(work, victim):
    argv = ["sft", "sft.yaml", f"name=killed_{victim}", "steps=5000"]
    started = ranks(work, argv, 2)
    assert started[0].reached(2), started[0].output
    started[victim].send(signal.SIGKILL)
    assert started[1 - victim].wait() == 1  # a collective's time-out would be ten minutes
    said = started[1 - victim].output.partition("error: ")[2]
    assert f"rank {victim}" in said
    last = (work / f"runs/killed_{victim}/logs/rank-{victim}.log").read_text().splitlines()[-1]
    assert f" {last}\n" in said
    ours = (work / f"runs/killed_{victim}/logs/rank-{1 - victim}.log").read_text()
    assert re.search(
        rf"critical rank {1 - victim} step \d+ \S+ burnish: rank {victim} .* died", ours
    )
    assert "Traceback" in ours
    assert started[victim].wait() == -signal.SIGKILL
