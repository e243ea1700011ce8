"""A formula is a name, or a mapping with the name and the formula's own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.cli.main import main
from burnish.config.algorithm import FORMULAS
from burnish.config.document import dump_yaml, recorded
from burnish.config.keys import known_keys
from burnish.config.load import load_settings, load_with_origins, read_config
from burnish.config.resume import digest, settings_difference
from burnish.config.schema import RunConfig
from burnish.errors import UsageError

SAPO = {"name": "sapo", "temperature_pos": 1.0, "temperature_neg": 1.05}


def loss(config: RunConfig) -> dict[str, Any]:
    return config.algorithm.policy_loss.model_dump()


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], {"name": "ppo", "dual_clip": None}),
        (["algorithm.policy_loss=gspo"], {"name": "gspo"}),
        (["algorithm.policy_loss=sapo"], SAPO),
        (["algorithm.policy_loss.name=sapo"], SAPO),
        (["algorithm.policy_loss={name: sapo}"], SAPO),
        (["algorithm={policy_loss: sapo}"], SAPO),
        (["algorithm.policy_loss.dual_clip=3"], {"name": "ppo", "dual_clip": 3.0}),
        (
            ["algorithm.policy_loss=sapo", "algorithm.policy_loss.temperature_pos=2"],
            {**SAPO, "temperature_pos": 2.0},
        ),
        (
            ["algorithm.policy_loss.temperature_pos=2", "algorithm.policy_loss=sapo"],
            {**SAPO, "temperature_pos": 2.0},
        ),
        (
            ["algorithm.policy_loss={temperature_neg: 2, name: sapo}"],
            {**SAPO, "temperature_neg": 2.0},
        ),
        (
            ["algorithm.policy_loss=my.py:loss", "algorithm.policy_loss.beta={a: [1]}"],
            {"name": "my.py:loss", "beta": {"a": [1]}},
        ),
        (["algorithm.policy_loss=my.py:loss"], {"name": "my.py:loss"}),
        (["algorithm.policy_loss=null"], {"name": "ppo", "dual_clip": None}),
    ],
)
def test_a_name_and_a_mapping(overrides: list[str], wanted: dict[str, Any]) -> None:
    assert loss(read_config(None, overrides)) == wanted


def test_a_file_and_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "algorithm:\n  advantage: {name: gae, lam: 0.9}\n"
        "  policy_loss:\n    name: sapo\n    temperature_pos: 2\n"
    )
    config, origins = load_with_origins(file, ["algorithm.policy_loss.temperature_neg=3"])
    assert loss(config) == {"name": "sapo", "temperature_pos": 2.0, "temperature_neg": 3.0}
    assert origins["algorithm.policy_loss.name"] == f"{file}:4"
    assert origins["algorithm.policy_loss.temperature_pos"] == f"{file}:5"
    assert origins["algorithm.policy_loss.temperature_neg"] == "command line"
    assert origins["algorithm.advantage.gamma"] == "default"
    assert loss(read_config(file, ["algorithm.policy_loss=sapo"])) == {**SAPO, "temperature_pos": 2}
    another = read_config(
        file, ["algorithm.policy_loss.cov_low=0", "algorithm.policy_loss=clip_cov"]
    )
    assert loss(another)["cov_low"] == 0.0
    assert "temperature_pos" not in loss(another)
    assert config.algorithm.advantage.settings == {"gamma": 1.0, "lam": 0.9}


def test_a_name_alone_in_a_file_has_the_origin_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("algorithm:\n  policy_loss: my.py:loss\n")
    _, origins = load_with_origins(file, ["algorithm.policy_loss.beta=0.5"])
    assert origins["algorithm.policy_loss.name"] == f"{file}:2"
    assert origins["algorithm.policy_loss.beta"] == "command line"


def test_python_takes_names_mappings_and_functions() -> None:
    named = load_settings({"algorithm": {"policy_loss": "sapo"}}, {})
    assert loss(named) == SAPO
    assert loss(load_settings(named, {"algorithm.policy_loss.temperature_pos": 3.0})) == {
        **SAPO,
        "temperature_pos": 3.0,
    }
    assert loss(load_settings(named, {"algorithm": {"policy_loss": "gspo"}})) == {"name": "gspo"}
    own = {"name": loss, "beta": 0.5}
    assert loss(load_settings({}, {"algorithm.policy_loss": own})) == {
        "name": f"{__name__}:loss",
        "beta": 0.5,
    }


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "algorithm.policy_loss.temperature_pos=2",
            ["ppo has no setting temperature_pos", "algorithm.policy_loss=sapo"],
        ),
        (
            "algorithm.policy_loss={name: kl_cov, cov_low: 1}",
            ["one of cov_ratio, cov_penalty", "algorithm.policy_loss=clip_cov"],
        ),
        ("algorithm.policy_loss={name: gspo, x: 1}", ["gspo", "policy_loss.x: 1"]),
        ("algorithm.policy_loss={name: sapo, temperature_po: 1}", ["mean 'temperature_pos'"]),
        ("algorithm.policy_loss={name: sapo, temperature_pos: 0}", ["more than 0", "command line"]),
        ("algorithm.policy_loss={name: sapo, temperature_pos: x}", ["a number", "command line"]),
        ("algorithm.policy_loss=sapoo", ["one of ppo, ", "file.py:name"]),
        ("algorithm.policy_loss=[sapo]", ["algorithm.policy_loss.name"]),
        ("algorithm.policy_loss=7", ["algorithm.policy_loss.name"]),
        ("algorithm.advantage.gamma=0.9", ["grpo has no setting gamma", "advantage=gae"]),
        ("algorithm.policy_loss={name: 'my.py:loss', api_key: abc}", ["holds a credential"]),
        ("algorithm.dual_clip=3", ["algorithm.policy_loss.dual_clip"]),
        ("algorithm.cov_high=3", ["algorithm.policy_loss.cov_high"]),
        ("algorithm.sapo_temperature_neg=3", ["algorithm.policy_loss.temperature_neg"]),
        ("critic.lam=0.9", ["algorithm.advantage.lam"]),
    ],
)
def test_settings_that_a_formula_does_not_have_are_refused(override: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read_config(None, [override])
    for part in parts:
        assert part in str(caught.value)


def test_every_setting_of_a_built_in_is_a_known_key_with_the_names_of_its_formulas() -> None:
    for formula, kind in FORMULAS.items():
        assert known_keys()[formula].section
        for name, section in kind.own_settings.items():
            for field, found in section.model_fields.items():
                key = known_keys()[f"{formula}.{field}"]
                assert name in key.doc.partition(":")[0].split(", ")
                assert key.default == found.default
                assert set(kind.formulas_with(field)) == {
                    each for each, own in kind.own_settings.items() if field in own.model_fields
                }


def test_what_is_written_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "algorithm.policy_loss={name: 'my.py:loss', beta: 0.5, settings: [1, x]}",
        "algorithm.advantage={name: gae, lam: 0.5}",
    ]
    config = read_config(None, overrides)
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert read_config(tmp_path / "config.yaml") == recorded(tmp_path / "config.yaml") == config
    assert main(["config", "show", *overrides]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "beta:" in line]
    assert row.split() == ["beta:", "0.5", "#", "command", "line"]
    assert main(["config", "show", str(tmp_path)]) == 0


def test_own_settings_decide_whether_a_run_may_resume() -> None:
    plain = RunConfig()
    explicit = read_config(None, ["algorithm.policy_loss={name: ppo, dual_clip: null}"])
    assert settings_difference(plain, explicit) == {}
    assert digest(plain) == digest(explicit)
    sapo = read_config(None, ["algorithm.policy_loss=sapo"])
    hot = read_config(None, ["algorithm.policy_loss={name: sapo, temperature_pos: 2}"])
    key = "algorithm.policy_loss.temperature_pos"
    assert settings_difference(sapo, hot) == {key: (1.0, 2.0)}
    assert settings_difference(plain, sapo) == {
        "algorithm.policy_loss.name": ("ppo", "sapo"),
        key: (None, 1.0),
        "algorithm.policy_loss.temperature_neg": (None, 1.05),
    }
    assert len({digest(each) for each in (plain, sapo, hot)}) == 3


FORMER = {
    "dual_clip": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "cov_ratio": 2e-4,
    "cov_low": 1.0,
    "cov_high": 5.0,
    "cov_penalty": 1.0,
}
"""Keys of `algorithm` in configurations that were recorded when formulas had none of their own."""


@pytest.mark.parametrize(
    ("names", "former", "critic", "today"),
    [
        (("grpo", "ppo"), {}, {}, []),
        (("grpo", "ppo"), {"dual_clip": 3.0}, {}, ["algorithm.policy_loss.dual_clip=3"]),
        (
            ("rloo", "sapo"),
            {"sapo_temperature_pos": 2.0},
            {},
            ["algorithm.policy_loss={name: sapo, temperature_pos: 2}", "algorithm.advantage=rloo"],
        ),
        (
            ("gae", "clip_cov"),
            {"cov_low": 0.5, "dual_clip": 2.0},
            {"gamma": 0.9},
            [
                "algorithm.policy_loss={name: clip_cov, cov_low: 0.5, dual_clip: 2}",
                "algorithm.advantage={name: gae, gamma: 0.9}",
            ],
        ),
        (("grpo", "my.py:loss"), {}, {}, ["algorithm.policy_loss=my.py:loss"]),
    ],
)
def test_a_configuration_that_an_earlier_version_recorded_is_read(
    tmp_path: Path,
    names: tuple[str, str],
    former: dict[str, Any],
    critic: dict[str, Any],
    today: list[str],
) -> None:
    settings = RunConfig().model_dump(mode="json")
    advantage, policy_loss = names
    formula = {"advantage": advantage, "policy_loss": policy_loss}
    settings["algorithm"] |= {**formula, **FORMER, **former}
    settings["critic"] |= {"gamma": 1.0, "lam": 1.0, **critic}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert recorded(path) == read_config(None, today)
    with pytest.raises(UsageError):
        read_config(path)
