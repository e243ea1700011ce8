from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.nightly import by_day

from burnish.cli.main import main
from burnish.config.keys import known_keys
from burnish.config.load import read_config
from burnish.methods.table import METHODS


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
    assert read_config(again) == read_config(file, ["optim.lr=2e-5"])


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
    assert text.partition("on resume")[2].split()[:3] == ["has", "to", "stay"]
    assert main(["config", "explain", "engine.tensor_parallel"]) == 0
    assert capsys.readouterr().out.partition("on resume")[2].split()[:2] == ["may", "change"]


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


@pytest.mark.parametrize("nth", by_day([4, 1], [4]))
def test_every_key_can_be_explained(capsys: pytest.CaptureFixture[str], nth: int) -> None:
    for name in sorted(known_keys())[::nth]:
        assert main(["config", "explain", name]) == 0
        assert capsys.readouterr().out.startswith(f"{name}\n")


def test_an_unknown_key_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "rollout.temprature"]) == 2
    assert " rollout.temperature?" in capsys.readouterr().err


def test_explain_a_section_lists_values_and_hides_empty_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "explain", "optim"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one of constant, linear, cosine, wsd" in text
    assert "default: constant" in text
    assert main(["config", "explain", "data"]) == 0
    assert "default: []" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "explained"),
    [
        ("lr", ["optim.lr", "critic.lr"]),
        ("temperature", ["rollout.temperature", "evaluation.temperature"]),
        ("lora.rank", ["model.lora.rank"]),
        ("weight", ["reward.functions[].weight", "reward.models[].weight"]),
    ],
)
def test_a_short_name_explains_all_settings_that_end_in_it(
    name: str, explained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "explain", name]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line in explained] == explained


def test_the_settings_of_a_method_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("method.beta", "beta"):
        assert main(["config", "explain", name]) == 0
        text = capsys.readouterr().out
        assert text.count("method.beta\n") == 1
        assert "of burnish dpo, online-dpo" in text
    for method in METHODS.values():
        for name, field in method.Settings.model_fields.items():
            assert main(["config", "explain", f"method.{name}"]) == 0
            text = " ".join(capsys.readouterr().out.split())
            assert " ".join(str(field.description).split()) in text
            assert method.name in text
    assert main(["config", "explain", "method.none"]) == 2


def test_show_takes_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("rollout: {n: 4}\n")
    assert main(["config", "show", str(tmp_path)]) == 0
    assert "n: 4" in capsys.readouterr().out
    (tmp_path / "config.yaml").unlink()
    assert main(["config", "show", str(tmp_path)]) == 5


def test_translate_reads_options_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["config", "translate", "--learning_rate", "3e-5", "--num-generations=4", "seed=3"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    for part in ("lr: 3.0e-05", "n: 4", "seed: 3"):
        assert part in text
    assert main(["config", "translate"]) == 2


def test_the_schema_is_json_and_knows_short_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    sections = json.loads(capsys.readouterr().out)["$defs"]
    train = sections["DataConfig"]["properties"]["train"]
    assert {"type": "string"} in train["anyOf"]
    assert train["description"]
    functions = sections["RewardConfig"]["properties"]["functions"]["anyOf"]
    assert {"type": "string"} in functions[1]["anyOf"]
    assert sections["OptimConfig"]["properties"]["betas"]["type"] == "array"
