"""The commands that look at checkpoints and keep them."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.states import BIG_SHAPES, StubbornStorage, make_state, save_once, shards_of
from support.faults.bit_flips import flip
from support.models.tiny import save_tiny, tiny_model

from burnish.checkpoint.manifest import sha256
from burnish.checkpoint.steps import verify
from burnish.cli.main import main
from burnish.distributed.layout import Layout
from burnish.errors import CorruptError
from burnish.files.lease import holding_lease
from burnish.files.remote import Remote
from burnish.files.storage import Source
from burnish.files.strict_json import encode_json


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory with two steps, the second unhealthy."""
    run = tmp_path_factory.mktemp("made") / "run"
    weights, slots = make_state(0, BIG_SHAPES)
    save_once(
        run / "checkpoints",
        1,
        weights=shards_of(weights, Layout()),
        training=shards_of(slots, Layout()),
    )
    save_once(run / "checkpoints", 2, healthy=False)
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def ckpt(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main(["ckpt", *map(str, argv)])
    written = capsys.readouterr()
    return code, written.out, written.err


def as_json(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, Any]:
    code, out, _ = ckpt(capsys, *argv, "--json")
    return code, json.loads(out)


def step_of(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_ls(run: Path, below: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/.inflight-00000003.abc").mkdir()
    code, found = as_json(capsys, "ls", run / below)
    assert code == 0
    assert [(s["step"], s["healthy"], s["pinned"]) for s in found["steps"]] == [
        (1, True, None),
        (2, False, None),
    ]
    whole = sum(p.stat().st_size for p in step_of(run, 1).rglob("*") if p.is_file())
    assert 0 < whole - found["steps"][0]["bytes"] < 10_000  # less COMMIT and manifest
    assert found["unfinished"] == [".inflight-00000003.abc"]
    _, out, _ = ckpt(capsys, "ls", run / below)
    lines = out.splitlines()
    assert lines[1].split() == ["step", "size", "saved", "state", "pinned"]
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]
    assert lines[3].endswith("unhealthy")


def test_ls_of_a_directory_of_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, run.parent / "other")
    (run.parent / "notes").mkdir()
    code, found = as_json(capsys, "ls", run.parent)
    assert code == 0
    roots = [str(run.parent / name / "checkpoints") for name in ("other", "run")]
    assert [each["path"] for each in found["runs"]] == roots
    assert all(len(each["steps"]) == 2 for each in found["runs"])
    assert as_json(capsys, "ls", run.parent / "notes")[0] == 5


def test_show_has_long_values_in_json_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = {f"number {n}": n for n in range(99)}
    step = save_once(run / "checkpoints", 3, state={"step": 3, "unlogged": many})
    assert as_json(capsys, "show", step)[1]["state"]["unlogged"] == many
    assert max(map(len, ckpt(capsys, "show", step)[1].splitlines())) < 120 + len(str(step))


def test_ls_names_what_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(step_of(run, 1) / "COMMIT", 30)
    code, out, _ = ckpt(capsys, "ls", run)
    assert code == 0
    assert "damaged" in out.splitlines()[2]
    assert "COMMIT" in as_json(capsys, "ls", run)[1]["steps"][0]["problem"]


def test_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(capsys, "show", step_of(run, 1), "--tensors")
    assert code == 0
    assert found["step"] == 1
    assert found["state"] == {"step": 1, "cursor": 5}
    assert found["sets"].keys() == {
        "model", "training/residual", "training/exp_avg", "training/exp_avg_sq",
    }  # fmt: skip
    model = {each["name"]: each for each in found["tensors"]["model"]}
    assert {name: tuple(each["shape"]) for name, each in model.items()} == BIG_SHAPES
    assert {each["dtype"] for each in model.values()} == {"BF16"}
    _, out, _ = ckpt(capsys, "show", step_of(run, 1))
    assert "training/exp_avg_sq" in out
    assert "head.weight" not in out
    assert "head.weight" in ckpt(capsys, "show", step_of(run, 1), "--tensors")[1]


def test_a_run_stands_for_its_newest_healthy_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_json(capsys, "show", run)[1]["step"] == 1


@pytest.mark.parametrize("options", [[], ["--full"], ["--fast"]])
def test_verify_of_what_is_whole(
    run: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = as_json(capsys, "verify", run, *options)
    assert code == 0
    assert found["ok"]
    assert found["full"] is ("--fast" not in options)
    assert [Path(step["path"]).name for step in found["steps"]] == [
        "step-00000001",
        "step-00000002",
    ]
    code, out, err = ckpt(capsys, "verify", *options, step_of(run, 1))
    assert (code, err) == (0, "")
    assert "step-00000001: whole" in out


def test_verify_names_file_and_tensors_of_every_bad_block(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(step_of(run, 1) / "training/exp_avg.safetensors", 6 << 20)
    flip(step_of(run, 1) / "training/exp_avg_sq.safetensors", 60 << 10)
    flip(step_of(run, 1) / "model/config.json", 3)
    code, found = as_json(capsys, "verify", step_of(run, 1))
    assert code == 3
    assert not found["ok"]
    problems = found["steps"][0]["problems"]
    assert {(p["file"], p["start"]) for p in problems} == {
        ("training/exp_avg_sq.safetensors", 0),
        ("training/exp_avg.safetensors", 6 << 20),
        ("model/config.json", 0),
    }
    named = {p["start"]: p["tensors"] for p in problems if p["file"].startswith("training")}
    assert named[6 << 20] == ["head.weight"]
    assert "the header" in named[0]
    code, out, err = ckpt(capsys, "verify", step_of(run, 1))
    assert code == 3
    assert sum(".safetensors" in line or "config.json" in line for line in out.splitlines()) == 3
    assert "have: 3 " in err


def test_a_fast_verify_reads_no_tensors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(step_of(run, 1) / "training/exp_avg.safetensors", 6 << 20)
    assert ckpt(capsys, "verify", "--fast", run)[0] == 0
    flip(step_of(run, 1) / "training/exp_avg.safetensors", 20)
    assert ckpt(capsys, "verify", "--fast", run)[0] == 3


def test_verify_goes_on_to_the_next_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step_of(run, 1) / "state.json").unlink()
    code, found = as_json(capsys, "verify", run)
    assert code == 3
    assert [step["ok"] for step in found["steps"]] == [False, True]
    assert "state.json" in found["steps"][0]["problems"][0]["problem"]


@pytest.mark.parametrize("name", ["", "COMMIT", "manifest.json"])
def test_a_directory_or_a_file_in_the_wrong_place_hides_no_other_damage(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = step_of(run, 2) / name
    shutil.rmtree(wrong) if name == "" else wrong.unlink()
    wrong.write_text("") if name == "" else wrong.mkdir()
    flip(step_of(run, 1) / "training/exp_avg.safetensors", 6 << 20)
    code, found = as_json(capsys, "verify", run)
    assert code == 3
    assert [step["ok"] for step in found["steps"]] == [False, False]
    assert ckpt(capsys, "verify", step_of(run, 2))[0] == 3
    code, found = as_json(capsys, "ls", run)
    assert code == 0
    assert [step.get("damaged", False) for step in found["steps"]] == [False, True]
    assert as_json(capsys, "show", run)[1]["step"] == 1


def test_a_file_in_the_place_of_all_checkpoints_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").touch()
    for place in (tmp_path / "checkpoints", tmp_path / "checkpoints/step-00000001"):
        code, found = as_json(capsys, "ls", place)
        assert code == 5
        assert str(tmp_path / "checkpoints") in found["error"]["have"]


def test_verify_mentions_an_empty_directory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step_of(run, 1) / "model/more/yet").mkdir(parents=True)
    code, found = as_json(capsys, "verify", step_of(run, 1))
    assert code == 0
    assert found["steps"][0]["extra"] == ["model/more/", "model/more/yet/"]
    assert "model/more/" in ckpt(capsys, "verify", step_of(run, 1))[1]


def test_a_step_that_is_removed_while_it_is_checked_is_not_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run's retention does beside it, by a rename."""

    def losing(path: Path, source: Source, *, fast: bool) -> Iterator[CorruptError]:
        if path == step_of(run, 1):
            path.rename(run / "aside")
        yield from verify(path, source, fast=fast)

    monkeypatch.setattr("burnish.cli.ckpt.verify", losing)
    code, out, _ = ckpt(capsys, "verify", run)
    assert code == 0
    assert f"{step_of(run, 1)}: removed meanwhile" in out
    (run / "aside").rename(step_of(run, 1))
    code, found = as_json(capsys, "verify", run)
    assert code == 0
    assert [Path(step["path"]) for step in found["steps"]] == [step_of(run, 2)]
    (run / "aside").rename(step_of(run, 1))
    assert ckpt(capsys, "verify", step_of(run, 1))[0] == 5


def test_pin_and_unpin(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = step_of(run, 1)
    assert ckpt(capsys, "pin", step, "--reason", "for the paper")[0] == 0
    assert json.loads((run / "checkpoints/pins.json").read_text()) == {
        "format": 1,
        "pins": {"1": "for the paper"},
    }
    assert "for the paper" in ckpt(capsys, "ls", run)[1]
    assert as_json(capsys, "show", step)[1]["pinned"] == "for the paper"
    assert as_json(capsys, "pin", step)[1] == {
        "path": str(step), "step": 1, "pinned": "by hand", "before": "for the paper",
    }  # fmt: skip
    flip(step / "state.json", 3)
    assert ckpt(capsys, "pin", step)[0] == 3
    shutil.rmtree(step)  # a pin can be taken back when the step is gone
    assert ckpt(capsys, "unpin", step)[0] == 0
    assert ckpt(capsys, "unpin", step)[0] == 5


@pytest.mark.parametrize(
    ("argv", "code", "facts"),
    [
        (["ls", "nowhere"], 5, ["nowhere", "run"]),
        (["show", "."], 5, ["runs/NAME"]),
        (["show", "run/config.yaml"], 5, ["run/config.yaml"]),
        (["show", "empty"], 5, ["empty"]),
        (["verify", "empty"], 5, ["empty"]),
        (["pin", "run"], 2, ["run", "RUN/checkpoints/step-N"]),
        (["pin", "run/checkpoints/step-00000007"], 5, ["step-00000007", "step-00000001"]),
        (["unpin", "run/checkpoints/step-00000001"], 5, ["step-00000001"]),
        (["unpin", "nowhere/step-00000001"], 5, ["nowhere"]),
        (["verify", "run", "--fast", "--full"], 2, ["--fast", "--full"]),
        (["verify"], 2, ["STEP"]),
        (["verify", "run", "also"], 2, ["also"]),
        (["verify", "run", "--deep"], 2, ["--deep", "burnish ckpt --help"]),
        ([], 2, ["ls|show"]),
    ],
)
def test_mistakes(
    run: Path,
    argv: list[str],
    code: int,
    facts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run.parent)
    Path("empty/checkpoints").mkdir(parents=True)
    found, out, err = ckpt(capsys, *argv)
    assert found == code
    assert out == ""
    for fact in facts:
        assert fact in err


def test_damaged_pins_are_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/pins.json").write_text("{")
    for argv in (["ls", run], ["pin", step_of(run, 1)], ["unpin", step_of(run, 1)]):
        assert ckpt(capsys, *argv)[0] == 3
    code, out, _ = ckpt(capsys, "ls", run)
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["1", "2"]
    code, found = as_json(capsys, "ls", run)
    assert code == found["error"]["exit_code"] == 3
    assert [step["step"] for step in found["steps"]] == [1, 2]


def reseal_in_another_format(step: Path) -> None:
    """COMMIT as another version of Burnish might write it."""
    value = json.loads((step / "COMMIT").read_bytes())
    value["format"] = 2
    del value["sha256"]
    (step / "COMMIT").write_bytes(encode_json(value | {"sha256": sha256(encode_json(value))}))


def test_a_step_of_another_format_is_not_damaged(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reseal_in_another_format(step_of(run, 2))
    code, found = as_json(capsys, "verify", run)
    assert code == found["error"]["exit_code"] == 4
    assert [step["ok"] for step in found["steps"]] == [True, False]
    assert "2: not checked" in ckpt(capsys, "verify", run)[1]
    assert not as_json(capsys, "ls", run)[1]["steps"][1]["damaged"]
    flip(step_of(run, 1) / "model/config.json", 3)
    assert ckpt(capsys, "verify", run)[0] == 3


def test_an_old_step_of_another_format_keeps_no_newer_one_back(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_once(run / "checkpoints", 3)
    reseal_in_another_format(step_of(run, 1))
    assert as_json(capsys, "show", run)[1]["step"] == 3
    assert ckpt(capsys, "diff", run, run)[0] == 0
    for step in (2, 3):
        shutil.rmtree(step_of(run, step))
    assert ckpt(capsys, "show", run)[0] == 4


def test_what_a_command_ends_with_is_in_its_json(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ckpt(capsys, "show", run / "nowhere", "--json")
    assert code == 5
    error = json.loads(out)["error"]
    assert error.keys() == {"problem", "have", "want", "do", "exit_code"}
    assert error["exit_code"] == 5
    assert error["problem"] in err
    flip(step_of(run, 1) / "model/config.json", 3)
    found = as_json(capsys, "verify", run)[1]
    assert found["error"]["exit_code"] == 3
    assert found["steps"]


@pytest.mark.parametrize(
    "command", ["ls", "show", "verify", "pin", "unpin", "gc", "diff", "export"]
)
def test_it_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt(capsys, command, "--help")[0] == 0


def test_looking_loads_no_torch(run: Path) -> None:
    (run / "config.yaml").write_text("checkpoint: {keep_last: 2}\n")
    program = (
        "import sys; from burnish.cli.main import main\n"
        "run, step = sys.argv[1:]\n"
        "for argv in (['ls', run], ['show', step], ['verify', run], ['verify', '--fast', run],\n"
        "             ['pin', step], ['unpin', step], ['gc', run]):\n"
        "    assert main(['ckpt', *argv]) == 0, argv\n"
        "assert not {'torch', 'numpy', 'transformers', 'datasets'} & set(sys.modules)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run(
        [sys.executable, "-c", program, run, step_of(run, 1)],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    """A run of five steps that its configuration keeps two of, with what a killed process left."""
    run = tmp_path / "long"
    for step in range(1, 6):
        save_once(run / "checkpoints", step, healthy=step != 4)
    (run / "config.yaml").write_text("checkpoint: {keep_last: 2}\n")
    for name in (".inflight-00000006.abc/model", "trash/step-00000000", "quarantine/step-00000000"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "x").write_bytes(bytes(1000))
    return run


def names(paths: list[str]) -> list[str]:
    return [Path(path).name for path in paths]


def test_gc_removes_what_nothing_keeps(long_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt(capsys, "pin", step_of(long_run, 1))[0] == 0
    before = sorted(long_run.rglob("*"))
    code, planned = as_json(capsys, "gc", long_run, "--dry-run")
    assert code == 0
    assert sorted(names(planned["removed"])) == [
        ".inflight-00000006.abc", "step-00000000", "step-00000002",
    ]  # fmt: skip
    assert set(long_run.rglob("*")) - set(before) <= {long_run / "checkpoints/.lease"}
    assert set(before) <= set(long_run.rglob("*"))
    code, done = as_json(capsys, "gc", long_run)
    assert code == 0
    assert done == planned | {"dry_run": False}
    assert done["bytes"] > 2000
    kept = ["step-00000001", "step-00000003", "step-00000004", "step-00000005"]
    assert names(done["kept"]) == kept
    left = {path.name for path in (long_run / "checkpoints").iterdir() if path.is_dir()}
    assert left == {*kept, "trash", "quarantine"}
    assert list((long_run / "checkpoints/trash").iterdir()) == []
    assert "0 B freed, 4 steps kept" in ckpt(capsys, "gc", long_run)[1]


def test_gc_says_what_it_would_do(long_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ckpt(capsys, "gc", long_run, "--dry-run")
    assert "would remove" in out
    assert "would be freed, 3 steps kept" in out


def test_gc_goes_on_where_the_disk_does_not_let_go(
    long_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.cli.ckpt.LOCAL", StubbornStorage())
    code, found = as_json(capsys, "gc", long_run)
    assert code == found["error"]["exit_code"] == 1
    assert found["bytes"] == 0
    assert len(names(found["kept"])) == 3  # the others are out of sight


def test_gc_without_a_configuration_keeps_all_steps(
    long_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (long_run / "config.yaml").unlink()
    assert ckpt(capsys, "gc", long_run)[0] == 0
    assert len(as_json(capsys, "ls", long_run)[1]["steps"]) == 5


def test_gc_refuses_a_run_that_is_going_on(
    long_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with holding_lease(long_run / "checkpoints/.lease"):
        assert ckpt(capsys, "gc", long_run)[0] == 4
    assert len(as_json(capsys, "ls", long_run)[1]["steps"]) == 5


def test_gc_removes_no_step_while_pins_are_damaged(
    long_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (long_run / "checkpoints/pins.json").write_text("{}")
    assert ckpt(capsys, "gc", long_run)[0] == 3
    (long_run / "checkpoints/pins.json").unlink()
    assert len(as_json(capsys, "ls", long_run)[1]["steps"]) == 5


def test_diff_says_how_far_apart(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (save_once(run / "checkpoints", step, seed=seed) for step, seed in ((7, 0), (8, 1)))
    code, out, err = ckpt(capsys, "diff", a, a)
    assert (code, err) == (0, "")
    assert [line.split()[-2:] for line in out.splitlines()[2:]] == [["5", "equal"]] * 3
    code, out, _ = ckpt(capsys, "diff", a, b)
    assert code == 6
    assert len(out.splitlines()) == 2 + 3 + 5 + 1  # A and B, sets, the worst tensors, the rest
    _, out, _ = ckpt(capsys, "diff", a, b, "--tensors")
    [line] = [line for line in out.splitlines() if "exp_avg/layers.0.up.weight" in line]
    assert "384 of 384 elements, at most" in line
    code, found = as_json(capsys, "diff", a, b)
    assert code == 6
    assert not found["same"]
    assert found["counts"] == {"differs": 12, "equal": 3}
    tensors = {each["tensor"]: each for each in found["tensors"]}
    assert tensors["model/embed.weight"]["a"] == {"dtype": "float32", "shape": [37, 16]}
    assert tensors["model/embed.weight"]["max_ulp"] > 0
    assert tensors["model/layers.0.none"]["verdict"] == "equal"


def test_diff_with_a_hugging_face_directory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = step_of(run, 1)
    code, found = as_json(capsys, "diff", step, step / "model")
    assert code == 6
    tensors = {each["tensor"]: each for each in found["tensors"]}
    assert tensors["model/head.weight"]["max_ulp"] <= 1  # of bf16, ties-up against ties-to-even
    assert 0 < tensors["model/head.weight"]["max_relative"] < 0.004
    assert tensors["exp_avg/head.weight"]["verdict"] == "only in A"
    _, out, _ = ckpt(capsys, "diff", step, step / "model", "--tensors")
    assert "exp_avg/head.weight  only in A" in out
    # A set that one side lacks has no distance, which 0 would deny.
    [line] = [line for line in out.splitlines() if line.startswith("exp_avg ")]
    assert "L2" not in line


def test_diff_reads_nothing_that_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(step_of(run, 1) / "training/exp_avg.safetensors", 6 << 20)
    code, _, err = ckpt(capsys, "diff", step_of(run, 1), step_of(run, 1))
    assert code == 3
    assert "exp_avg.safetensors" in err
    assert "head.weight" in err
    assert ckpt(capsys, "diff", run, run / "nowhere")[0] == 5


def test_export(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = save_once(run / "checkpoints", 9, weights=shards_of({"w": torch.ones(9)}, Layout()))
    code, found = as_json(capsys, "export", run, run / "out", "--dtype", "fp32")
    assert code == 0
    assert found["step"] == 9
    assert set(found["files"]) == {
        "config.json", "model.safetensors", "chat_templates/default.jinja",
    }  # fmt: skip
    code, same = as_json(capsys, "diff", step, run / "out")
    assert code == 6
    assert same["counts"] == {"equal": 1, "only in A": 10}
    assert ckpt(capsys, "export", step, run / "out")[0] == 2
    assert ckpt(capsys, "export", step, run / "new", "--dtype", "fp8")[0] == 2
    assert ckpt(capsys, "export", step, run / "new", "--shard-gb", "0")[0] == 2
    code, out, _ = ckpt(capsys, "export", step, run / "new", "--shard-gb", "1e-9")
    assert code == 0
    assert "the model of step-00000009 in bf16" in out
    code, found = as_json(capsys, "export", step, run / "for llama", "--gguf")
    assert code == 0
    assert shlex.split(found["gguf"][-1])[2:5] == [str(run / "for llama"), "--outtype", "q8_0"]
    assert ckpt(capsys, "export", step, run / "none", "--gguf", "q3")[0] == 2


@pytest.mark.skipif(find_spec("gguf") is not None, reason="the package is there")
def test_gguf_needs_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    code, _, err = ckpt(capsys, "import", file, tmp_path / "out")
    assert (code, "[gguf]" in err) == (2, True)
    assert ckpt(capsys, "import", file, tmp_path / "out", "--step", "3")[0] == 2
    assert not (tmp_path / "out").exists()


def test_import_and_export_are_inverse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_tiny(tmp_path / "source", dtype=torch.float32)
    code, found = as_json(capsys, "import", source, tmp_path / "run", "--step", "5")
    assert code == 0
    assert (found["step"], found["kind"], found["training"]) == (5, "huggingface", "absent")
    assert ckpt(capsys, "verify", tmp_path / "run")[0] == 0
    assert ckpt(capsys, "diff", tmp_path / "run", source)[0] == 0
    assert ckpt(capsys, "export", tmp_path / "run", tmp_path / "out", "--dtype", "fp32")[0] == 0
    assert ckpt(capsys, "diff", tmp_path / "out", source)[0] == 0
    assert ckpt(capsys, "import", source, tmp_path / "run", "--step", "5")[0] == 1
    code, out, _ = ckpt(capsys, "import", source, tmp_path / "other")
    assert code == 0
    assert f"model.path={tmp_path / 'other/checkpoints/step-00000000/model'}" in out
    assert ckpt(capsys, "import", tmp_path, tmp_path / "third")[0] == 5
    assert ckpt(capsys, "import", source, tmp_path / "third", "--step", "-1")[0] == 2
    assert not (tmp_path / "third").exists()


def test_import_from_behind_a_url(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    source = save_tiny(tmp_path / "source", dtype=torch.float32)
    for path in source.iterdir():
        Remote("memory://import/model").put_file(path.name, path)
    code, found = as_json(capsys, "import", "memory://import/model/", tmp_path / "run")
    assert (code, found["source"]) == (0, "memory://import/model")
    assert ckpt(capsys, "diff", tmp_path / "run", source)[0] == 0
    assert ckpt(capsys, "import", "memory://import/none", tmp_path / "run")[0] == 5


@pytest.mark.nightly
def test_import_unpickles_only_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "actor"
    tiny_model().config.save_pretrained(source / "huggingface")
    torch.save(dict(tiny_model().state_dict()), source / "model_world_size_1_rank_0.pt")
    told = ("--unsafe-pickle", "--without-sandbox")  # there are kernels that have none
    code, _, err = ckpt(capsys, "import", source, tmp_path / "run")
    assert code == 2
    assert "--unsafe-pickle" in err
    assert not (tmp_path / "run").exists()
    environments = []

    def run_child(*arguments: Any, **options: Any) -> Any:
        environments.append(options["env"])
        return subprocess_run(*arguments, **options)

    subprocess_run = subprocess.run
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setattr("burnish.checkpoint.tools.import_pickled.subprocess.run", run_child)
    code, found = as_json(capsys, "import", source, tmp_path / "run", *told)
    assert code == 0
    assert "process" in found["guard"]
    [environment] = environments
    assert environment.keys() <= {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LD_LIBRARY_PATH"}
    save_tiny(tmp_path / "plain", dtype=torch.float32)
    assert ckpt(capsys, "diff", tmp_path / "run", tmp_path / "plain")[0] == 0
    (source / "huggingface").rename(tmp_path / "elsewhere")
    assert ckpt(capsys, "import", source, tmp_path / "two", *told)[0] == 5


def test_what_the_system_refuses_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "pins.json")

    monkeypatch.setattr("burnish.checkpoint.tools.listing.read_pins", refuse)
    code, _, err = ckpt(capsys, "ls", run)
    assert code == 1
    assert str(run) in err
    assert "Permission denied" in err
