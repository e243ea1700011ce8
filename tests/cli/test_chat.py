"""Asking a model, compared with plain transformers."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks.processes import PATIENCE_SECONDS
from support.runs.training_files import done, make_files
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from burnish.cli.chat import recommended
from burnish.cli.main import main
from burnish.errors import BurnishError

Talk = Callable[..., tuple[int, str, str]]
FP32 = "engine.precision=fp32"
TEXTS = "1+1=\n\nand 2?\n/reset\n3+3=\n"


def answers(model: Path, *conversations: list[str]) -> str:
    """What transformers answers greedily, a line for each question."""
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)  # fmt: skip
    said = ""
    for questions in conversations:
        messages: list[dict[str, str]] = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)  # fmt: skip
            made = network.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
            text = tokenizer.decode(made, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            said += f"{text}\n"
    return said


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of two steps, which hardly learn: the model still says something."""
    work = make_files(tmp_path_factory.mktemp("chat"))
    steps = ("steps=2", "evaluation.every=0", "checkpoint.save_every=1")
    done(work, "sft", "sft.yaml", *steps, "optim.lr=1e-4", "model.fresh.initializer_range=0.5")
    return work


@pytest.fixture
def work(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same as working directory."""
    monkeypatch.chdir(trained)
    return trained


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Give `burnish chat` lines of standard input; return its exit code and what it wrote."""

    def talking(lines: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        capsys.readouterr()
        code = main(["chat", *map(str, arguments)])
        return code, *capsys.readouterr()

    return talking


def test_a_conversation(work: Path, talk: Talk) -> None:
    run = Path("runs/run")
    model = run / "checkpoints/step-00000002/model"
    wanted = answers(model, ["1+1=", "and 2?"], ["3+3="])
    for place in (run, model, model.parent, run / "checkpoints" / "latest"):
        assert talk(TEXTS, place, FP32, "--max-tokens", 3)[:2] == (0, wanted)
    assert all(wanted.splitlines())
    settings = ("rollout.temperature=0", "rollout.max_response_length=3", "precision=fp32")
    assert talk(TEXTS, run, *settings)[:2] == (0, wanted)


@pytest.mark.nightly
def test_commands_are_not_sent_to_the_model(work: Path, talk: Talk) -> None:
    run = Path("runs/run")
    wanted = answers(run / "checkpoints/step-00000002/model", ["1+1=", "and 2?"], ["3+3="])
    lines = (
        "/help\n/temperature\n1+1=\n/nothing\n/temperatur 2\n/temperature cold\nand 2?\n/max-tokens -1\n"
        "/system\n/reset\n3+3=\n/quit\nnot asked\n"
    )
    code, out, err = talk(lines, run, FP32, "--max-tokens", 3)
    assert (code, out) == (0, wanted)
    assert "/nothing" in err
    quoted = '"""1+\n1="""\n /exit\n/exit\n'
    wanted = answers(run / "checkpoints/step-00000002/model", ["1+\n1=", "/exit"])
    assert talk(quoted, run, FP32, "--max-tokens", 3)[:2] == (0, wanted)


def test_the_most_tokens_may_change(work: Path, talk: Talk) -> None:
    texts = "1+1=\n/max-tokens 3\n/reset\n1+1=\n"
    long, short = talk(texts, "runs/run", FP32, "--max-tokens", 9)[1].splitlines()
    assert len(long) > len(short) > 0
    assert long.startswith(short)


@pytest.mark.nightly
def test_sampling_differs_at_each_start_but_not_with_a_seed(
    work: Path, tmp_path: Path, talk: Talk
) -> None:
    file = tmp_path / "chats.jsonl"
    hot = ("runs/run", "--temperature", 5, "--max-tokens", 9)
    texts = "1+1=\n/reset\n1+1=\n"
    first, second = (talk(texts, *hot)[1] for _ in range(2))
    assert first != second
    assert talk(texts, *hot, "seed=3", "--save", file)[1] == talk(texts, *hot, "seed=3")[1]
    one, other = _texts(file)
    assert one != other
    greedy = talk("/temperature 0\n1+1=\n", *hot)[1]
    assert greedy == talk("1+1=\n", "runs/run", "--max-tokens", 9)[1]


@pytest.mark.nightly
def test_two_models_answer_by_turns(work: Path, talk: Talk) -> None:
    step = Path("runs/run/checkpoints/step-00000001")
    limits = (FP32, "--max-tokens", 3)
    mine, base = (talk(TEXTS, place, *limits)[1].splitlines() for place in ("runs/run", step))
    code, out, _ = talk(TEXTS, "runs/run", "--compare", step, *limits)
    lines = out.splitlines()
    assert code == 0
    assert (lines[1::4], lines[3::4]) == (mine, base)
    assert {*lines[0::4]} == {"[run step 2]"}
    assert {*lines[2::4]} == {"[run step 1]"}


@pytest.mark.nightly
def test_conversations_are_saved_as_rows_to_train_on(
    work: Path, tmp_path: Path, talk: Talk
) -> None:
    model = Path("runs/run/checkpoints/step-00000002/model")
    said = answers(model, ["1+1=", "and 2?"], ["3+3="]).splitlines()
    rows = [["1+1=", said[0], "and 2?", said[1]], ["3+3=", said[2]]]
    limits = (FP32, "--max-tokens", 3)
    file = tmp_path / "chats.jsonl"
    assert talk(TEXTS, model, "--save", file, *limits)[0] == 0
    assert _texts(file) == rows
    assert talk(f"1+1=\n/save {file}\nand 2?\n", model, *limits)[0] == 0
    assert _texts(file) == [*rows, rows[0]]
    roles = [each["role"] for each in json.loads(file.read_text().splitlines()[0])["messages"]]
    assert roles == ["user", "assistant"] * 2
    done(work, "sft", "sft.yaml", "steps=1", "name=next", f"data.train={file}")
    assert talk("", model, "--save", work)[0] == 2


def _texts(file: Path) -> list[list[str]]:
    rows = map(json.loads, file.read_text().splitlines())
    return [[each["content"] for each in row["messages"]] for row in rows]


def test_the_system_prompt_begins_each_conversation(work: Path, tmp_path: Path, talk: Talk) -> None:
    file = tmp_path / "chats.jsonl"
    lines = "a\n/reset\nb\n/system short: yes\nc\n"
    assert (
        talk(lines, "runs/run", "--max-tokens", 2, "--system", "be: kind", "--save", file)[0] == 0
    )
    opened = [(texts[0], texts[1]) for texts in _texts(file)]
    assert opened == [("be: kind", "a"), ("be: kind", "b"), ("short: yes", "c")]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"do_sample": True, "top_k": 0},
        {"do_sample": False, "temperature": 0.6},
        {"temperature": 0.6, "top_p": 0.9},
        {"repetition_penalty": 1.1, "do_sample": True},
    ],
)
def test_a_model_is_drawn_from_as_it_recommends(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    wanted = GenerationConfig.from_pretrained(tmp_path)
    defaults = GenerationConfig._get_default_generation_params()
    drawn = recommended(str(tmp_path))
    named = ("top_k", "top_p", "temperature") if wanted.do_sample else ()
    for name in named:
        value = getattr(wanted, name)
        assert drawn[name] == (defaults[name] if value is None else value)
    assert drawn["min_p"] == (wanted.min_p or 0)
    assert (drawn["temperature"] == 0) == (not wanted.do_sample)
    assert ("repetition_penalty" in capsys.readouterr().err) == ("repetition_penalty" in fields)


def test_what_cannot_be_followed(tmp_path: Path) -> None:
    assert recommended(None) == recommended(str(tmp_path))
    for text in ("[]", "{", '{"top_p": 3}', '{"temperature": "hot", "do_sample": true}'):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(BurnishError):
            recommended(str(tmp_path))


def test_settings_without_effect_are_refused(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for setting in ("evaluation.n=2", "optim.lr=1e-5", "steps=3", "rollout.n=2", "data=x.jsonl"):
        assert main(["chat", "runs/run", setting]) == 2
        assert setting.partition("=")[0] in capsys.readouterr().err
    for option, value in (("temperature", "hot"), ("max-tokens", "0"), ("compare", "runs/run")):
        assert main(["chat", "runs/run", f"--{option}", value]) == 2
    assert main(["chat", "runs/run", "--compare", "nowhere"]) == 5


def test_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "nowhere"]) == 5
    assert main(["chat", str(tmp_path)]) == 5
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["chat", str(tmp_path)]) == 2
    capsys.readouterr()
    assert main(["chat"]) == main(["chat", "--temperature", "0"]) == 2
    assert "configuration" not in capsys.readouterr().err


ENVIRONMENT = """\
import burnish

class Twice(burnish.Environment):
    "Asks once more after each answer."

    def begin(self, row, seed):
        self.answers = 0
        return ()

    def step(self, action):
        self.answers += 1
        again = [{"role": "user", "content": "4?"}]
        return burnish.Observation(again, rewards=0.5, done=self.answers % 2 == 0)
"""


@pytest.mark.nightly
def test_an_environment_takes_part(work: Path, tmp_path: Path, talk: Talk) -> None:
    Path("twice.py").write_text(ENVIRONMENT)
    model = Path("runs/run/checkpoints/step-00000002/model")
    file = tmp_path / "chats.jsonl"
    given = ("environment=twice.py:Twice", FP32, "--max-tokens", 3)
    code, out, err = talk("1+1=\n/reset\n3+3=\n", model, "--save", file, *given)
    asked = (["1+1=", "4?"], ["3+3=", "4?"])
    assert (code, out) == (0, answers(model, *asked))
    assert err.count("user: 4?") == 4
    assert [[*texts[::2]] for texts in _texts(file)] == [*asked]
    two = talk("1+1=\n", model, "--compare", model.parents[1] / "step-00000001", *given)[1]
    assert two.splitlines()[1:3] == out.splitlines()[:2]
    assert len(two.splitlines()) == 6
    done(work, "rl", "rl.yaml", "steps=1", "name=played", "environment=twice.py:Twice", "evaluation.every=0", "reward.functions=[]",
         "data.string_prompts=user", "model.fresh.max_position_embeddings=192", "batch.tokens_per_device=384")  # fmt: skip
    assert "user: 4?" in talk("1+1=\n", "runs/played", FP32)[2]
    assert "4?" not in talk("1+1=\n", "runs/played", FP32, "environment=null")[2]
    assert talk("1+1=\n", model, "environment=nowhere.py:Twice")[0] == 2
    assert talk("1+1=\n", model, "environment=twice.py:Thrice")[0] == 2


@pytest.mark.nightly
def test_an_environment_in_a_terminal(work: Path) -> None:
    """Ctrl-C stops an answer, and the environment begins anew."""
    Path("slow.py").write_text(ENVIRONMENT.replace("self.answers += 1", "__import__('time').sleep(9)"))  # fmt: skip
    argv = [sys.executable, "-m", "burnish", "chat", "runs/run", "environment=slow.py:Twice"]
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [*argv, "--max-tokens", "4"], stdin=slave, stdout=slave, stderr=slave, process_group=0
    )
    os.close(slave)
    read_until(master, "> ")
    for _ in range(2):
        os.write(master, b"1+1=\n")
        read_until(master, "a second")
        os.kill(child.pid, signal.SIGINT)
        read_until(master, "anew", "> ")
    os.write(master, b"/exit\n")
    assert child.wait(PATIENCE_SECONDS) == 0
    os.close(master)


@pytest.mark.nightly
@pytest.mark.parametrize(("columns", "is_wide"), [(100, True), (50, False)])
def test_two_answers_in_a_terminal(work: Path, columns: int, is_wide: bool) -> None:
    step = "runs/run/checkpoints/step-00000001"
    argv = [sys.executable, "-m", "burnish", "chat", "runs/run", "--compare", step]
    master, slave = pty.openpty()
    environ = os.environ | {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm"}
    child = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=environ)
    os.close(slave)
    read_until(master, "> ")
    os.write(master, b"/max-tokens 4\n1+1=\n")
    shown = read_until(master, "a second", "> ")
    os.write(master, b"/exit\n")
    assert child.wait(PATIENCE_SECONDS) == 0
    os.close(master)
    is_one_line = any("run step 2" in line and "run step 1" in line for line in shown.splitlines())
    assert is_one_line == is_wide
    assert ("[run step 2]" in shown) == ("[run step 1]" in shown) == (not is_wide)


def read_until(master: int, *marks: str) -> str:
    """What a terminal shows until the marks have come, one after the other."""
    shown = ""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        if select.select([master], [], [], 1)[0]:
            shown += os.read(master, 4096).decode(errors="replace")
        places = [shown.find(marks[0])]
        for mark in marks[1:]:
            places.append(shown.find(mark, max(places[-1], 0)))
        if min(places) >= 0:
            return shown
    raise AssertionError(shown)
