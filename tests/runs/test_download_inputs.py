"""Runs whose inputs lie behind URLs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from support.models.tokenizers import save_char_tokenizer
from support.runs.training_files import FRESH, REWARDS, burnish, make_files
from support.services.s3 import S3Server

from burnish.config.document import dump_yaml
from burnish.config.load import read_config
from burnish.config.schema import EngineConfig, RunConfig
from burnish.data.sources import load_rows
from burnish.errors import MissingError, UsageError
from burnish.files.remote import Remote
from burnish.functions import load_function
from burnish.methods.table import METHODS
from burnish.runs.download_inputs import local_inputs

CPU = torch.device("cpu")

number = itertools.count()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path) -> Remote:
    """All inputs of a run, and things that are none."""
    remote = Remote(f"memory://inputs {next(number)}")
    fill(remote, tmp_path / "tokenizer")
    return remote


def fill(remote: Remote, scratch: Path) -> None:
    save_char_tokenizer(scratch)
    for path in scratch.iterdir():
        remote.put_file(f"model/{path.name}", path)
    remote.put("model/config.json", json.dumps(FRESH).encode())
    remote.put("model/pytorch_model.bin", b"a pickle")
    remote.put("model/original/model.safetensors", b"")
    remote.put("templates/chat template.jinja", b"{{ messages }}")
    remote.put("code/rewards.py", REWARDS.encode())
    for part in range(3):
        remote.put(f"data/part-{part}.jsonl", f'{{"prompt": "{part}", "answer": "1"}}\n'.encode())
    remote.put("data/README.md", b"not data")


def config(store: Remote, **data: list[str]) -> RunConfig:
    url = str(store.url)
    return RunConfig.model_validate(
        {
            "model": {
                "path": f"{url}/model/",
                "tokenizer": f"{url}/model",
                "chat_template": f"{url}/templates/chat template.jinja",
            },
            "data": data or {"train": [f"{url}/data"], "validation": [f"{url}/data/part-0.jsonl"]},
            "reward": {
                "functions": [{"function": f"{url}/code/rewards.py:letters", "weight": 2}],
                "models": [{"path": f"{url}/model"}],
            },
            "critic": {"path": f"{url}/model"},
            "algorithm": {"advantage": "gae"},
            "engine": {"precision": "fp32"},
            "tracking": {"progress": False},
        }
    )


def test_every_input_becomes_a_path_of_this_machine(store: Remote, cache: Path) -> None:
    found, local = local_inputs(config(store), CPU, method=METHODS["rl"])
    assert found == config(store)
    model = Path(local.model.path or "")
    names = {path.name for path in model.rglob("*")}
    assert {"config.json", "tokenizer.json"} < names
    assert not names & {"pytorch_model.bin", "original"}
    assert local.model.tokenizer == local.critic.path == str(model)
    assert local.reward.models[0].path == str(model)
    assert local.reward.part_names == config(store).reward.part_names == ["letters", "model"]
    assert Path(local.model.chat_template or "").read_text() == "{{ messages }}"
    assert [row["prompt"] for row in load_rows(local.data.train).span(0, 3)] == ["0", "1", "2"]
    assert [Path(path).name for path in local.data.validation] == ["part-0.jsonl"]
    (reward,) = local.reward.functions
    assert reward.weight == 2
    assert load_function(reward.function, "reward.functions")(["abcd"]) == [1.0]
    assert "://" not in local.model_dump_json()


def test_a_pattern_stands_for_what_fits_it(store: Remote) -> None:
    _, local = local_inputs(
        config(store, train=[f"{store.url}/*/part-[12].jsonl"]), CPU, method=METHODS["rl"]
    )
    assert [Path(path).name for path in local.data.train] == ["part-1.jsonl", "part-2.jsonl"]


def test_a_new_model_is_made_from_a_file_behind_a_url(store: Remote) -> None:
    fresh = RunConfig.model_validate({"model": {"fresh": f"{store.url}/model/config.json"}})
    path = local_inputs(fresh, CPU, method=METHODS["rl"])[1].model.fresh
    assert json.loads(Path(str(path)).read_text()) == FRESH


def test_paths_of_this_machine_stay_as_they_are(cache: Path) -> None:
    plain = RunConfig.model_validate(
        {
            "engine": {"precision": "bf16"},
            "model": {"path": "~/model", "chat_template": "t.jinja"},
            "data": {"train": ["data/*.jsonl"]},
            "reward": {"functions": [{"function": "r.py:f"}, {"function": "numeric"}]},
        }
    )
    assert local_inputs(plain, CPU, method=METHODS["rl"]) == (plain, plain)
    assert not cache.exists()


def test_an_evaluation_copies_no_training_data(store: Remote) -> None:
    _, local = local_inputs(config(store), CPU, method=METHODS["eval"])
    assert local.data.train == [f"{store.url}/data"]
    assert local.critic.path == f"{store.url}/model"
    assert "://" not in local.data.validation[0]


@pytest.mark.parametrize(
    ("setting", "value", "kind"),
    [
        ("model.path", "memory://nowhere", MissingError),
        ("model.chat_template", "memory://nowhere/t.jinja", MissingError),
        ("model.lora", {"path": "nowhere"}, MissingError),
        ("data.train", ["memory://nowhere/*.jsonl"], MissingError),
        ("model.path", "ftp://organization/model", UsageError),
        ("data.train", ["s3://user:secret@bucket/data"], UsageError),
    ],
)
def test_what_is_not_there_is_an_error(setting: str, value: object, kind: type[Exception]) -> None:
    section, _, field = setting.partition(".")
    with pytest.raises(kind) as caught:
        local_inputs(RunConfig.model_validate({section: {field: value}}), CPU, method=METHODS["rl"])
    assert "secret" not in str(caught.value)


@pytest.mark.nightly
def test_a_run_with_everything_behind_urls(tmp_path: Path, s3_server: S3Server) -> None:
    """It learns from them, and keeps the URLs in its record."""
    (tmp_path / "work").mkdir()
    work = make_files(tmp_path / "work")
    bucket = Remote(s3_server.make_bucket(f"run-{next(number)}"))
    for name in ("train.jsonl", "validation.jsonl", "rewards.py"):
        bucket.put_file(name, work / name)
    for path in (work / "tokenizer").iterdir():
        bucket.put_file(f"tokenizer/{path.name}", path)
        path.unlink()
    for name in ("train.jsonl", "validation.jsonl", "rewards.py"):
        (work / name).unlink()
    where = [
        f"model.tokenizer={bucket.url}/tokenizer",
        f"data.train=[{bucket.url}/train.jsonl]",
        f"data.validation=['{bucket.url}/valid*.jsonl']",
        f"reward.functions=[{{function: '{bucket.url}/rewards.py:letters'}}]",
    ]
    environ = {**s3_server.environ, "BURNISH_CACHE": str(tmp_path / "cache")}
    code, log = burnish(work, "rl", "rl.yaml", "name=far", "steps=1", *where, environ=environ)
    assert code == 0, log
    recorded = read_config(work / "runs/far/config.yaml")
    assert recorded.data.train == [f"{bucket.url}/train.jsonl"]


@pytest.mark.parametrize(("quick", "precision"), [(True, "bf16"), (False, "fp32")])
def test_the_first_start_decides_on_the_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool, precision: str
) -> None:
    settings = RunConfig(output_dir=str(tmp_path))
    monkeypatch.setattr("burnish.runs.download_inputs.has_bf16_products", lambda device: quick)
    recorded, local = local_inputs(settings, CPU, method=METHODS["rl"])
    assert recorded.engine.precision == local.engine.precision == precision
    settings.directory.mkdir()
    (settings.directory / "config.yaml").write_text(dump_yaml(recorded))
    monkeypatch.setattr("burnish.runs.download_inputs.has_bf16_products", lambda device: not quick)
    assert local_inputs(settings, CPU, method=METHODS["rl"])[0] == recorded
    given = settings.model_copy(update={"engine": EngineConfig(precision="bf16")})
    assert local_inputs(given, CPU, method=METHODS["rl"])[0] == given
