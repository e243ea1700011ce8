from __future__ import annotations

import logging
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch.distributed as dist
from support.ranks.processes import torchrun_environ

import burnish
from burnish.cli import run as command
from burnish.cli.main import main
from burnish.errors import CorruptError, StoppedError

HEAVY = (
    "torch", "transformers", "tokenizers", "datasets", "numpy", "pandas", "pyarrow", "jinja2", "tensorboard",
    "peft", "fsspec", "aiohttp", "s3fs", "gcsfs", "hdfs_native",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _log_level_is_restored() -> object:
    logger = logging.getLogger("burnish")
    level = logger.level
    yield
    logger.setLevel(level)


def test_help_begins_with_what_it_is_and_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Burnish post-trains language models")
    assert lines[2].split()[:3] == ["burnish", "init", "sft|rl"]
    assert all(len(line) <= 105 for line in lines)


def test_help_needs_nothing_that_takes_long_to_import() -> None:
    """pydantic is the largest that it does need."""
    program = (
        "import sys\n"
        "from burnish.cli.main import main\n"
        "code = main(['--help'])\n"
        f"sys.exit(code or str([name for name in {HEAVY!r} if name in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
    assert done.stdout.startswith("Burnish post-trains language models")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"burnish {burnish.__version__}\n"


def test_without_arguments_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "burnish rl" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["sft", "rl", "eval", "check", "config"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: burnish {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["foo"], ["burnish foo", "sft"]),
        (["SFT", "sft.yaml"], ["mean 'sft'"]),
        (["rl"], ["CONFIG"]),
        (["config"], ["show|explain"]),
        (["ckpt", "export", "runs/x"], ["DIRECTORY", "do: ", "ckpt export --help"]),
        (["completion", "tcsh"], ["tcsh", "zsh", "do: "]),
        (["rl", "c.yaml", "--rollout.n=4"], ["--rollout.n=4", " rollout.n=4"]),
        (["rl", "c.yaml", "--resume"], ["--resume", "resume=VALUE"]),
        (["rl", "c.yaml", "--fast"], ["--fast", "burnish config explain"]),
        (["rl", "c.yaml", "--num-generations", "8"], ["--num-generations", "rollout.n"]),
        (["rl", "rollout.n=4"], ["model.path", "data.train", "reward"]),
        (["rl", "--lr", "1", "--model_name_or_path=x"], ["optim.lr", "model.path"]),
        (["config", "explain", "seed", "steps"], ["steps"]),
    ],
)
def test_usage_errors_exit_with_2(
    argv: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    written = capsys.readouterr()
    assert written.out == ""
    for fact in facts:
        assert fact in written.err


def test_a_file_in_place_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sft.yaml").touch()
    assert main([str(tmp_path / "sft.yaml")]) == 2
    assert f"burnish sft {tmp_path / 'sft.yaml'}" in capsys.readouterr().err


def test_a_missing_configuration_exits_with_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", str(tmp_path / "x.yaml")]) == 5
    assert str(tmp_path / "x.yaml") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "printed"),
    [
        (CorruptError("a block differs", have="x"), 3, "error: a block differs\n  have: x\n"),
        (StoppedError("stopped", signal_number=signal.SIGTERM), 143, "error: stopped\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_end_in_their_exit_code_without_a_traceback(
    raised: BaseException,
    code: int,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(command, "run_given", fail)
    assert main(["rl", "c.yaml"]) == code
    assert capsys.readouterr().err == printed


def test_one_rank_says_an_error_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under torchrun, whose agent serves the store."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    for rank in (1, 0):
        for name, value in torchrun_environ(rank, 2, store.port).items():
            monkeypatch.setenv(name, value)
        assert main(["rl", str(tmp_path / "x.yaml")]) == 5
        assert main(["rl", str(tmp_path / f"{rank}.yaml")]) == 5
    said = capsys.readouterr().err
    assert [said.count(f"file {tmp_path / name}.yaml") for name in "x01"] == [1, 1, 1]


def test_an_unexpected_error_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(command, "run_given", fail)
    assert main(["rl", "c.yaml"]) == 1
    written = capsys.readouterr().err
    assert "Traceback" in written
    assert "ZeroDivisionError: by nothing" in written


def test_a_place_that_the_system_refuses_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        Path("/dev/null/x").mkdir()

    monkeypatch.setattr(command, "run_given", fail)
    assert main(["rl", "c.yaml"]) == 1
    written = capsys.readouterr().err
    assert written.startswith("error: /dev/null/x ")
    assert "Traceback" not in written


def test_overrides_may_stand_on_both_sides_of_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def remember(given: Namespace) -> None:
        seen.append((given.command, given.config, given.overrides, given.dry_run))

    monkeypatch.setattr(command, "run_given", remember)
    assert main(["sft", "c.yaml", "a=1", "--dry-run", "b=-2"]) == 0
    assert main(["sft", "--dry-run", "c.yaml"]) == 0
    assert main(["sft", "a=1", "--dry-run", "b=2"]) == 0
    assert seen == [
        ("sft", "c.yaml", ["a=1", "b=-2"], True),
        ("sft", "c.yaml", [], True),
        ("sft", None, ["a=1", "b=2"], True),
    ]


def be_rank(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four processes that torchrun started."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    for name, value in (places | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}).items():
        monkeypatch.setenv(name, value)


def test_a_rank_says_which_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    be_rank("3", monkeypatch)
    assert main(["rl", str(tmp_path / "x.yaml")]) == 5
    assert capsys.readouterr().err.startswith("rank 3: error: ")


@pytest.mark.parametrize(("rank", "said"), [("0", "rank 0: error: SIGTERM: saved\n"), ("3", "")])
def test_what_all_ranks_raise_is_said_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, said: str
) -> None:
    be_rank(rank, monkeypatch)

    def stop(*arguments: object, **options: object) -> None:
        raise StoppedError("SIGTERM: saved", signal_number=15)

    monkeypatch.setattr(command, "run_given", stop)
    assert main(["sft", "c.yaml"]) == 143
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("rank", "level"), [("0", logging.INFO), ("3", logging.ERROR)])
def test_what_all_ranks_find_is_logged_by_one(
    monkeypatch: pytest.MonkeyPatch, rank: str, level: int
) -> None:
    monkeypatch.delenv("BURNISH_LOG_LEVEL", raising=False)
    be_rank(rank, monkeypatch)
    assert main(["config", "explain", "seed"]) == 0
    assert logging.getLogger("burnish").level == level


def test_the_log_level_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BURNISH_LOG_LEVEL", "Debug")
    assert main(["config", "explain", "seed"]) == 0
    assert logging.getLogger("burnish").level == logging.DEBUG
    monkeypatch.setenv("BURNISH_LOG_LEVEL", "loud")
    assert main(["config", "explain", "seed"]) == 2
    written = capsys.readouterr().err
    assert "'loud'" in written
    assert "debug, info" in written


def test_a_closed_pipe_ends_quietly() -> None:
    program = (
        "import os, sys\n"
        "from burnish.cli.main import main\n"
        "read, write = os.pipe()\n"
        "os.close(read)\n"
        "os.dup2(write, 1)\n"
        "sys.exit(main(['config', 'explain']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
