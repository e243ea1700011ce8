"""The commands that look at checkpoints, given URLs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.states import bits, committed, save_once
from support.faults.bit_flips import flip

from burnish.checkpoint.destinations.mirror import Mirror, Sync
from burnish.checkpoint.retention import write_mirrored
from burnish.cli.main import main
from burnish.files.remote import Remote
from burnish.files.storage import LocalStorage


@pytest.fixture
def far(tmp_path):
    """The URL of a run with two steps on a mirror, one marked as damaged, and one that never was finished."""
    remote = Remote(f"file://{tmp_path}/far/run")
    remote.put("environment.json", b'{"start": "this"}')
    mirror = Mirror(tmp_path / "run", remote, None, "this")
    for step in (1, 2, 3):
        save_once(mirror.root, step, seed=step)
    Sync(mirror).run()
    steps = mirror.steps()
    steps.mark_damaged(steps.root / "step-00000003", "a flipped bit")
    remote.put("checkpoints/step-00000009/model/config.json", b"{}")
    return str(remote)


def report(capsys, *argv):
    code = main(["ckpt", *argv, "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


def test_steps_of_a_url(far, capsys):
    code, found = report(capsys, "ls", far)
    assert code == 0
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert (found["unfinished"], found["quarantine"]) == (["step-00000009"], ["step-00000003"])
    assert report(capsys, "ls", f"{far}/checkpoints/") == (code, found)


@pytest.mark.parametrize("path", ["", "/checkpoints", "/checkpoints/step-00000002"])
def test_a_step_of_a_url(far, capsys, path):
    code, found = report(capsys, "show", far + path)
    assert (code, found["step"]) == (0, 2)
    assert found["path"] == f"{far}/checkpoints/step-00000002"
    assert found["sets"]["model"]["tensors"] == 5


@pytest.mark.parametrize("how", ["--fast", "--full"])
def test_verify(far, capsys, tmp_path, how):
    assert report(capsys, "verify", far, how)[0] == 0
    file = tmp_path / "far/run/checkpoints/step-00000002/training/exp_avg.safetensors"
    flip(file, -3)
    code, found = report(capsys, "verify", far, how)
    assert code == 3  # the block of the header holds all of so small a file
    [problem] = found["steps"][1]["problems"]
    assert "training/exp_avg.safetensors" in problem["problem"]
    os.truncate(file, file.stat().st_size - 1)
    assert report(capsys, "verify", f"{far}/checkpoints/step-00000002", how)[0] == 3


def test_compare_and_export(far, capsys, tmp_path):
    here = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert report(capsys, "diff", here, f"{far}/checkpoints/step-00000002")[0] == 0
    assert report(capsys, "diff", here, f"{far}/checkpoints/step-00000001")[0] == 6
    assert report(capsys, "export", far, str(tmp_path / "model"))[0] == 0
    saved, exported = (
        load_file(tmp_path / model / "model.safetensors")
        for model in ("run/checkpoints/step-00000002/model", "model")
    )
    assert saved.keys() == exported.keys()
    assert all(torch.equal(bits(saved[name]), bits(exported[name])) for name in saved)


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("file:///nowhere/run", 5, "file:///nowhere/run"),
        ("ftp://host/run", 2, "ftp://host/run"),
        ("s3:///run", 2, "s3:///run"),
    ],
)
def test_what_is_not_there(capsys, path, code, words):
    assert main(["ckpt", "verify", path]) == code
    assert words in capsys.readouterr().err


def test_looking_at_a_url_loads_no_torch(far):
    code = (
        "import sys; from burnish.cli.main import main\n"
        f"assert main(['ckpt', 'verify', {far!r}]) == 0\n"
        f"assert main(['ckpt', 'ls', {far!r}]) == 0\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_gc_keeps_what_the_mirror_has_not(far, capsys, tmp_path):
    """The mirror has steps 1 and 2; 3 was marked as damaged there, and 4 is the newest."""
    run = tmp_path / "run"
    save_once(run / "checkpoints", 4)
    settings = f"name: run\ncheckpoint: {{keep_last: 1, mirror: '{far.removesuffix('/run')}'}}\n"
    (run / "config.yaml").write_text(settings)
    write_mirrored(run / "checkpoints", far, uuids(run, 1, 2), LocalStorage())
    assert report(capsys, "gc", str(run))[0] == 0
    assert [step.step for step in committed(run / "checkpoints")] == [3, 4]


def uuids(run, *steps):
    found = {step.step: step.commit.uuid for step in committed(run / "checkpoints")}
    return {step: found[step] for step in steps}
