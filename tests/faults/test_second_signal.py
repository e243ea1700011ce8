"""A second signal ends a run at once, also in the middle of the save that the first one asked for."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.states import committed
from support.runs.training_files import At, Command, done, make_files, outcome

from burnish.tracking.rundir import RunDirectory

UNVALIDATED = ["data.validation=[]", "evaluation.every=0"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("signals"))


@pytest.fixture(scope="module")
def in_peace(work: Path) -> dict[str, Any]:
    """What an uninterrupted run of six steps comes to."""
    return outcome(done(work, "sft", "sft.yaml", "name=peaceful", *UNVALIDATED, "steps=6"))


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        pytest.param(signal.SIGINT, signal.SIGINT, "Saver._lay_out", marks=pytest.mark.nightly),
        (signal.SIGINT, signal.SIGTERM, "Saver._commit"),
        pytest.param(signal.SIGTERM, signal.SIGTERM, "Saver._lay_out", marks=pytest.mark.nightly),
    ],
)
def test_a_second_signal_during_the_last_save(
    work: Path,
    in_peace: dict[str, Any],
    first: signal.Signals,
    second: signal.Signals,
    place: str,
) -> None:
    name = f"{first.name}_{second.name}{place}"
    argv = ["sft", "sft.yaml", f"name={name}", *UNVALIDATED]
    run = done(work, *argv, "steps=2")
    again = Command(
        work, [*argv, "steps=5000"], at=At(f"burnish.checkpoint.save:{place}", 1, second)
    )
    assert again.reached(3), again.output
    again.send(first)
    # It is killed by the signal; a shell says 128 + its number.
    assert again.wait() == -second, again.output
    assert RunDirectory(run).read_status()["state"] == "stopped"
    assert [step.step for step in committed(run / "checkpoints")] == [2]
    assert outcome(done(work, *argv, "steps=6")) == in_peace
    assert not list((run / "checkpoints").glob(".inflight*"))
