"""Runs of models and data sets of the Hugging Face Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import yaml
from support.models.tiny import tiny_model
from support.models.tokenizers import char_tokenizer, save_char_tokenizer
from support.runs.training_files import burnish, make_files, ranks
from support.services.hub import HubServer, hub_variables, running_hub

from burnish.config.load import read_config
from burnish.config.schema import RunConfig
from burnish.runs.hub_revisions import pin


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, bytes]]:
    """A tiny model and a data set of sums."""
    work = make_files(tmp_path_factory.mktemp("work"))
    torch.manual_seed(0)
    tokenizer = char_tokenizer()
    model = tiny_model(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=0
    )
    model.save_pretrained(work / "model")
    save_char_tokenizer(work / "model")
    rows = {n: (work / f"{n}.jsonl").read_bytes() for n in ("train", "validation")}
    return {
        "models/me/tiny": {p.name: p.read_bytes() for p in (work / "model").iterdir()},
        "datasets/me/sums": {f"{name}.jsonl": data for name, data in rows.items()},
    }


@pytest.fixture
def hub(repositories: Mapping[str, dict[str, bytes]]) -> Iterator[HubServer]:
    with running_hub({key: dict(files) for key, files in repositories.items()}) as server:
        yield server


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Two configurations that name the hub, and no file beside them."""
    make_files(tmp_path)
    for name in ("sft", "rl"):
        path = tmp_path / f"{name}.yaml"
        values = json.loads(path.read_text())
        values |= {"steps": 1, "model": {"path": "me/tiny"}, "evaluation": {"every": 0}}
        values["data"] = {"train": ["me/sums"], "validation": ["me/sums"]}
        path.write_text(json.dumps(values))
    for path in (tmp_path / "train.jsonl", tmp_path / "validation.jsonl"):
        path.unlink()
    return tmp_path


def environ(hub: HubServer, home: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}


def call(hub: HubServer, work: Path, *argv: str, **variables: str) -> str:
    code, output = burnish(work, *argv, environ=environ(hub, work / "home") | variables)
    assert code == 0, output
    return output


@pytest.mark.nightly
def test_a_run_keeps_the_commits_that_it_began_with(hub: HubServer, work: Path) -> None:
    model, sums = hub.commit("models/me/tiny"), hub.commit("datasets/me/sums")
    call(hub, work, "sft", "sft.yaml", "--dry-run")
    assert not any("safetensors" in path and "blobs" in path for _, path in hub.asked)
    call(hub, work, "sft", "sft.yaml")
    recorded = read_config(work / "runs/run/config.yaml")
    assert recorded.model.path == f"me/tiny@{model}"
    assert recorded.data.train == recorded.data.validation == [f"me/sums@{sums}"]

    hub.repositories["models/me/tiny"] = {"config.json": b"{}"}
    hub.repositories["datasets/me/sums"] = {"train.jsonl": b'{"prompt": "1", "completion": "2"}\n'}
    hub.asked.clear()
    call(hub, work, "sft", "sft.yaml", "steps=2", HF_HOME=str(work / "another home"))
    assert any(path.startswith("blobs/") for _, path in hub.asked)
    assert read_config(work / "runs/run/config.yaml").model == recorded.model
    hub.asked.clear()
    call(hub, work, "eval", "runs/run", HF_HUB_OFFLINE="1")
    call(hub, work, "sft", "sft.yaml", "steps=3")
    assert hub.asked == []


@pytest.mark.nightly
def test_judges_critics_and_adapters_may_be_ids(hub: HubServer, work: Path) -> None:
    settings = (
        "critic.path=me/tiny",
        "algorithm.advantage=gae",
        "model.tokenizer=me/tiny@main",
        "data.train=[hf://datasets/me/sums/train.jsonl]",
    )
    call(hub, work, "rl", "rl.yaml", *settings)
    hub.repositories["models/me/tiny"] = {}
    call(hub, work, "rl", "rl.yaml", "steps=2", *settings)
    code, output = burnish(
        work, "rl", "rl.yaml", "critic.path=me/tiny@v2", *settings[1:], environ=environ(hub, work)
    )
    assert code == 0, output  # another revision of the same repository is the run's own


@pytest.mark.nightly
def test_ranks_agree_on_commits_and_each_machine_downloads_once(hub: HubServer, work: Path) -> None:
    started = ranks(work, ["sft", "sft.yaml"], 2, environ=environ(hub, work / "home"))
    codes = [command.wait(100) for command in started]
    assert codes == [0, 0], started[0].output + started[1].output
    blobs = [path for method, path in hub.asked if path.startswith("blobs/") and method == "GET"]
    assert len(blobs) == len(set(blobs)) > 0
    assert sum(path.startswith("api/") and "/revision/" in path for _, path in hub.asked) <= 2


@pytest.mark.nightly
def test_ranks_tell_a_wrong_id_together(hub: HubServer, work: Path) -> None:
    argv = ["sft", "sft.yaml", "model.path=me/nobody"]
    started = ranks(work, argv, 2, environ=environ(hub, work / "home"))
    assert [command.wait(100) for command in started] == [5, 5]


@pytest.mark.nightly
def test_a_run_that_is_on_its_mirror_alone_keeps_its_commits(hub: HubServer, work: Path) -> None:
    mirror, commit = f"checkpoint.mirror=file://{work}/mirror", hub.commit("models/me/tiny")
    call(hub, work, "sft", "sft.yaml", mirror)
    shutil.rmtree(work / "runs")
    hub.repositories["models/me/tiny"] = {"config.json": b"{}"}
    home = str(work / "another home")
    call(hub, work, "sft", "sft.yaml", mirror, "steps=2", HF_HOME=home)
    recorded = read_config(work / "runs/run/config.yaml")
    assert recorded.model.path == f"me/tiny@{commit}"


def test_the_planner_reads_the_configuration_alone(hub: HubServer, work: Path) -> None:
    call(hub, work, "plan", "sft.yaml", "--devices", "1xCPU-4G")
    assert not any(path.startswith("blobs/") for _, path in hub.asked)


@pytest.mark.parametrize(
    ("setting", "code", "named"),
    [
        pytest.param("model.path=me/nobody", 5, "me/nobody", marks=pytest.mark.nightly),
        ("model.path=me/tiny@v9", 5, "v9"),
        pytest.param("data.train=[me/nothing]", 5, "me/nothing", marks=pytest.mark.nightly),
        ("data.train=[me/sums:other]", 5, "train, validation"),
        pytest.param("model.tokenizer=me/empty", 5, "me/empty", marks=pytest.mark.nightly),
    ],
)
def test_a_wrong_id_is_an_error_that_names_its_setting(
    hub: HubServer, work: Path, setting: str, code: int, named: str
) -> None:
    hub.repositories["models/me/empty"] = {"config.json": b"{}"}
    found, output = burnish(work, "sft", "sft.yaml", setting, environ=environ(hub, work / "home"))
    assert (found, "Traceback" in output) == (code, False), output
    assert setting.partition("=")[0] in output
    assert named in output


@pytest.mark.nightly
def test_a_dry_run_looks_at_the_first_rows(hub: HubServer, work: Path) -> None:
    call(hub, work, "sft", "sft.yaml", "--dry-run")
    row = b'{"qestion": "1", "reply": "2"}\n'
    hub.repositories["datasets/me/odd"] = {"train.jsonl": row, "test.jsonl": row}
    argv = ["sft", "sft.yaml", "data.train=me/odd", "--dry-run"]
    code, output = burnish(work, *argv, environ=environ(hub, work / "home"))
    assert (code, "Traceback" in output) == (5, False), output
    assert "qestion" in output


def test_settings_are_checked_without_the_hub(hub: HubServer, work: Path) -> None:
    call(hub, work, "config", "check", "sft.yaml")
    assert hub.asked == []
    values = RunConfig.model_validate({"model": {"path": "me/tiny"}}).model_dump()
    with hub_variables(HF_ENDPOINT=hub.url, HF_HOME=str(work), HF_HUB_OFFLINE="0"):
        pin(values, None, ask=False)
        assert values["model"]["path"] == "me/tiny"
        pin(values, None)
        assert values["model"]["path"] == f"me/tiny@{hub.commit('models/me/tiny')}"


@pytest.mark.nightly
def test_a_card_names_model_and_data_of_the_hub(hub: HubServer, work: Path) -> None:
    call(hub, work, "sft", "sft.yaml", "model.lora.rank=2")
    (model,) = work.glob("runs/run/checkpoints/*/model")
    card = yaml.safe_load((model / "README.md").read_text().split("---\n")[1])
    assert card["base_model"] == "me/tiny"
    assert card["datasets"] == ["me/sums"]
    assert card["library_name"] == "peft"
    adapter = json.loads((model / "adapter_config.json").read_text())
    commit = hub.commit("models/me/tiny")
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("me/tiny", commit)
    call(hub, work, "ckpt", "export", "runs/run", "whole", "--merged", HF_HUB_OFFLINE="1")
    assert (work / "whole/config.json").is_file()
