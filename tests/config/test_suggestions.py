from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.config import foreign_names as foreign_names_package
from burnish.config import suggestions
from burnish.config.foreign_names import foreign_names
from burnish.config.keys import known_keys, plain_name
from burnish.config.load import load_settings
from burnish.config.suggestions import nearest, suggestion
from burnish.errors import UsageError
from burnish.methods.table import METHODS

PATHS = sorted(Path(foreign_names_package.__file__).parent.glob("*.yaml"))
TABLES = [yaml.safe_load(path.read_text()) for path in PATHS]
ANSWERS = ("renamed", "different", "absent")
"""A name stands in one of these parts of one table."""
SECTIONS, RENAMED, DIFFERENT, ABSENT, VALUES = foreign_names()

KEYS = known_keys()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rolout.n", "rollout.n"),
        ("rollout.temprature", "rollout.temperature"),
        ("n", "rollout.n"),
        ("temperature", "rollout.temperature"),
        ("optim.n", "rollout.n"),
        ("rollout.steps", "steps"),
        ("outputs", "output_dir"),
        ("nam", "name"),
        ("rolout", "rollout"),
        ("algorithm.kl_coeff", "algorithm.kl.coef"),
        ("algorithm.advantage.gama", "algorithm.advantage.gamma"),
        ("algorithm.policy_loss.temperature_po", "algorithm.policy_loss.temperature_pos"),
        ("rollout.n.x", "rollout.n"),
        ("reward.function", "reward.functions"),
        ("reward.functions[].wieght", "reward.functions[].weight"),
        ("lerning_rate", "optim.lr"),
        ("zzzz", None),
        ("batch.qqqq", None),
    ],
)
def test_nearest(name: str, meant: str | None) -> None:
    assert nearest(name) == meant


@pytest.mark.nightly
def test_every_known_key_is_nearest_to_itself() -> None:
    assert [each for each in KEYS if nearest(each) != each] == []


@pytest.mark.parametrize(
    ("name", "do"),
    [
        ("learning_rate", " optim.lr"),
        ("trainer.save_freq", " checkpoint.save_every"),
        ("grad_clip", " engine.max_grad_norm"),
        ("lr_warmup_steps", " optim.warmup_steps"),
        ("warmup_steps", " optim.warmup_steps"),
        ("val_before_train", " evaluation.before"),
        ("actor_rollout_ref.rollout.val_kwargs.n", " evaluation.n"),
        ("critic.optim.lr", " critic.lr"),
        ("epsilon", " algorithm.clip_low and algorithm.clip_high"),
        ("actor_rollout_ref.actor.clip_ratio", " algorithm.clip_low and algorithm.clip_high"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", " batch.minibatches"),
        ("gradient_checkpointing", " engine.activation_checkpointing"),
        ("loss_type", " algorithm.aggregation"),
        ("ppo_epochs", " batch.epochs"),
        ("num_ppo_epochs", " batch.epochs"),
        ("num_iterations", " batch.epochs"),
        ("data.apply_chat_template_kwargs.enable_thinking", " data.chat_template_kwargs"),
        ("actor_rollout_ref.rollout.n", " rollout.n?"),
        ("actor_rollout_ref.actor.optim.lr", " optim.lr?"),
        ("rolout.n", " rollout.n?"),
        ("reward.model", " reward.models?"),
        ("reward.functions[3].wieght", " reward.functions[].weight?"),
        ("batch.qqqq", " `burnish config explain batch`"),
    ],
)
def test_a_name_from_elsewhere_is_answered_and_a_likeness_asked(name: str, do: str) -> None:
    assert suggestion(name)[1].endswith(do)


@pytest.mark.parametrize("name", ["packing", "actor_rollout_ref.rollout.load_format", "zzzz"])
def test_a_name_that_nothing_stands_for_gets_no_other(name: str) -> None:
    assert "." not in suggestion(name)[1]


def test_what_is_said_of_a_name_from_elsewhere() -> None:
    assert suggestion("lora_r")[0].startswith("model.lora.rank, ")
    assert "lora_r" in suggestion("lora_r")[0]
    assert "batch.minibatches" in suggestion("ppo_mini_batch_size")[0]
    assert suggestion("packing")[0] != suggestion("rolout.n")[0]


@pytest.mark.parametrize(
    ("name", "value", "do"),
    [
        ("param_offload", False, "leave it out"),
        ("param_offload", True, "write engine.offload_during_rollout=true"),
        ("trainer.val_before_train", True, "leave it out"),
        ("beta", 0.0, "leave it out"),
        ("beta", 0.04, "write algorithm.kl.coef=0.04"),
        ("clip_ratio", 0.3, "write algorithm.clip_low=0.3 algorithm.clip_high=0.3"),
        ("epsilon_high", 5.0, "set algorithm.clip_high"),
        ("loss_agg_mode", "token-mean", "leave it out"),
        ("loss_agg_mode", "seq-mean-token-sum", "write algorithm.aggregation=sequence_sum"),
        ("loss_agg_mode", "of my own", "set algorithm.aggregation"),
        ("learning_rate", 1e-5, "write optim.lr=1.0e-05"),
        ("model.revision", "main", "set model.path"),
        ("data.dataset_config", "main", "set data.train"),
        ("split", "train", "set data.train"),
        ("hub_token", "x", "leave it out"),
        ("lr", 1, "did you mean optim.lr or critic.lr?"),
        ("temperature", 0.3, "did you mean rollout.temperature or evaluation.temperature?"),
    ],
)
def test_an_answer_has_the_value_and_none_is_a_default(name: str, value: object, do: str) -> None:
    assert suggestion(name, value)[1] == do


def test_every_value_of_a_name_from_elsewhere_fits() -> None:
    assert [name for name in VALUES if name not in {**RENAMED, **DIFFERENT}] == []
    for settings in [settings for values in VALUES.values() for settings in values.values()]:
        plain = {key: value for key, value in settings.items() if value != "*"}
        load_settings({}, plain)
        assert [key for key in settings if plain_name(key) not in KEYS] == [] or "kwargs" in str(
            settings
        )


def test_names_from_elsewhere_are_answered_once_and_are_no_keys() -> None:
    for table in TABLES:
        names = [name for part in ANSWERS for name in table[part]]
        assert len(names) == len(set(names))
        assert [name for name in names if name in KEYS] == []
    assert len({**RENAMED, **DIFFERENT, **ABSENT}) == len(RENAMED) + len(DIFFERENT) + len(ABSENT)
    assert [section for section in SECTIONS if section in KEYS] == []


@pytest.mark.parametrize("table", TABLES, ids=[path.stem for path in PATHS])
def test_a_table_is_in_order(table: dict[str, Any]) -> None:
    for part in (*ANSWERS, "values"):
        assert list(table[part]) == sorted(table[part]), part
    assert set(table["values"]) <= {*table["renamed"], *table["different"]}


def test_only_an_error_loads_the_names_of_other_frameworks() -> None:
    code = (
        "import sys\n"
        "from burnish.config.load import read_config\n"
        "from burnish.errors import UsageError\n"
        "loaded = lambda: {name for name in sys.modules if 'foreign' in name or 'suggestions' in name}\n"
        "read_config(None, ['model.path=m', 'data.train=x.jsonl'])\n"
        "assert loaded() == set(), loaded()\n"
        "try:\n"
        "    read_config(None, ['model.path=m', 'data.train=x.jsonl', 'learning_rate=1'])\n"
        "except UsageError:\n"
        "    assert loaded() == {'burnish.config.foreign_names', 'burnish.config.suggestions'}\n"
        "    assert not any(name.startswith('burnish.translate') for name in sys.modules)\n"
        "else:\n"
        "    raise AssertionError('it was no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_said_of_names_from_elsewhere_names_keys_that_exist() -> None:
    sections = "|".join(name for name, key in KEYS.items() if key.section and "." not in name)
    said = [*RENAMED.values(), *DIFFERENT.values(), *ABSENT.values()]
    dotted = {each for text in said for each in re.findall(rf"\b(?:{sections})(?:\.\w+)+", text)}
    assert [each for each in sorted(dotted) if each not in KEYS] == []
    named = [text.partition(":")[0] for text in DIFFERENT.values()] + [*RENAMED.values()]
    parts = [re.sub(r" \(.*?\)", "", each).split(" and ") for each in named]
    assert [each for names in parts for each in names if each not in KEYS] == []


@pytest.mark.parametrize(
    ("name", "value", "do"),
    [
        ("beta", 0.2, "write method.beta=0.2"),
        ("label_smoothing", 0.1, "write method.label_smoothing=0.1"),
        ("desirable_weight", 2.0, "write method.desirable_weight=2.0"),
        ("loss_type", "ipo", "set method.loss"),
        ("learning_rate", 1e-5, "write optim.lr=1.0e-05"),
    ],
)
def test_a_methods_own_settings_are_meant_first(name: str, value: object, do: str) -> None:
    own = METHODS["dpo"].Settings.model_fields
    assert suggestion(name, value, own)[1] == do
    for given in ({name: value}, {"method.loss": {"sigmoid": 1}, name: value}):
        with pytest.raises(UsageError) as caught:
            load_settings(given, {}, own)
        assert caught.value.do == do


def test_every_methods_setting_from_elsewhere_exists() -> None:
    own = {name for method in METHODS.values() for name in method.Settings.model_fields}
    assert set(suggestions._OF_METHODS.values()) <= own


def test_beta_is_that_of_either_method() -> None:
    want, _ = suggestion("beta", 0.1)
    assert "algorithm.kl.coef" in want
    assert "burnish dpo" in want
    assert "method.beta" in want
