from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.models.chat_templates import HYBRID, tokenizer_of
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


def test_nothing_is_overwritten_and_it_works_twice(here: Path) -> None:
    (here / "rewards.py").write_text("mine")
    for _ in range(2):
        assert main(["init", "rl"]) == 0
        assert main(["init", "sft", "--lora"]) == 0
    names = {path.name for path in here.iterdir()}
    assert names == {"data.jsonl", "rewards.py", "rewards-2.py", "rl.yaml", "sft.yaml"}
    assert (here / "rewards.py").read_text() == "mine"
    (function,) = read_config("rl.yaml").reward.functions
    assert function.function == "rewards-2.py:correct"
    assert read_config("sft.yaml").model.lora.rank == 16
    assert main(["init", "sft"]) == 0
    assert read_config("sft-2.yaml").model.lora.rank == 0


@pytest.mark.parametrize(
    ("count", "batch", "epochs", "share"),
    [(1, 1, 3, None), (25, 2, 3, None), (100, 10, 3, 10), (1000, 16, 3, 10), (2000, 16, 1, 5)],
)
def test_the_batch_and_the_split_suit_the_rows(
    count: int, batch: int, epochs: int, share: int | None, here: Path
) -> None:
    rows = [{"prompt": f"{number}=", "completion": str(number)} for number in range(count)]
    (here / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["init", "sft", "m", "rows.jsonl"]) == 0
    config = read_config("sft.yaml")
    assert (config.batch.examples, config.epochs) == (batch, epochs)
    assert config.data.validation == ([] if share is None else [f"{share}%"])
    assert (config.evaluation.every == 20) == (share is not None)


def test_a_row_is_shown_as_it_is_trained(
    here: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between › and ‹ is what the tokenizer's template marks as the assistant's."""
    tokenizer = tokenizer_of(HYBRID)
    place = save_tiny(
        tmp_path_factory.mktemp("chat"), vocab_size=len(tokenizer), max_position_embeddings=1024
    )
    tokenizer.save_pretrained(place)
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    (here / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert main(["init", "sft", str(place), "chats.jsonl"]) == 0
    shown = capsys.readouterr().out
    whole = tokenizer.apply_chat_template(messages, tokenize=False).rstrip()
    assert shown.replace("›", "").replace("‹", "").count(whole) == 1
    (trained,) = re.findall("›([^›]*)‹", shown.partition("\n\n")[2])
    assert trained.removesuffix(tokenizer.eos_token).endswith("2")
    assert trained.endswith(tokenizer.eos_token)
    length = len(tokenizer.apply_chat_template(messages)["input_ids"])
    assert f"{length} tokens on average" in shown
    limit = read_config("sft.yaml").data.max_length
    assert length * 1.5 <= limit
    assert main(["init", "rl", str(place)]) == 0
    assert read_config("rl.yaml").data.string_prompts == "user"


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


def test_nothing_is_written_if_anything_is_refused(
    model: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "rows.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": 5}\n')
    assert main(["init", "rl", model, "rows.jsonl"]) == 2
    save_tiny(here / "mute", vocab_size=100)
    assert main(["init", "rl", "mute"]) != 0
    (here / "rl.yaml").mkdir()
    assert {path.name for path in here.iterdir()} == {"rows.jsonl", "mute", "rl.yaml"}
    assert "wrote" not in capsys.readouterr().out


def test_a_directory_that_takes_no_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["init", "rl"]) == 2


def test_ids_of_a_hub_are_taken_as_they_are(here: Path) -> None:
    assert main(["init", "sft", "Qwen/Qwen3-0.6B@main", "trl-lib/Capybara"]) == 0
    config = read_config("sft.yaml")
    assert (config.model.path, config.data.train) == ("Qwen/Qwen3-0.6B@main", ["trl-lib/Capybara"])
