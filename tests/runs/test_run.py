"""Opening a run's directory, as a caller of the library does it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from burnish.checkpoint.background import Finished
from burnish.checkpoint.manager import Checkpoints
from burnish.config.schema import RunConfig
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, IncompatibleError, UsageError
from burnish.files.lease import holding_lease
from burnish.methods.table import METHODS
from burnish.runs.run_observers import RunObservers
from burnish.runs.session import open_run
from burnish.runs.step_saver import StepSaver
from burnish.runs.trainer_state import Fingerprints


def config_in(root: Path, **changes: object) -> RunConfig:
    return RunConfig.model_validate({"output_dir": str(root), "name": "run", **changes})


def open_and_close(config: RunConfig, trainer: str = "sft") -> None:
    with open_run(config, METHODS[trainer], Layout(), torch.device("cpu")):
        pass


def contents(directory: Path) -> dict[str, bytes]:
    """What identifies the run; the lease's file is not looked at."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_a_directory_in_use_stays_as_it_is(tmp_path: Path) -> None:
    open_and_close(config_in(tmp_path))
    before = contents(tmp_path / "run")
    assert before.keys() - {"git.diff"} == {"config.yaml", "environment.json", "status.json"}
    with (
        holding_lease(tmp_path / "run/checkpoints/.lease"),
        pytest.raises(BurnishError),
    ):
        open_and_close(config_in(tmp_path, steps=7))
    assert contents(tmp_path / "run") == before
    open_and_close(config_in(tmp_path, steps=7))
    assert contents(tmp_path / "run")["config.yaml"] != before["config.yaml"]


@pytest.mark.parametrize(
    ("changes", "trainer", "error"),
    [
        ({"seed": 3}, "sft", IncompatibleError),
        ({}, "rl", IncompatibleError),
        ({"resume": "never"}, "sft", UsageError),
    ],
)
def test_a_directory_that_is_refused_stays_as_it_is(
    tmp_path: Path, changes: dict[str, object], trainer: str, error: type[BurnishError]
) -> None:
    open_and_close(config_in(tmp_path))
    (tmp_path / "run/checkpoints/step-00000003").mkdir()
    before = contents(tmp_path / "run")
    with pytest.raises(error):
        open_and_close(config_in(tmp_path, **changes), trainer)
    assert contents(tmp_path / "run") == before


def test_a_start_that_failed_before_anything_leaves_its_directory_to_a_corrected_one(
    tmp_path: Path,
) -> None:
    open_and_close(config_in(tmp_path, seed=3))
    open_and_close(config_in(tmp_path, seed=4), "rl")
    assert "seed: 4" in (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "run/metrics.jsonl").write_text("")
    open_and_close(config_in(tmp_path, seed=5))


def test_never_resuming_refuses_a_directory_with_steps_and_no_other(tmp_path: Path) -> None:
    never = config_in(tmp_path, resume="never")
    open_and_close(never)
    open_and_close(never)
    (tmp_path / "run/checkpoints/step-00000003").mkdir()
    with pytest.raises(UsageError) as refused:
        open_and_close(never)
    assert "step-00000003" in str(refused.value)
    open_and_close(config_in(tmp_path))


class OneSave(Checkpoints):
    """Checkpoints whose save in the background went like this."""

    def __init__(self, finished: Finished) -> None:
        self._told = finished

    def finished(self, *, wait: bool) -> Finished:
        return self._told


@pytest.mark.parametrize(
    ("error", "warning", "said", "saved"),
    [
        (None, None, "", 3),
        (BurnishError("no room"), None, "STEP 3 IS NOT SAVED", None),
        (None, BurnishError("an old step stays"), "3 is committed, but an old step stays", 3),
    ],
)
def test_how_a_save_went_is_said(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: BurnishError | None,
    warning: BurnishError | None,
    said: str,
    saved: int | None,
) -> None:
    with open_run(config_in(tmp_path), METHODS["sft"], Layout(), torch.device("cpu")) as session:
        told = replace(session, checkpoints=OneSave(Finished(3, error, warning)))
        saver = StepSaver(told, {}, Fingerprints("", "", 1, ""), RunObservers(told, 3))
        saver.note_finished_save(wait=False)
    assert said in caplog.text
    assert len(caplog.records) == bool(said)
    assert saver.saved_step == saved
