"""No room on the disk, for real, in the middle of a save: the step before stays, and the run goes on from it."""

from __future__ import annotations

import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints.states import committed
from support.runs.training_files import Command, burnish, done, make_files, metrics

from burnish.checkpoint.steps import verify


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("disk"))


def step_bytes(work: Path) -> int:
    """How large a committed step is."""
    run = done(work, "sft", "sft.yaml", "name=measured", "steps=1")
    (step,) = committed(run / "checkpoints")
    return sum(path.stat().st_size for path in step.path.rglob("*") if path.is_file())


@pytest.fixture
def small_disk(work: Path, tmp_path: Path) -> Iterator[Path]:
    """A disk on which one step fits, and not two."""
    kilobytes = int(step_bytes(work) * 1.5) // 1024 + 200
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(tmp_path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def assert_only(run: Path, step: int) -> None:
    """This step is there, whole, and nothing beside it."""
    (found,) = committed(run / "checkpoints")
    assert found.step == step
    assert not list(verify(found.path))
    assert not list((run / "checkpoints").glob(".inflight*"))


@pytest.mark.nightly
def test_a_disk_without_room_for_another_step(work: Path, small_disk: Path) -> None:
    argv = [
        "sft", "sft.yaml", "name=run", f"output_dir={small_disk}", "checkpoint.reserve_gb=0", "tracking.trackers=[]",
    ]  # fmt: skip
    code, output = burnish(work, *argv, "steps=2")
    assert code == 0, output
    code, output = burnish(work, *argv, "steps=4")
    assert code == 1, output
    said = output.partition("error: ")[2]
    assert "step 4" in said, output
    assert "do: " in said, output
    assert "Traceback" not in output
    assert_only(small_disk / "run", 2)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    code, output = burnish(work, *argv, "steps=4")
    assert code == 0, output
    assert [row["step"] for row in metrics(small_disk / "run")] == [0, 1, 2, 3, 4]
    assert committed(small_disk / "run/checkpoints")[-1].step == 4


def limit_files(pid: int, size: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def started(work: Path, argv: list[str]) -> Command:
    """A run that has made a step and has many more to make."""
    command = Command(work, [*argv, "steps=5000"])
    assert command.reached(3), command.output
    return command


@pytest.mark.nightly
def test_metrics_that_cannot_be_written(work: Path) -> None:
    argv = ["sft", "sft.yaml", "name=log", "evaluation.every=0", "tracking.trackers=[]"]
    run = done(
        work, *argv, "steps=12"
    )  # the limit goes for the command's output too, which is shorter
    command = started(work, argv)
    limit_files(command.pid, (run / "metrics.jsonl").stat().st_size)
    assert command.wait() == 1
    assert "runs/log" in command.output.partition("error: ")[2], command.output
    assert_only(run, 12)
    done(work, *argv, "steps=14")
    assert [row["step"] for row in metrics(run)] == list(range(15))


def test_files_that_cannot_be_written_to_their_end(work: Path) -> None:
    argv = ["sft", "sft.yaml", "name=cut", "checkpoint.reserve_gb=0", "evaluation.every=0"]
    run = done(work, *argv, "steps=2")
    largest = max(path.stat().st_size for path in run.glob("checkpoints/*/training/*"))
    command = started(work, argv)
    limit_files(command.pid, largest // 2)
    command.send(signal.SIGTERM)
    assert command.wait() == 1, command.output
    said = command.output.partition("error: ")[2]
    assert "step " in said, command.output
    assert "do:" in said, command.output
    assert_only(run, 2)
    done(work, *argv, "steps=4")
    assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3, 4]
