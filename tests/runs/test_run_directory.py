"""Names for the steps that there are, and directories that make way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.checkpoints.states import save_once

from burnish.config.document import dump_yaml
from burnish.config.resume import RunIdentity
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, IncompatibleError, MissingError
from burnish.files.lease import LEASE, holding_lease
from burnish.methods.table import METHODS
from burnish.runs.hub_revisions import at_newest_steps
from burnish.runs.preflight import require_inputs
from burnish.runs.run_directory import make_way, require_own_directory
from burnish.tracking.rundir import RunDirectory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    for step in (3, 9):
        save_once(root / "runs/my-sft/checkpoints", step)
    return root


@pytest.fixture
def work(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = Path(shutil.copytree(made, tmp_path / "work"))
    monkeypatch.chdir(root)
    return root


def config(**settings: object) -> RunConfig:
    return RunConfig.model_validate(settings)


def with_newest_steps(given: RunConfig) -> RunConfig:
    return at_newest_steps(given.model_dump(), given.directory)


STEPS = "runs/my-sft/checkpoints"


@pytest.mark.parametrize(
    ("given", "step"),
    [
        ("runs/my-sft", 9),
        ("runs/my-sft/", 9),
        ("runs/my-sft/latest", 9),
        (STEPS, 9),
        (f"{STEPS}/latest", 9),
        (f"{STEPS}/step-00000003", 3),
    ],
)
def test_a_run_stands_for_its_newest_step(work: Path, given: str, step: int) -> None:
    found = with_newest_steps(
        config(
            model={"path": given, "tokenizer": given, "lora": {"path": given}},
            critic={"path": given},
            reward={"models": [{"path": given}]},
        )
    )
    wanted = f"{STEPS}/step-0000000{step}/model"
    assert [found.model.path, found.model.tokenizer, found.model.lora.path] == [wanted] * 3
    assert [found.critic.path, found.reward.models[0].path] == [wanted] * 2


def test_a_critic_is_taken_from_the_critic_of_the_run(work: Path) -> None:
    (work / STEPS / "step-00000003/critic/model").mkdir(parents=True)
    found = with_newest_steps(config(critic={"path": f"{STEPS}/step-00000003"}))
    assert found.critic.path == f"{STEPS}/step-00000003/critic/model"


def test_other_places_stay_as_they_are(work: Path) -> None:
    for place in ("nowhere", "runs", f"{STEPS}/step-00000003/model", "s3://bucket/runs/my-sft"):
        given = config(model={"path": place})
        assert with_newest_steps(given) == given


def test_a_run_that_has_begun_keeps_its_model(work: Path) -> None:
    given = config(name="my-rl", model={"path": "runs/my-sft"})
    Path("runs/my-rl").mkdir()
    Path("runs/my-rl/config.yaml").write_text(dump_yaml(with_newest_steps(given)))
    save_once(work / STEPS, 12)
    assert with_newest_steps(given).model.path == f"{STEPS}/step-00000009/model"
    shutil.rmtree(f"{STEPS}/step-00000009")
    assert with_newest_steps(given).model.path == f"{STEPS}/step-00000012/model"


def test_what_is_missing_names_what_there_is(work: Path) -> None:
    with pytest.raises(MissingError, match="step-00000009"):
        require_inputs(config(model={"path": f"{STEPS}/step-00000007/model"}), METHODS["sft"])
    Path("runs/empty/checkpoints").mkdir(parents=True)
    with pytest.raises(MissingError, match="runs/empty"):
        with_newest_steps(config(model={"path": "runs/empty"}))


def begin(given: RunConfig, trainer: str = "sft") -> tuple[RunDirectory, RunIdentity]:
    """The directory of a run that has logged a step."""
    directory = RunDirectory(given.directory)
    directory.checkpoints.mkdir(parents=True)
    directory.config.write_text(dump_yaml(given))
    directory.environment.write_text(json.dumps({"trainer": trainer}))
    directory.metrics.write_text('{"step": 1}\n')
    return directory, RunIdentity(trainer, given)


def test_a_run_that_never_saved_makes_way_for_a_corrected_one(work: Path) -> None:
    first = config(name="x", seed=1)
    for number, trainer in ((1, "sft"), (2, "rl")):
        directory, same = begin(first)
        make_way(directory, same)
        assert directory.root.exists()
        other = RunIdentity(trainer, config(name="x", seed=3 - number))
        require_own_directory(directory, other)
        with holding_lease(directory.checkpoints / LEASE), pytest.raises(BurnishError):
            make_way(directory, other)
        make_way(directory, other)
        assert not directory.root.exists()
        assert Path(f"runs/x.{number}/metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("saved", ["step-00000003", "quarantine/step-00000003", "a mirror"])
def test_what_was_saved_makes_no_way_unless_asked(work: Path, saved: str) -> None:
    mirror = {"mirror": "s3://bucket/x"} if saved == "a mirror" else {}
    directory, _ = begin(config(name="x", seed=1, checkpoint=mirror))
    if not mirror:
        (directory.checkpoints / saved).mkdir(parents=True)
    other = RunIdentity("sft", config(name="x", seed=2, checkpoint=mirror))
    make_way(directory, other)
    with pytest.raises(IncompatibleError, match="seed"):
        require_own_directory(directory, other)
    if not mirror:
        make_way(directory, RunIdentity("sft", config(name="x", seed=1, resume="fresh")))
    assert directory.root.exists() == bool(mirror)


def test_long_values_are_shown_where_they_differ(work: Path) -> None:
    a, b = (f"data/{'a' * 50}/{end}.jinja" for end in ("first", "second"))
    directory, _ = begin(config(name="x", model={"chat_template": a}))
    (directory.checkpoints / "step-00000003").mkdir()
    with pytest.raises(IncompatibleError, match=r"first\.jinja.*second\.jinja"):
        require_own_directory(
            directory, RunIdentity("sft", config(name="x", model={"chat_template": b}))
        )
