from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from support.fuzz.configurations import sections
from support.nightly import draws

from burnish.config.document import dump_yaml
from burnish.config.load import load_settings, load_with_origins, read_config
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, MissingError, UsageError


def loaded(tmp_path: Path, text: str, *overrides: str) -> tuple[RunConfig, Mapping[str, str]]:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_with_origins(path, overrides)


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    return loaded(tmp_path, text, *overrides)[0]


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_nothing_given_is_all_defaults() -> None:
    config, origins = load_with_origins(None, [])
    assert config == RunConfig()
    assert set(origins.values()) == {"default"}


def test_file_and_overrides_and_where_each_value_came_from(tmp_path: Path) -> None:
    text = "seed: 3\n\nrollout:\n  n: 4\n  top_k: 5\noptim: {lr: 1e-5}\nreward:\n  functions:\n  - function: numeric\n"
    config, origins = loaded(tmp_path, text, "rollout.n=16", "algorithm.kl.coef=1e-3")
    file = tmp_path / "c.yaml"
    assert (config.seed, config.rollout.n, config.rollout.top_k) == (3, 16, 5)
    assert (config.optim.lr, config.algorithm.kl.coef) == (1e-5, 1e-3)
    assert config.reward.functions[0].function == "numeric"
    set_by = {key: origin for key, origin in origins.items() if origin != "default"}
    assert set_by == {
        "seed": f"{file}:1",
        "rollout.n": "command line",
        "rollout.top_k": f"{file}:5",
        "optim.lr": f"{file}:6",
        "reward.functions": f"{file}:8",
        "algorithm.kl.coef": "command line",
    }
    assert "rollout.temperature" in origins
    assert "rollout" not in origins


def test_the_last_override_wins(tmp_path: Path) -> None:
    assert load(tmp_path, "", "seed=1", "seed=2").seed == 2


def test_an_override_of_a_section_changes_the_keys_it_names(tmp_path: Path) -> None:
    config, origins = loaded(
        tmp_path, "rollout: {n: 4, top_k: 3}", "rollout={n: 2}", "algorithm={kl: {coef: 1}}"
    )
    assert (config.rollout.n, config.rollout.top_k) == (2, 3)
    assert config.algorithm.kl.coef == 1
    assert origins["rollout.n"] == origins["algorithm.kl.coef"] == "command line"
    assert origins["algorithm.kl.estimator"] == "default"


def test_a_section_without_keys_is_all_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "rollout:\n  # n: 3\noptim:\n") == RunConfig()


def test_keys_inside_a_mapping_of_the_users_own(tmp_path: Path) -> None:
    text = "model:\n  fresh: {hidden_size: 8, rope: {theta: 1}}\n"
    config, origins = loaded(
        tmp_path, text, "model.fresh.hidden_size=16", "model.fresh.rope.factor=2"
    )
    assert config.model.fresh == {"hidden_size": 16, "rope": {"theta": 1, "factor": 2}}
    assert origins["model.fresh"] == f"{tmp_path / 'c.yaml'}:2, command line"
    assert load(tmp_path, "", "model.fresh.a=1").model.fresh == {"a": 1}


def test_a_shared_alias_is_not_changed_by_an_override_of_one_use(tmp_path: Path) -> None:
    text = "rollout: &s {temperature: 0.5}\nevaluation: *s\n"
    config = load(tmp_path, text, "rollout.temperature=1")
    assert (config.rollout.temperature, config.evaluation.temperature) == (1, 0.5)


@pytest.mark.parametrize("written", ["", "null", "~"])
def test_null_on_the_command_line(tmp_path: Path, written: str) -> None:
    assert load(tmp_path, "steps: 3", f"steps={written}").steps is None


@pytest.mark.parametrize(
    ("text", "overrides", "facts"),
    [
        ("rolout:\n  n: 3\n", [], [" rolout (c.yaml:1)", " rollout?"]),
        ("rollout:\n  nn: 3\n", [], [" rollout.nn (c.yaml:2)", " rollout.n?"]),
        ("seed: 1\nn: 3\n", [], [" n (c.yaml:2)", " rollout.n "]),
        ("5: 3\n", [], [" 5 (c.yaml:1)"]),
        ("", ["learning_rate=1e-5"], [" learning_rate (", " optim.lr"]),
        ("packing: true\n", [], [" packing (c.yaml:1)"]),
        ("", ["rolout.n=3"], [" rolout.n (", " rollout.n?"]),
        ("", ["rollout={m: 3}"], [" rollout.m ("]),
        ("", ["batch.qqq=3"], [" prompts, examples, minibatches, epochs, tokens_per_device"]),
        ("", ["reward.functions[0].weight=3"], ["reward.functions[0].weight"]),
        (
            "reward:\n  functions:\n  - function: f\n    wieght: 2\n",
            [],
            ["reward.functions[0].wieght (c.yaml:4)", "reward.functions[].weight"],
        ),
        ("rollout:\n  n: eight\n", [], ["rollout.n", "(c.yaml:2)", 'have: "eight"', "1 or", "config explain rollout.n"]),
        ("rollout:\n  n: 0\n", [], ["rollout.n", "have: 0", "1 or"]),
        ("rollout: {n: true}\n", [], ["rollout.n", "have: true"]),
        ("optim: {lr: .nan}\n", [], ["optim.lr", "have: NaN", "0 or"]),
        ("optim: {betas: [0.9, 1.5]}\n", [], ["optim.betas", "[0.9, 1.5]", "2 numbers"]),
        ("optim: {betas: [0.9]}\n", [], ["optim.betas", "[0.9]", "2 numbers"]),
        ("steps:\n  a: 1\n", [], ["steps", '{"a": 1}', "null"]),
        ("model: {fresh: 3}\n", [], ["model.fresh", "have: 3", "null"]),
        ("name: [12]\n", [], ["name", "have: [12]"]),
        ("data: {train: {a: b}}\n", [], ["data.train ", '[{"a": "b"}]']),
        ("rollout: {stop_token_ids: x}\n", [], ["rollout.stop_token_ids ", '["x"]']),
        ("", ["x" * 5000 + "=1"], ["config explain"]),
        ("rollout: 3\n", [], ["rollout ", "have: 3"]),
        ("rollout: 3\n", ["rollout.n=4"], ["rollout ", "(c.yaml:1)", "have: 3"]),
        ("", ["rollout=3"], ["rollout", "have: 3", "rollout.KEY=value"]),
        ("reward: {functions: [3]}\n", [], ["reward.functions[0] ", "have: 3"]),
        ("reward: {functions: {weight: 2}}\n", [], ["reward.functions[0].function ", "(c.yaml:1)"]),
        ("reward:\n  functions:\n  - weight: 1\n", [], ["reward.functions[0].function ", "(c.yaml:3)"]),
        ("", ["reward.functions=[{weight: 1}]"], ["reward.functions[0].function "]),
        ("", ["rollout.n"], ["'rollout.n'", "key=value"]),
        ("", ["=3"], ["'=3'", "key=value"]),
        ("", ["rollout.stop=[a"], ["rollout.stop", "[a"]),
        ("model: {fresh: a.json}\n", ["model.fresh.x=1"], ["model.fresh", '"a.json"']),
    ],
)  # fmt: skip
def test_bad_input_is_named(
    tmp_path: Path, text: str, overrides: list[str], facts: list[str]
) -> None:
    message = refused(tmp_path, text, *overrides)
    for fact in facts:
        assert fact in message
    for part in ("have:", "want:", "do:"):
        assert message.count(part) == 1, message


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (
            "name: 007\nmodel: {path: 12}\ndata: {train: a.jsonl}\nrollout: {stop: 1_0, stop_token_ids: 5}\n"
            "reward:\n  functions: f.py:g\n  models: [M, {path: 3, name: 1e3}]\n",
            [],
        ),
        (
            "",
            ["name=007", "model.path=12", "data={train: a.jsonl}", "rollout.stop=1_0", "rollout.stop_token_ids=5",
             "reward.functions=f.py:g", "reward.models=[M, {path: 3, name: 1e3}]"],
        ),
    ],
    ids=["file", "command"],
)  # fmt: skip
def test_short_forms(tmp_path: Path, text: str, overrides: list[str]) -> None:
    config = load(tmp_path, text, *overrides)
    assert (config.name, config.model.path, config.data.train) == ("007", "12", ["a.jsonl"])
    assert (config.rollout.stop, config.rollout.stop_token_ids) == (["1_0"], [5])
    assert [each.function for each in config.reward.functions] == ["f.py:g"]
    assert [(each.path, each.name) for each in config.reward.models] == [("M", None), ("3", "1e3")]
    again = tmp_path / "again.yaml"
    again.write_text(dump_yaml(config))
    assert read_config(again) == config


def test_short_forms_from_python() -> None:
    settings = {"data": {"train": "a.jsonl"}, "reward.functions": {"function": "numeric"}}
    config = load_settings({}, settings)
    assert config.data.train == ["a.jsonl"]
    assert config.reward.functions[0].function == "numeric"


def test_many_mistakes_are_not_all_told(tmp_path: Path) -> None:
    message = refused(tmp_path, "".join(f"k{number}: 1\n" for number in range(2000)))
    assert message.startswith("20 problems")


def test_everything_wrong_is_reported_at_once(tmp_path: Path) -> None:
    text = "nam: a\nseed: x\nrollout:\n  n: 0\n  top_p: 7\n"
    message = refused(tmp_path, text, "optim.lerning_rate=3", "steps=[1]")
    assert message.count("do:") == 6
    for name in ("nam ", "seed ", "rollout.n ", "rollout.top_p ", "optim.lerning_rate ", "steps "):
        assert name in message


def test_long_values_are_shortened(tmp_path: Path) -> None:
    assert len(refused(tmp_path, f"seed: {'x' * 500}").splitlines()[1]) < 100


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"x\.yaml") as caught:
        read_config(tmp_path / "x.yaml", [])
    assert caught.value.exit_code == 5


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.yaml"):
        read_config(tmp_path, [])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "c.yaml").write_text("seed: 1")
    names = ["pipe", "loop", "c.yaml/x", "n" * 300, "large"]
    (tmp_path / "large").write_text("# \n" * 100_000)
    for place in (*(tmp_path / name for name in names), Path("/dev/zero")):
        with pytest.raises(UsageError):
            read_config(place, [])


@pytest.mark.parametrize(
    ("path", "do"),
    [
        ("Qwen/Qwen3-0.6B", "model.path=Qwen/Qwen3-0.6B"),
        ("chats.jsonl", "data.train=chats.jsonl"),
        ("dir/a.yaml", "key=value"),
    ],
)
def test_a_model_or_data_in_place_of_a_file(path: str, do: str) -> None:
    with pytest.raises(MissingError) as caught:
        read_config(path)
    assert do in str(caught.value.do)


def test_what_lies_here_is_no_configuration_and_no_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("c.yaml").write_text("seed: 1")
    Path("chats.jsonl").write_text('{"text": "a"}\n')
    for path, do in (("model", "model.path=model"), ("chats.jsonl", "data.train=chats.jsonl")):
        for file, overrides in ((path, []), ("c.yaml", [path])):
            with pytest.raises(UsageError) as caught:
                read_config(file, overrides)
            assert do in str(caught.value.do)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"a: \xff")
    with pytest.raises(UsageError, match=r"(?s)0xff.*position 3"):
        read_config(tmp_path / "c.yaml", [])


def test_errors_are_the_packages_own(tmp_path: Path) -> None:
    with pytest.raises(BurnishError) as caught:
        load(tmp_path, "a: [")
    assert caught.value.have
    assert caught.value.do


@draws(60)
@given(config=sections())
def test_what_is_dumped_loads_equal(
    tmp_path_factory: pytest.TempPathFactory, config: RunConfig
) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    _, origins = load_with_origins(None, [])
    for comments in (None, dict.fromkeys(origins, "a remark")):
        path.write_text(dump_yaml(config, comments), encoding="utf-8", newline="")
        assert read_config(path, []) == config


def test_the_dump_is_whole_and_keeps_the_order_of_the_schema() -> None:
    text = dump_yaml(RunConfig(), {"seed": "default", "rollout.n": "command line"})
    lines = text.splitlines()
    assert lines[0] == "name: null"
    assert "  n: 8   # command line" in lines
    assert "seed: 0  # default" in lines
    assert "  betas: [0.9, 0.999]" in lines
    assert "  kl:" in lines


def test_every_setting_of_another_frameworks_section_is_answered(tmp_path: Path) -> None:
    text = "trainer:\n  save_freq: 5\nactor_rollout_ref:\n  actor:\n    ppo_mini_batch_size: 64\n"
    message = refused(tmp_path, text)
    assert "trainer.save_freq (c.yaml:2)" in message
    assert "do:   write checkpoint.save_every" in message
    assert "actor_rollout_ref.actor.ppo_mini_batch_size (c.yaml:5)" in message
    assert "2 problems" in message


def test_a_number_that_is_too_large_is_called_so() -> None:
    with pytest.raises(UsageError) as error:
        read_config(None, [f"seed={2**64}"])
    assert "64 bits" in str(error.value.have)


def test_a_value_that_is_not_yaml_has_yamls_own_reason() -> None:
    with pytest.raises(yaml.MarkedYAMLError) as found:
        yaml.safe_load("[a")
    with pytest.raises(UsageError) as caught:
        read_config(None, ["rollout.stop=[a"])
    assert caught.value.have == f'"[a": {found.value.problem}'
    with pytest.raises(UsageError) as caught:
        read_config(None, ["model.fresh={is not YAML: 1, is not YAML: 2}"])
    assert "a second time" in str(caught.value.have)
