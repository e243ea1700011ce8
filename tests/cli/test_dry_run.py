from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers_for_tests import char_tokenizer

from burnish.cli.dry_run import require_contents
from burnish.config.load import load_config
from burnish.data.sources import load_rows
from burnish.data.tasks import ExampleDataset, PromptDataset
from burnish.errors import BurnishError, CorruptError, MissingError, UsageError
from burnish.files.safetensors import build_header

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the least that a dry run lets pass, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    (tmp_path / "m/tokenizer.json").write_text('{"model": {}}')
    header, _ = build_header([("weight", "F32", (2,))], {})
    (tmp_path / "m/model.safetensors").write_bytes(header + bytes(8))
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (tmp_path / "rw.py").write_text("def f(completions, **columns):\n    return [0.0]\n")
    return tmp_path


def look(*overrides: str, command: Any = "rl", run_dir: Path | None = None) -> None:
    plain = [
        "model.path=m",
        "data.train=[d.jsonl]",
        "reward.functions=[{function: 'rw.py:f'}]",
    ]
    require_contents(load_config(None, [*plain, *overrides]).config, command, run_dir)


def test_what_is_in_order_passes(work: Path) -> None:
    look()
    look("reward.functions=[{function: numeric}, {function: 'math:sqrt'}]", "critic.path=m")


@pytest.mark.parametrize(
    "setting", ["tracking.trackers", "algorithm.advantage", "algorithm.policy_loss"]
)
def test_functions_that_settings_name_are_looked_for(work: Path, setting: str) -> None:
    look("tracking.trackers=['rw.py:f']")
    value = "rw.py:g" if setting.startswith("algorithm") else "['rw.py:g']"
    with pytest.raises(UsageError) as caught:
        look(f"{setting}={value}")
    assert setting in caught.value.problem


def test_everything_is_reported_together(work: Path) -> None:
    (work / "d.jsonl").write_text('{"qestion": "1+1?", "anser": "2"}\n')
    (work / "m/model.safetensors").write_text("x")
    (work / "m/tokenizer.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        look("reward.functions=[{function: 'rw.py:g'}]")
    for fact in (
        "4 problems",
        "model.safetensors is truncated",
        "tokenizer.json is no tokenizer",
        "no usable columns in d.jsonl",
        "columns qestion, anser",
        "did you mean qestion? Name the column in data.prompt_column",
        "there is no function rw.py:g",
        "rw.py with f",
    ):
        assert fact in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_rows(work: Path, text: str) -> None:
    (work / "d.jsonl").write_text(text)
    with pytest.raises(UsageError, match=r"d\.jsonl has no rows"):
        look()


@pytest.mark.parametrize(
    ("override", "commands", "files"),
    [
        ("model.path=b", "sft rl eval", ["b/config.json", "b/model.safetensors", "b/tokenizer.json"]),
        ("model.tokenizer=b", "sft rl eval", ["b/tokenizer.json"]),
        ("model.lora.path=b", "sft rl eval", ["b/model.safetensors"]),
        ("model={path: null, fresh: b.json, tokenizer: m}", "sft rl eval", ["b.json"]),
        ("critic.path=b", "rl", ["b/config.json", "b/model.safetensors"]),
        ("reward.models=[{path: b}]", "rl eval", ["b/config.json", "b/model.safetensors", "b/tokenizer.json"]),
        ("reward.functions=[{function: 'b.py:f'}]", "rl eval", ["b.py"]),
        ("data.train=[b.jsonl]", "sft rl", ["b.jsonl"]),
        ("data.validation=[b.jsonl]", "sft rl eval", ["b.jsonl"]),
    ],
)  # fmt: skip
def test_each_command_looks_at_what_it_reads(
    work: Path, override: str, commands: str, files: list[str]
) -> None:
    (work / "d.jsonl").write_text('{"prompt": "1+1", "completion": "2"}\n')
    (work / "b").mkdir()
    for name in ("b/config.json", "b/model.safetensors", "b/tokenizer.json", "b.json", "b.jsonl", "b.py"):  # fmt: skip
        (work / name).write_text("(")
    for command in ("sft", "rl", "eval"):
        said = ""
        try:
            look(override, command=command)
        except BurnishError as error:
            said = str(error)
        named = sorted(set(re.findall(r"\bb[./][\w.]*\w", said)))
        assert named == (files if command in commands.split() else []), command


def test_what_lies_behind_urls_is_left_to_the_run(work: Path) -> None:
    url = "s3://b/x"
    look(f"model={{path: {url}, tokenizer: {url}, lora: {{path: {url}}}}}", f"critic.path={url}")
    look(
        f"model={{path: null, fresh: {url}, tokenizer: {url}}}", f"reward.models=[{{path: {url}}}]"
    )
    look(
        f"data.train=[{url}]",
        f"data.validation=[{url}]",
        f"reward.functions=[{{function: '{url}.py:f'}}]",
    )


def test_a_run_that_is_evaluated_brings_its_own_model(work: Path) -> None:
    (work / "m/model.safetensors").unlink()
    with pytest.raises(MissingError, match="lacks weights"):
        look()
    look("data.validation=[d.jsonl]", command="eval", run_dir=work)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("m/config.json", "{", "config.json is not JSON"),
        ("m/config.json", "[]", "config.json is not a JSON object"),
        ("m/tokenizer.json", '{"model": ', "tokenizer.json is not JSON"),
        ("m/tokenizer.json", '{"a": 1}', "tokenizer.json is no tokenizer"),
    ],
)
def test_a_broken_file_of_the_model(work: Path, file: str, content: str, said: str) -> None:
    (work / file).write_text(content)
    with pytest.raises(CorruptError, match=said):
        look()


def test_a_model_without_a_tokenizer(work: Path) -> None:
    (work / "m/tokenizer.json").unlink()
    with pytest.raises(MissingError, match="m holds no tokenizer"):
        look()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{\n", "d.jsonl, line 2 is broken"),
        ("[1]\n", "d.jsonl, line 2 is broken: a JSON list"),
        ("\xff\n", "d.jsonl, line 2 is broken: not UTF-8"),
    ],
)
def test_a_broken_line(work: Path, line: str, said: str) -> None:
    (work / "d.jsonl").write_bytes(b'{"prompt": "a"}\n' + line.encode("latin-1"))
    with pytest.raises(UsageError, match=said):
        look()


def test_data_that_are_not_what_their_suffix_says(work: Path) -> None:
    (work / "d.parquet").write_text("nothing of that")
    with pytest.raises(UsageError, match=r"d\.parquet cannot be read as Parquet"):
        look("data.train=[d.parquet]")
    (work / "d.csv").write_text("prompt\n")
    with pytest.raises(UsageError, match=r"d\.csv is of no known kind"):
        look("data.train=[d.csv]")


ROWS: list[tuple[dict[str, Any], list[str]]] = [
    ({"prompt": "a"}, []),
    ({"question": "a", "answer": "b"}, []),
    ({"problem": "a", "solution": "b"}, []),
    ({"messages": CHAT}, []),
    ({"chat": CHAT}, ["data.messages_column=chat"]),
    ({"chat": CHAT}, []),
    ({"text": "a"}, []),
    ({"text": "a", "in": {"chat": CHAT}}, ["data.messages_column=in.chat"]),
    ({"text": "a", "prompt": "b"}, ["data.messages_column=gone"]),
    ({"messages": CHAT, "prompt": "b"}, ["data.text_column=gone"]),
    ({"prompt": "a", "completion": "b"}, []),
    ({"prompt": "a", "reply": "b"}, ["data.completion_column=reply"]),
    ({"prompt": "a", "reply": "b"}, []),
    ({"query": "a", "completion": "b"}, ["data.prompt_column=query"]),
    ({"query": "a", "completion": "b"}, ["data.prompt_column=qeury"]),
    ({"prompt": "a", "messages": CHAT}, ["data.prompt_column=prompt"]),
    ({"in": {"prompt": "a"}, "completion": "b"}, ["data.prompt_column=in.prompt"]),
    ({"in": {"prompt": "a"}, "completion": "b"}, ["data.prompt_column=in.promt"]),
    ({"prompt": "a", "reward_model": {"ground_truth": "b"}}, []),
    ({"prompt": "a", "gold": "b"}, ["data.answer_column=gold"]),
    ({"prompt": "a", "gold": "b"}, ["data.answer_column=glod"]),
    ({"qestion": "a", "anser": "b"}, []),
]


def json_lines(path: Path, row: dict[str, Any]) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text(f"{json.dumps(row)}\n")
    return path


def json_array(path: Path, row: dict[str, Any]) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps([row, row], indent=1))
    return path


def parquet(path: Path, row: dict[str, Any]) -> Path:
    path = path.with_suffix(".parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    return path


def refuses(action: Callable[[], object]) -> bool:
    try:
        action()
    except BurnishError:
        return True
    return False


@pytest.mark.parametrize("write", [json_lines, parquet])
def test_columns_are_refused_where_the_data_layer_refuses_them(
    work: Path, write: Callable[[Path, dict[str, Any]], Path]
) -> None:
    tokenizer = char_tokenizer()
    seen = set()
    for number, (row, overrides) in enumerate(ROWS):
        path = write(work / f"d{number}", row)
        data = load_config(None, overrides).config.data
        rows = load_rows([str(path)])
        for command, dataset in (("rl", PromptDataset), ("sft", ExampleDataset)):
            wrong = refuses(lambda kind=dataset, rows=rows, data=data: kind(rows, tokenizer, data))
            given = [f"data.train=[{path}]", *overrides]
            assert refuses(lambda given=given, to=command: look(*given, command=to)) == wrong, row
            seen.add((command, wrong))
    assert len(seen) == 4


def test_a_byte_order_mark_is_no_part_of_the_first_line(work: Path) -> None:
    (work / "d.jsonl").write_bytes(codecs.BOM_UTF8 + 2 * (work / "d.jsonl").read_bytes())
    assert load_rows(["d.jsonl"]).columns == ["prompt", "answer"]
    look()


def test_a_file_that_only_all_of_it_would_tell_is_left_to_the_run(work: Path) -> None:
    path = json_array(work / "d", {"prompt": "a"})
    assert len(load_rows([str(path)])) == 2
    look(f"data.train=[{path}]")


def test_a_column_that_the_first_rows_lack(work: Path) -> None:
    lines = ['{"id": 1}'] * 100
    (work / "d.jsonl").write_text("\n".join([*lines, '{"id": 1, "prompt": "a"}', ""]))
    look()
    (work / "d.jsonl").write_text("\n".join([*lines, ""]))
    with pytest.raises(MissingError, match="columns id"):
        look()
