import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.errors import CorruptError
from burnish.tracking.rundir import RunDirectory, discard_leftovers, environment, write_atomically


def test_paths(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "demo")
    assert not run.root.exists()
    names = ["config", "environment", "metrics", "tensorboard", "rollouts", "checkpoints", "report"]
    assert [getattr(run, name).relative_to(run.root).as_posix() for name in names] == [
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "tensorboard",
        "rollouts",
        "checkpoints",
        "report.html",
    ]
    assert not run.root.exists()


def test_configuration_and_environment_are_read_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.read_environment() == {}
    write_atomically(run.config, "name: démo\n")
    run.write_environment({"torch": "2.13.0", "host": "ü"})
    assert run.config.read_text("utf-8") == "name: démo\n"
    assert run.read_environment() == {"torch": "2.13.0", "host": "ü"}


@pytest.mark.parametrize("content", ["{half", "[1, 2]", "\xff"])
def test_an_environment_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    run = RunDirectory(tmp_path)
    run.environment.write_text(content, encoding="latin-1")
    with pytest.raises(CorruptError, match=r"environment\.json"):
        run.read_environment()


def test_the_environment_says_what_ran_where() -> None:
    found = environment("NVIDIA H100", world=8)
    assert json.loads(json.dumps(found)) == found
    assert found["device"] == "NVIDIA H100"
    assert found["processes"] == 8
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"].startswith("2.")
    assert found["burnish"]
    assert found["command"] == sys.orig_argv


def test_the_commit_is_that_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert environment("cpu")["git_commit"] is None

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    Path("file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert environment("cpu")["git_commit"] == commit
    Path("file").write_text("2")
    assert environment("cpu")["git_commit"] == f"{commit}-dirty"


def test_a_machine_without_git_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment("cpu")["git_commit"] is None


def test_no_environment_variable_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_secret")
    assert os.environ["HF_TOKEN"] not in json.dumps(environment("cpu"))


def test_a_file_is_replaced_and_nothing_else_left(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_atomically(path, "one")
    write_atomically(path, "twö")
    assert path.read_bytes() == "twö".encode()
    write_atomically(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    assert [found.name for found in path.parent.iterdir()] == ["file.txt"]


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    write_atomically(path, "one")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "two")
    assert path.read_text() == "one"
    assert [found.name for found in tmp_path.iterdir()] == ["file.txt"]


def test_what_killed_writers_left_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "file.txt", "one")
    (tmp_path / ".hidden").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", _die)
        patch.setattr("os.rename", _die)
        patch.setattr("os.unlink", _die)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(tmp_path / "file.txt", "two")
    assert len(list(tmp_path.iterdir())) == 3
    discard_leftovers(tmp_path)
    discard_leftovers(tmp_path / "nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "file.txt"]


def _die(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
