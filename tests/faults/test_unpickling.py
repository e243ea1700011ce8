"""Resuming unpickles nothing that was on disk, runs no code from there, and opens what it expects and nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass

import pytest
import torch
from support.faults import audit
from support.ranks.processes import run_processes
from support.runs.training_files import done, make_files, ranks

STATE = {"COMMIT", "manifest.json", "state.json"}
TRAINING = {f"training/{name}.safetensors" for name in ("residual", "exp_avg", "exp_avg_sq")}
MODEL = {"model/model.safetensors", *TRAINING}
PPO = ["rl", "rl.yaml", "algorithm.advantage=gae", "critic.lr=0.01"]
ONCE = ["steps=1", "evaluation.every=0"]


@dataclass(frozen=True)
class Way:
    """To resume."""

    argv: list[str]
    """The command."""
    tensors: frozenset[str] = frozenset(MODEL)
    """Files of the step with tensors that have to be opened, and no other."""
    world: int = 1
    """Processes."""
    hears: str = ""
    """Which live process of the run it may unpickle something of."""


WAYS = {
    "sft": Way(["sft", "sft.yaml"]),
    "sft on 2": Way(["sft", "sft.yaml"], world=2, hears="a collective"),
    "sft in the background": Way(["sft", "sft.yaml", "checkpoint.background=true"], hears="a pipe"),
    "rl": Way(["rl", "rl.yaml"], hears="a pipe"),
    "lora": Way(
        ["sft", "sft.yaml", "model.fresh=null", "model.path=BASE", "model.lora.rank=2"],
        frozenset({"model/adapter_model.safetensors", *TRAINING}),
    ),
    "ppo": Way(PPO, frozenset({*MODEL, *(f"critic/{name}" for name in MODEL)}), hears="a pipe"),
    "from a mirror": Way(["sft", "sft.yaml", "checkpoint.mirror=file://MIRROR"], hears="a pipe"),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = make_files(tmp_path_factory.mktemp("audit"))
    done(root, "sft", "sft.yaml", "name=base", *ONCE)
    return root


BY_DAY = ("lora",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in WAYS],
)
def test_the_whole_path_of_resuming(work, name):
    way, called = WAYS[name], name.replace(" ", "-")
    run = where = work / "runs" / called
    base, mirror = work / "runs/base/checkpoints/step-00000001/model", work / "far"
    argv = [each.replace("BASE", str(base)).replace("MIRROR", str(mirror)) for each in way.argv]
    argv += [f"name={called}", *ONCE]
    done(work, *argv)
    if mirror.exists():
        shutil.rmtree(run)
        where = mirror / called
    log = work / f"events-{called}"
    started = ranks(work, argv, way.world, audit=(str(log), str(where)))
    for command in started:
        assert command.wait() == 0, command.output
    assert any("step 1 from " in c.output for c in started)
    events = [json.loads(line) for line in log.read_text().splitlines()]

    opened = {path for event, path, *_ in events if event == "open"}
    step = "checkpoints/step-00000001/"
    read = {path.removeprefix(step) for path in opened if path.startswith(step)}
    assert {name for name in read if name.endswith(".safetensors")} == way.tensors
    assert read >= STATE
    beside = {path for path in opened if path.startswith("checkpoints/") and step not in path}
    assert beside <= {"checkpoints/.lease", "checkpoints/pins.json", "checkpoints/.pins.lock"}

    # Ranks send each other tensors if no run has compared this layout with one process before.
    executed = [each for each in events if each[0] in ("exec", "compile", "torch.load")]
    assert [each for each in executed if each != ["torch.load", "", way.hears]] == []
    assert [each for each in events if each[0].startswith("marshal")] == []
    askers = {each[2] for each in events if each[0] == "pickle.find_class"}
    # Between live processes of one run: what ranks say to each other, and others to the trainer.
    assert askers <= {way.hears}
    assert way.world == 1 or askers, "the hook sees unpickling"


def load_under_the_hook(log, directory):
    audit.install(log, directory)
    torch.load(f"{directory}/x.pt", weights_only=True)
    torch.load(f"{directory}/x.pt", weights_only=False)


def test_the_hook_sees_what_torch_unpickles(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.pt")
    log = tmp_path / "events"
    run_processes(load_under_the_hook, [{}], str(log), str(tmp_path))
    events = [json.loads(line)[0] for line in log.read_text().splitlines()]
    assert events.count("torch.load") == 2
    assert "pickle.find_class" in events
