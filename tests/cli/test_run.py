from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny import save_tiny
from support.models.tokenizers import char_tokenizer, save_char_tokenizer

from burnish.cli.main import main
from burnish.config.document import dump_yaml
from burnish.config.load import read_config
from burnish.config.schema import RunConfig
from burnish.errors import UsageError, install
from burnish.files.remote import Remote
from burnish.methods.table import METHODS
from burnish.runs.run_directory import committed_steps


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny(directory, vocab_size=len(char_tokenizer()), max_position_embeddings=1024)
    save_char_tokenizer(directory)
    return directory


@pytest.fixture
def work(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, data and a configuration, which is the current one."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(tiny, tmp_path / "tiny")
    row = '{"prompt": "1+1", "answer": "2", "completion": "2"}\n'
    (tmp_path / "train.jsonl").write_text(row)
    (tmp_path / "c.yaml").write_text(
        "name: try\nmodel: {path: tiny}\ndata: {train: [train.jsonl], validation: ['*.jsonl']}\n"
        "reward: {functions: [{function: numeric}]}\nbatch: {prompts: 4, minibatches: 2}\n"
        "optim: {lr: 1.0e-6}\n"
    )
    return tmp_path


def test_a_dry_run_says_what_would_be_done(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["rl", "c.yaml", "rollout.n=3", "rollout.stop=[a b]", "steps=7", "--dry-run"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    for fact in (
        "tiny",
        "train.jsonl (1 file, 52 B, 1 row)",
        "4 prompts × 3 completions = 12 sequences, 2 optimizer steps",
        "1 × numeric",
        "7 steps",
        "runs/try",
        "burnish rl c.yaml rollout.n=3 'rollout.stop=[a b]' steps=7",
    ):
        assert fact in text
    assert sorted(each.name for each in work.iterdir()) == ["c.yaml", "tiny", "train.jsonl"]


@pytest.mark.parametrize(
    ("devices", "started"),
    [
        ("1xCPU-8G", "\n  burnish rl c.yaml 'rollout.stop=[a b]'\n"),
        ("6xCPU-8G", "\n  torchrun --nproc-per-node 6 -m burnish rl c.yaml 'rollout.stop=[a b]'\n"),
        ("16xH100", "\n  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m burnish rl "),
    ],
)  # fmt: skip
def test_a_dry_run_says_how_as_many_processes_are_started(
    work: Path, capsys: pytest.CaptureFixture[str], devices: str, started: str
) -> None:
    argv = ["rl", "c.yaml", "rollout.stop=[a b]", "--dry-run", "--devices", devices]
    assert main(argv) == 0
    assert started in capsys.readouterr().out


def test_a_dry_run_sees_a_completion_that_is_as_long_as_the_model(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((work / "tiny/config.json").read_text())
    (work / "tiny/config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    argv = ["rl", "c.yaml", "--dry-run", "batch.tokens_per_device=64"]
    assert main([*argv, "rollout.max_response_length=28"]) == 0
    assert main([*argv, "rollout.max_response_length=32"]) == 2
    assert "max_position_embeddings: 32" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "yarn"])
@pytest.mark.nightly
def test_a_sequence_beyond_the_original_length_of_its_positions_is_refused_before_weights(
    work: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """RL and evaluation refuse the completion, SFT the examples; yarn has no such limit."""
    path = work / "tiny/config.json"
    config = json.loads(path.read_text())
    half = config["head_dim"] // 2
    rope = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 16,
    }
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
    if kind == "dynamic":
        config["max_position_embeddings"] = rope.pop("original_max_position_embeddings")
    path.write_text(json.dumps(config | {"rope_parameters": rope}))
    rows = [{"prompt": "a" * length, "completion": "b"} for length in (3, 30)]
    (work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = 0 if kind == "yarn" else 2
    given = ["c.yaml", "batch.tokens_per_device=64"]
    assert main(["rl", *given, "--dry-run", "rollout.max_response_length=16"]) == code
    assert (kind in capsys.readouterr().err) == (kind == "longrope")
    given += ["data.train=pairs.jsonl", "data.validation=[]", "evaluation.every=0"]
    assert main(["sft", *given, "--dry-run", "data.overlong=error"]) == code
    assert (kind in capsys.readouterr().err) == (code == 2)


def test_what_is_evaluated_may_be_a_run_or_a_file(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "runs/nobody"]) == 5
    assert "runs/nobody" in capsys.readouterr().err


def test_what_a_user_may_want_to_know_is_said_before_anything_begins(
    work: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["rl", "c.yaml", "algorithm.policy_loss=gspo", "algorithm.clip_low=3e-4"]
    assert main([*argv, "--dry-run"]) == 0
    said = "algorithm.policy_loss gspo is its paper's objective with algorithm.aggregation sequence_mean"
    assert capsys.readouterr().out.count(f"\nnote: {said}") == 1
    monkeypatch.setattr("burnish.methods.parts.online_training.train", lambda *given: None)
    assert main(argv) == 0
    assert [record.getMessage() for record in caplog.records if said in record.getMessage()]


def test_a_dry_run_of_every_command(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "c.yaml", "--dry-run"]) == 0
    assert "16 examples" in capsys.readouterr().out
    assert main(["eval", "c.yaml", "evaluation.n=4", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "4 per prompt, temperature 1" in text
    assert "learning rate" not in text
    assert main(["eval", "c.yaml", "reward.functions=[]", "--dry-run"]) == 0
    assert "loss per token" in capsys.readouterr().out


def test_an_adapter_needs_its_package(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["sft", "c.yaml", "model.lora.rank=8", "--dry-run"]
    assert main(argv) == 0
    assert "tiny, an adapter of rank 8 on all linear layers" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "peft", None)
    assert main(argv) == 5
    assert install("lora") in capsys.readouterr().err


def test_a_reward_that_needs_its_package(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    override = "reward.functions=[{function: math_verify}]"
    assert main(["rl", "c.yaml", override, "--dry-run"]) == 5
    assert install("math") in capsys.readouterr().err


def test_checking_settings_loads_no_torch(work: Path) -> None:
    program = (
        "import sys; from burnish.cli.main import main\n"
        "assert main(['config', 'check', 'c.yaml', 'engine.tensor_parallel=2']) == 0\n"
        "assert main(['config', 'check', 'c.yaml', 'batch.minibatches=3']) == 2\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("model.path=tyni", ["model.path: ", " tyni\n", "tiny, train.jsonl"]),
        ("model.path=.", ["model.path: ", "config.json"]),
        ("model.tokenizer=.", ["model.tokenizer: ", "tokenizer.json", "tokenizer_config.json"]),
        ("model.chat_template=t.jinja", ["model.chat_template: ", "t.jinja"]),
        ("data.train=[tran.jsonl]", ["data.train: ", "tran.jsonl", "train.jsonl"]),
        ("data.train=[tiny/*.jsonl]", ["data.train: ", "tiny/*.jsonl"]),
        ("data.validation=[no/v.jsonl]", ["data.validation: ", "no/v.jsonl"]),
        ("reward.functions=[{function: 'r.py:f'}]", ["reward.functions[0].function: ", "r.py"]),
        ("reward.functions=[{function: 'nowhere.at_all:f'}]", ["reward.functions[0].function: ", "nowhere.at_all"]),
    ],
)  # fmt: skip
def test_missing_inputs_exit_with_5(
    work: Path, override: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", "c.yaml", override, "--dry-run"]) == 5
    written = capsys.readouterr().err
    for fact in [*facts, "have:", "want:", "do:"]:
        assert fact in written


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("model.path=memory://cli/no", ["model.path: memory://cli/no ", "config.json"]),
        ("model.path=memory://cli", ["config.json", "data, fresh.json"]),
        (
            "model.chat_template=memory://cli/t",
            ["model.chat_template: ", "memory://cli/t\n", "fresh.json"],
        ),
        ("data.train=[memory://cli/*.jsonl]", ["data.train: ", "memory://cli/*.jsonl"]),
        ("data.train=[memory://cli/none]", ["data.train: ", "memory://cli/none"]),
        (
            "reward.functions=[{function: 'memory://cli/r.py:f'}]",
            ["reward.functions[0].function: ", "memory://cli/r.py"],
        ),
    ],
)
def test_inputs_missing_behind_urls_exit_with_5(
    work: Path, override: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Remote("memory://cli").put("fresh.json", b"{}")
    Remote("memory://cli").put("data/a.jsonl", b"{}\n")
    assert main(["rl", "c.yaml", override, "--dry-run"]) == 5
    written = capsys.readouterr().err
    for fact in [*facts, "have:", "want:", "do:"]:
        assert fact in written


def test_of_inputs_behind_urls_only_small_files_are_copied(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(work / "cache"))
    remote = Remote("memory://there")
    for path in (work / "tiny").iterdir():
        remote.put_file(f"model/{path.name}", path)
    for name in ("data/a.jsonl", "data/b.jsonl", "data/c.txt"):
        remote.put(name, b"12345")
    remote.put("r.py", b"def f(completions, **columns):\n    return [0.0]\n")
    argv = [
        "model.path=memory://there/model/", "data.train=[memory://there/data]",
        "reward.functions=[{function: 'memory://there/r.py:f'}]",
    ]  # fmt: skip
    assert main(["rl", "c.yaml", *argv, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "memory://there/data (2 files, 10 B)" in text
    assert "memory://there/model" in text
    copied = {path.name for path in (work / "cache").rglob("*") if path.is_file()}
    assert {"config.json", "tokenizer.json", "r.py"} <= copied
    assert not [name for name in copied if name.endswith((".safetensors", ".jsonl"))]


def test_credentials_in_a_url_are_refused_and_not_shown(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", "c.yaml", "data.train=['s3://key:hunter2@b/d']", "--dry-run"]) == 2
    written = capsys.readouterr().err
    assert "credentials" in written
    assert "hunter2" not in written


def test_missing_inputs_are_listed_together(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "c.yaml", "model.path=x", "data.train=[y]"]) == 5
    said = capsys.readouterr().err
    assert said.count("want:") == 2
    assert "model.path: " in said
    assert "data.train: " in said


def test_a_reward_module_in_the_working_directory(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "own_rewards_7.py").write_text("def f(completions): return [0.0] * len(completions)\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    override = "reward.functions=[{function: 'own_rewards_7:f'}]"
    assert main(["rl", "c.yaml", override, "--dry-run"]) == 0


def test_inputs_that_are_there(work: Path) -> None:
    shutil.copy(work / "tiny/config.json", work / "fresh.json")
    (work / "r.py").write_text("def f(completions): return [0.0] * len(completions)\n")
    (work / "data").mkdir()
    shutil.copy(work / "train.jsonl", work / "data/a.jsonl")
    argv = [
        "model.path=null", "model.fresh=fresh.json", "model.tokenizer=tiny", "data.train=[data]",
        "reward.functions=[{function: 'r.py:f'}]",
    ]  # fmt: skip
    assert main(["rl", "c.yaml", *argv, "--dry-run"]) == 0


def test_settings_that_do_not_go_together_exit_with_2(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", "c.yaml", "batch.minibatches=3", "--dry-run"]) == 2
    assert "batch.minibatches 3" in capsys.readouterr().err


def test_the_number_of_processes_comes_from_the_launcher(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "64", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert main(["sft", "c.yaml", "--dry-run"]) == 2
    assert "batch.examples: 16, 64 processes" in capsys.readouterr().err
    assert main(["sft", "c.yaml", "batch.examples=64", "--dry-run"]) == 0
    assert "64 processes" in capsys.readouterr().out


def begin_run(work: Path, *overrides: str) -> Path:
    """What a run of `c.yaml` leaves behind, as far as the command line looks at it."""
    directory = work / "runs/try"
    (directory / "checkpoints/step-00000100").mkdir(parents=True)
    config = read_config(work / "c.yaml", overrides)
    (directory / "config.yaml").write_text(dump_yaml(config))
    return directory


def test_the_directory_of_another_run_is_refused(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_run(work, "optim.lr=0.5", "steps=3")
    assert main(["rl", "c.yaml", "--dry-run"]) == 4
    written = capsys.readouterr().err
    assert "runs/try" in written
    assert ["optim.lr", "0.5", "1e-06"] in [line.split() for line in written.splitlines()]
    assert main(["rl", "c.yaml", "--dry-run", "name=second"]) == 0


def test_a_begun_run_is_continued_or_refused(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_run(work, "steps=3")
    assert main(["rl", "c.yaml", "--dry-run"]) == 0
    assert "runs/try, which continues from step-00000100" in capsys.readouterr().out
    assert main(["rl", "c.yaml", "--dry-run", "resume=never"]) == 2
    assert "step-00000100" in capsys.readouterr().err


def test_evaluating_a_runs_directory(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = begin_run(work)
    monkeypatch.setattr("burnish.runs.dry_run.newest_model", lambda run, model: (model, None))
    assert main(["eval", str(directory), "evaluation.n=2", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"newest checkpoint of {directory}" in text
    assert "2 per prompt" in text
    assert main(["eval", str(directory), "--dry-run", "--json"]) == 2
    assert "--json" in capsys.readouterr().err
    (work / "data").mkdir()
    assert main(["eval", "data", "--dry-run"]) == 5
    assert "data" in capsys.readouterr().err


def test_data_behind_a_link_to_nothing(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "gone.jsonl").symlink_to("nowhere")
    for path in ("gone.jsonl", "gone*.jsonl"):
        assert main(["sft", "c.yaml", f"data.train={path}", "data.validation=[]", "--dry-run"]) == 5
        assert "data.train" in capsys.readouterr().err


def test_evaluating_a_model(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "tiny", "--dry-run"]) == 2
    assert "data.validation" in capsys.readouterr().err
    assert main(["eval", "tiny", "data.validation=train.jsonl", "--dry-run"]) == 0
    assert "burnish eval tiny data.validation=train.jsonl" in capsys.readouterr().out
    assert main(["eval", "nobody/tiny", "data.validation=train.jsonl", "--dry-run"]) == 5
    assert "model.path: " in capsys.readouterr().err


def test_each_command_starts_its_trainer(
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    started: list[tuple[Any, ...]] = []

    def stand_in(function: str, result: object) -> None:
        def start(*given: object) -> object:
            started.append((function, *given))
            return result

        monkeypatch.setattr(f"burnish.{function}", start)

    stand_in("methods.parts.offline_training.train", None)
    stand_in("methods.parts.online_training.train", None)
    stand_in("methods.parts.validation.evaluate", {"val/reward/mean": 0.5, "val/n": 12.0})
    directory = begin_run(work)
    for command in ("sft", "rl"):
        assert main([command, "c.yaml", "steps=5"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["eval", "c.yaml", "steps=5"]) == 0
    assert capsys.readouterr().out == "val/n            12\nval/reward/mean  0.5\n"
    assert main(["eval", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"val/reward/mean": 0.5, "val/n": 12.0}
    config = read_config("c.yaml", ["steps=5"])
    config = METHODS["sft"].with_tokens(config)
    assert [given[:3] for given in started[:2]] == [
        ("methods.parts.offline_training.train", METHODS["sft"], config),
        ("methods.parts.online_training.train", METHODS["rl"], config),
    ]
    (_, evaluated, *_, run_dir, _, _) = started[2]
    assert (evaluated, run_dir) == (config, None)
    (_, evaluated, *_, run_dir, _, _) = started[3]
    assert isinstance(evaluated, RunConfig)
    assert run_dir == directory
    caplog.clear()
    assert main(["rl", "c.yaml", "name=null"]) == 0
    assert "rl, run tiny-rl" in caplog.text


@pytest.mark.parametrize("directory", ["file", "file/run", "loop/run", "/dev/null/x"])
def test_a_file_where_a_runs_directory_should_be_is_named(tmp_path: Path, directory: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="output_dir"):
        committed_steps(tmp_path / directory)
