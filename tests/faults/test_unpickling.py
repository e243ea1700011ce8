"""Resuming unpickles nothing that was on disk, runs no code from there, and opens what it expects and nothing else."""

from __future__ import annotations

import json

import pytest
from training_files import done, make_files, ranks

READ = {
    "COMMIT", "manifest.json", "state.json", "model/model.safetensors", "training/residual.safetensors",
    "training/exp_avg.safetensors", "training/exp_avg_sq.safetensors",
}  # fmt: skip
"""Files of a step that resuming opens."""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = make_files(tmp_path_factory.mktemp("audit"))
    for kind in ("sft", "rl"):
        done(root, kind, f"{kind}.yaml", f"name={kind}", "steps=1", "evaluation.every=0")
    return root


@pytest.mark.parametrize(("kind", "world"), [("sft", 1), ("rl", 1), ("sft", 2)])
def test_the_whole_path_of_resuming(work, kind, world):
    log, run = work / f"events-{kind}-{world}", work / "runs" / kind
    argv = [kind, f"{kind}.yaml", f"name={kind}", "steps=1", "evaluation.every=0"]
    for command in (started := ranks(work, argv, world, audit=(str(log), str(run)))):
        assert command.wait() == 0, command.output
    assert any(f"resuming step 1 from runs/{kind}/checkpoints" in c.output for c in started)
    events = [json.loads(line) for line in log.read_text().splitlines()]

    opened = {path for event, path, *_ in events if event == "open"}
    step = "checkpoints/step-00000001/"
    assert {path.removeprefix(step) for path in opened if path.startswith(step)} == READ
    beside = {path for path in opened if path.startswith("checkpoints/") and step not in path}
    assert beside <= {"checkpoints/.lease", "checkpoints/pins.json", "checkpoints/.pins.lock"}

    assert [each for each in events if each[0] in ("exec", "compile")] == []
    assert [each for each in events if each[0].startswith("marshal")] == []
    askers = {each[2] for each in events if each[0] == "pickle.find_class"}
    # Between live processes of one run: what ranks say to each other, and rewards to their workers.
    may = {"a collective"} if world > 1 else {"a pipe"} if kind == "rl" else set()
    assert askers <= may
    assert world == 1 or askers, "the hook sees unpickling"
