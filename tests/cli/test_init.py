from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny import save_tiny
from support.models.tokenizers import char_tokenizer, save_char_tokenizer

from burnish.cli.main import main
from burnish.config.load import read_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny(directory, vocab_size=len(char_tokenizer()), max_position_embeddings=1024)
    save_char_tokenizer(directory)
    return str(directory)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rewards_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("rewards_of_init", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_what_is_written_runs(kind: str, model: str, here: Path) -> None:
    assert main(["init", kind, model]) == 0
    written = {"data.jsonl", f"{kind}.yaml"} | ({"rewards.py"} if kind == "rl" else set())
    assert {path.name for path in here.iterdir()} == written
    assert main([kind, f"{kind}.yaml", "--dry-run", "--devices", "1xCPU-8G"]) == 0


def test_nothing_is_overwritten_and_nothing_half_written(here: Path) -> None:
    (here / "rewards.py").write_text("mine")
    assert main(["init", "rl"]) == 2
    assert [path.name for path in here.iterdir()] == ["rewards.py"]
    assert (here / "rewards.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("row", "function", "value"),
    [
        ({"question": "1+1?", "answer": "so #### 1,002"}, "correct", 1.0),
        ({"prompt": [{"role": "user", "content": "x"}], "solution": 1002}, "correct", 1.0),
        ({"prompt": "x", "reward_model": {"ground_truth": "1002"}}, "correct", 1.0),
        ({"prompt": "x"}, "brief", 1 / 1.09),
    ],
)
def test_the_reward_gets_what_the_data_give_it(
    row: dict[str, Any], function: str, value: float, here: Path
) -> None:
    (here / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["init", "rl", "m", "rows.jsonl"]) == 0
    config = read_config("rl.yaml")
    assert (config.model.path, config.data.train) == ("m", ["rows.jsonl"])
    assert [each.function for each in config.reward.functions] == [f"rewards.py:{function}"]
    reward = getattr(rewards_of(here / "rewards.py"), function)
    columns = {name: [each] for name, each in row.items()}
    message = {"role": "assistant", "content": "it's 1002"}
    for completion in ("it's 1002", [message]):
        assert reward(completions=[completion], **columns) == [value]


def test_data_that_the_command_cannot_read_are_refused(here: Path) -> None:
    assert main(["init", "sft", "m", "none.jsonl"]) == 5
    (here / "rows.jsonl").write_text('{"other": 1}\n')
    assert main(["init", "rl", "m", "rows.jsonl"]) == 5
    assert [path.name for path in here.iterdir()] == ["rows.jsonl"]


def test_ids_of_a_hub_are_taken_as_they_are(here: Path) -> None:
    assert main(["init", "sft", "Qwen/Qwen3-0.6B@main", "trl-lib/Capybara"]) == 0
    config = read_config("sft.yaml")
    assert (config.model.path, config.data.train) == ("Qwen/Qwen3-0.6B@main", ["trl-lib/Capybara"])
