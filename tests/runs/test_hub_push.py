"""Runs that send their models to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.states import committed
from support.nightly import by_day
from support.runs.training_files import burnish, done
from support.services.hub import TOKEN, HubServer, running_hub

ARGV = ("sft", "sft.yaml", "evaluation.every=0", "checkpoint.push_to_hub=me/sums")
KEY = "models/me/sums"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with running_hub({}) as server:
        yield server


def environ(hub: HubServer, work: Path, **variables: str) -> dict[str, str]:
    given = {"HF_ENDPOINT": hub.url, "HF_HOME": str(work / "home"), "HF_TOKEN": TOKEN}
    return given | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"} | variables


def model_of(run: Path) -> dict[str, bytes]:
    model = committed(run / "checkpoints")[-1].path / "model"
    return {path.name: path.read_bytes() for path in model.iterdir()}


def test_the_last_model_arrives_and_a_finished_run_sends_nothing_more(
    hub: HubServer, work: Path
) -> None:
    run = done(work, *ARGV, "name=last", "steps=2", environ=environ(hub, work))
    assert hub.repositories[KEY] == model_of(run)
    assert hub.visible == {KEY: "private"}
    assert [message.split(",")[0] for message in hub.messages] == ["Step 2"]
    done(work, *ARGV, "name=last", "steps=2", environ=environ(hub, work))
    assert len(hub.messages) == 1
    assert [path.name for path in run.iterdir() if path.name.startswith(".push-")] == []


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_every_saved_step_is_sent_while_training_goes_on(
    hub: HubServer, work: Path, world: int
) -> None:
    argv = [*ARGV, f"name=each{world}", "steps=4", "checkpoint.save_every=2"]
    argv.append("checkpoint.hub_strategy=every_save")
    run = done(work, *argv, environ=environ(hub, work), world=world)
    steps = [message.split(",")[0] for message in hub.messages]
    assert (steps[0], steps[-1]) == ("Step 2", "Step 4")
    assert hub.repositories[KEY] == model_of(run)


@pytest.mark.nightly
def test_a_hub_that_does_not_answer_ends_no_run_and_gets_the_model_later(
    hub: HubServer, work: Path
) -> None:
    argv = [*ARGV, "name=later", "steps=2"]
    away = environ(hub, work, HF_ENDPOINT="http://127.0.0.1:9")
    code, output = burnish(work, *argv, environ=away)
    assert (code, "Traceback" in output) == (1, False), output
    assert "me/sums" in output
    assert committed(work / "runs/later/checkpoints")[-1].step == 2
    done(work, *argv, environ=environ(hub, work))
    assert hub.repositories[KEY] == model_of(work / "runs/later")


@pytest.mark.parametrize("change", by_day(["token", "offline", "read_only", "no_token"], ["token"]))
def test_without_permission_nothing_begins(hub: HubServer, work: Path, change: str) -> None:
    variables: dict[str, Any] = {
        "token": {"HF_TOKEN": "hf_wrong"},
        "offline": {"HF_HUB_OFFLINE": "1"},
        "no_token": {"HF_TOKEN": ""},
    }.get(change, {})
    if change == "read_only":
        hub.repositories[KEY] = {}
        hub.read_only = KEY
    code, output = burnish(work, *ARGV, "name=none", environ=environ(hub, work, **variables))
    assert (code, "checkpoint.push_to_hub" in output) == (2, True), output
    assert not (work / "runs/none").exists()
    assert hub.messages == []


def test_what_is_no_repository_is_refused(work: Path) -> None:
    for name in ("sums", "me/sums/again", "https://huggingface.co/me/sums"):
        code, output = burnish(work, *ARGV[:-1], f"checkpoint.push_to_hub={name}", "--dry-run")
        assert (code, "checkpoint.push_to_hub" in output) == (2, True), output
    code, output = burnish(work, *ARGV[:-1], "checkpoint.hub_strategy=every_save", "--dry-run")
    assert (code, "checkpoint.push_to_hub" in output) == (2, True), output
