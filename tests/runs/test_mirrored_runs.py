"""Whole runs that are copied to a URL: another machine goes on with them, and other runs are kept out."""

from __future__ import annotations

import json
import shutil
import signal
import time

import pytest
from support.checkpoints.states import committed
from support.runs.training_files import At, Command, burnish, done, make_files, outcome, ranks

from burnish.checkpoint.destinations.remote_steps import RemoteSteps
from burnish.files.remote import Remote

SFT = ["sft", "sft.yaml", "checkpoint.save_every=2"]


@pytest.fixture
def work(tmp_path):
    return make_files(tmp_path)


def far(work, name):
    steps = RemoteSteps(Remote(f"file://{work}/far/{name}/checkpoints"))
    return [step.step for step in committed(steps.root, steps)]


def new_machine(work):
    shutil.rmtree(work / "runs")


@pytest.mark.nightly
def test_another_machine_goes_on_as_if_nothing_had_been(work):
    peace = outcome(done(work, *SFT, "name=peace"))
    argv = [*SFT, "name=moved", f"checkpoint.mirror=file://{work}/far"]
    at = At("burnish.methods.parts.offline_training:make_batch", 4, signal.SIGTERM)
    code, said = burnish(work, *argv, at=at)
    assert code == 143, said
    stopped = max(far(work, "moved"))
    assert stopped < 6
    new_machine(work)
    code, said = burnish(work, *argv)
    assert code == 0, said
    assert f"resuming step {stopped} from file://{work}/far/moved" in said
    assert outcome(work / "runs" / "moved") == peace
    assert far(work, "moved")[-1] == 6
    new_machine(work)
    code, said = burnish(work, *argv)  # it is done, and says where
    assert (code, f"the model is file://{work}/far/moved" in said) == (0, True), said


@pytest.mark.nightly
def test_several_processes_that_save_in_the_background(work):
    argv = [*SFT, f"checkpoint.mirror=file://{work}/far", "checkpoint.background=true"]
    done(work, *argv, "checkpoint.mirror_keep_last=2", world=2)
    assert far(work, "run") == [4, 6]
    new_machine(work)
    code, said = burnish(work, *argv, "steps=7")
    assert (code, "resuming step 6 from file://" in said) == (0, True), said


@pytest.mark.nightly
def test_a_signal_ends_the_waiting_for_a_mirror(work):
    (work / "far" / "run" / "metrics.jsonl" / "in-the-way").mkdir(parents=True)
    argv = ["sft", "sft.yaml", "steps=1", f"checkpoint.mirror=file://{work}/far"]
    command = Command(work, argv)
    while command.output.count("THE MIRROR IS BEHIND") < 3:  # two may come before the waiting
        assert command.is_running(), command.output
        time.sleep(0.05)
    command.send(signal.SIGTERM)
    assert command.wait() == 1, command.output
    assert "the same command again copies the rest" in command.output
    assert [step.step for step in committed(work / "runs" / "run" / "checkpoints")] == [1]
    shutil.rmtree(work / "far" / "run" / "metrics.jsonl")
    done(work, *argv)
    assert far(work, "run") == [1]


def refused(directory, *argv):
    """What rank 0 says where both ranks have a directory of their own."""
    roots = [directory / f"machine-{rank}" for rank in range(2)]
    for root in roots:
        root.mkdir()
        make_files(root)
    commands = ranks(roots, [*SFT, *argv], 2)
    assert [command.wait() for command in commands] == [2, 2], commands[0].output
    assert "checkpoints is not the same directory" not in commands[1].output
    assert not list(directory.rglob("step-*"))
    assert not list(directory.rglob("config.yaml"))
    return commands[0].output


def test_machines_that_share_no_disk_are_refused(tmp_path):
    """A mirror does not stand for a shared disk, and gets nothing."""
    said = refused(tmp_path, f"checkpoint.mirror=file://{tmp_path}/far")
    assert f"{tmp_path}/machine-0/runs/run/checkpoints is not the same directory" in said
    assert "rank 1 on " in said
    assert "checkpoint.mirror" in said
    assert not (tmp_path / "far").exists()


@pytest.mark.nightly
def test_machines_that_share_no_disk_need_one_without_a_mirror_too(tmp_path):
    assert "checkpoint.mirror" not in refused(tmp_path)


@pytest.mark.nightly
def test_a_url_as_output_dir_needs_a_shared_disk_too(tmp_path):
    said = refused(tmp_path, f"output_dir=file://{tmp_path}/far")
    assert "set output_dir to a directory" in said
    assert not (tmp_path / "far").exists()


@pytest.mark.nightly
def test_all_of_a_run_is_at_its_url(work):
    argv = ["rl", "rl.yaml", "name=all", "steps=2", f"output_dir=file://{work}/far"]
    argv.append("tracking.profile_steps=[1]")
    run = done(work, *argv)
    there = work / "far" / "all"
    names = ["config.yaml", "environment.json", "status.json", "metrics.jsonl", "report.html"]
    names += [f"rollouts/{path.name}" for path in (run / "rollouts").iterdir()]
    assert len([n for n in names if ".rest." not in n]) == 9  # of two steps and two validations
    for kept, count in (("traces", 4), ("profiles", 1), ("tensorboard", 1)):
        found = [f"{kept}/{path.name}" for path in (run / kept).iterdir()]
        assert len(found) == count
        names += found
    assert (
        there / "logs" / "rank-0.log"
    ).stat().st_size > 0  # the last lines come after the last copy
    for name in names:
        assert (there / name).read_bytes() == (run / name).read_bytes(), name
    assert far(work, "all") == [2]


@pytest.mark.nightly
def test_another_machine_has_what_a_run_here_would_have(work):
    """Rollouts, traces, events and logs of the steps before; and later ones only once."""
    argv = ["rl", "rl.yaml", f"checkpoint.mirror=file://{work}/far", "checkpoint.save_every=1"]
    run = done(work, *argv, "steps=2")
    before = {
        path.relative_to(run): path.read_bytes()
        for kept in ("rollouts", "traces", "tensorboard", "logs")
        for path in (run / kept).iterdir()
    }
    (work / "far" / "run" / "rollouts" / "step-00000009.jsonl.gz").write_bytes(b"later")
    new_machine(work)
    done(work, *argv, "steps=3")
    for name, data in before.items():
        if name.parts[0] == "logs":
            assert data.startswith((run / f"{name}.1").read_bytes())
        else:
            assert (run / name).read_bytes() == data, name
    assert len(list((run / "tensorboard").iterdir())) == 2
    for root in (run, work / "far" / "run"):
        assert not (root / "rollouts" / "step-00000009.jsonl.gz").exists()
        assert (root / "rollouts" / "step-00000003.jsonl.gz").exists()


def test_the_mirror_of_another_run_is_refused_and_stays_as_it_is(work):
    argv = [*SFT, f"checkpoint.mirror=file://{work}/far", "steps=2"]
    done(work, *argv)
    mine = json.loads((work / "far" / "run" / "environment.json").read_text())["run"]
    before = (work / "far" / "run" / "config.yaml").read_bytes()
    new_machine(work)
    code, said = burnish(work, *argv, "optim.lr=0.5")
    assert (code, "optim.lr" in said) == (4, True), said
    code, said = burnish(work, *argv, "resume=never")
    assert (code, "resume=auto" in said) == (2, True), said
    done(work, *SFT, "steps=1")  # a run of the same settings, begun without the mirror
    code, said = burnish(work, *argv)
    assert (code, f"have: run {mine}" in said) == (4, True), said
    assert (work / "far" / "run" / "config.yaml").read_bytes() == before
    assert far(work, "run") == [2]


def test_a_mirror_that_cannot_be_written_is_refused_at_once(work):
    code, said = burnish(work, *SFT, "checkpoint.mirror=file:///dev/null/far")
    assert code == 5, said
    assert "file:///dev/null/far/run" in said
    assert not list((work / "runs").rglob("step-*"))


STEAL = """
def steal(completions, **columns):
    open("far/run/environment.json", "w").write('{"start": "another"}')
    return letters(completions)
"""


def test_a_run_that_lost_its_mirror_goes_on_and_says_so_at_its_end(work):
    with (work / "rewards.py").open("a") as file:
        file.write(STEAL)
    settings = ["reward.functions=[{function: rewards.py:steal}]", "tracking.rollouts_every=0"]
    settings += ["checkpoint.mirror_patience_seconds=250", f"checkpoint.mirror=file://{work}/far"]
    code, said = burnish(work, "rl", "rl.yaml", "steps=2", "evaluation.before=false", *settings)
    assert code == 1, said
    assert "THE MIRROR IS BEHIND" in said
    assert f"file://{work}/far/run" in said
    assert [step.step for step in committed(work / "runs" / "run" / "checkpoints")] == [2]
    assert far(work, "run") == []
