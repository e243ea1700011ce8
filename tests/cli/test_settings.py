from __future__ import annotations

from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.config.keys import known_keys
from burnish.config.load import load_config


def test_show_prints_everything_with_its_origin_and_can_be_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: mine\nrollout:\n  n: 4\n")
    assert main(["config", "show", str(file), "optim.lr=2e-5"]) == 0
    text = capsys.readouterr().out
    lines = [line.split("#") for line in text.splitlines()]
    rows = {parts[0].strip(): parts[1].strip() for parts in lines if len(parts) == 2}
    assert rows["name: mine"] == f"{file}:1"
    assert rows["n: 4"] == f"{file}:3"
    assert rows["lr: 2.0e-05"] == "command line"
    assert rows["seed: 0"] == "default"
    columns = {line.index("  # ") for line in text.splitlines() if "  # " in line}
    assert len(columns) == 1
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load_config(again).config == load_config(file, ["optim.lr=2e-5"]).config


def test_show_reports_a_bad_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("nam: mine\n")
    assert main(["config", "show", str(file)]) == 2
    assert " nam (" in capsys.readouterr().err


def test_explain_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "algorithm.kl.estimator"]) == 0
    text = capsys.readouterr().out
    assert "algorithm.kl.estimator" in text
    assert "Schulman" in text
    assert "one of k1, k2, k3" in text
    assert "k3" in text.partition("default")[2]
    assert "kl:" in text


def test_explain_a_list_default_and_a_required_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "optim.betas"]) == 0
    assert "[0.9, 0.999]" in capsys.readouterr().out
    assert main(["config", "explain", "reward.functions[0].function"]) == 0
    assert "has to be given" in capsys.readouterr().out


def test_explain_a_section_lists_its_keys_and_only_those(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "explain", "algorithm"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert {"algorithm.kl", "algorithm.clip_low", "algorithm.advantage"} <= listed
    assert "algorithm.kl.coef" not in listed


def test_explain_nothing_lists_the_top(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain"]) == 0
    text = capsys.readouterr().out
    for name in known_keys():
        if "." not in name:
            assert f"\n{name} " in text


def test_every_key_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for name in known_keys():
        assert main(["config", "explain", name]) == 0
        assert capsys.readouterr().out.startswith(f"{name}\n")


def test_an_unknown_key_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "rollout.temprature"]) == 2
    assert " rollout.temperature?" in capsys.readouterr().err
