"""state.json is read with suspicion: what a trainer would not write there is refused by name."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from burnish.checkpoint.manifest import Commit, Manifest
from burnish.checkpoint.steps import CommittedStep
from burnish.errors import IncompatibleError
from burnish.runs.trainer_state import (
    TrainerState,
    read_state,
    require_same_adapter,
    weights_version,
)

STATE = TrainerState(7, 56, 100, 7, 0, {"val/loss": 1.5}, {"lr": "nan", "n": 1}, unvalidated=True)


def read(**changes):
    state = {**asdict(STATE), **changes}
    state = {name: value for name, value in state.items() if value is not ...}
    commit = Commit("0.1", "ab", 7, "", 0, healthy=True)
    return read_state(CommittedStep(Path("step-00000007"), commit, Manifest("ab", 7, 1, {}), state))


def test_what_was_written_is_read():
    assert read() == STATE
    assert read(inputs={}, measured=None).measured is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cursor", "56"), ("cursor", -1), ("cursor", 1.0), ("cursor", True), ("cursor", ...),
        ("tokens", None), ("measured_later", None), ("measured_later", {"3": [1]}), ("measured", [1]), ("measured", {"a": None}), ("unlogged", "x"),
        ("unlogged", {"a": {"b": 1}}), ("unvalidated", 1), ("epoch", 3), ("roles", None),
        ("roles", {"critic": 1}), ("roles", {"critic": {"optimizer_steps": 1}}),
        ("roles", {"critic": {"optimizer_steps": 1, "skipped_in_a_row": -1}}),
        ("config_digest", 1), ("weights_version", "7"), ("weights_version", -1),
        ("ahead", -1), ("ahead", "1"), ("ahead", None),
    ],
)  # fmt: skip
def test_anything_else_is_refused_by_name(name, value):
    with pytest.raises(IncompatibleError, match=rf"state\.json(.|\n)*{name}"):
        read(**{name: value})


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(IncompatibleError):
        read(**{"\ud800": 1})


def test_an_imported_step_says_how_to_begin_from_it():
    with pytest.raises(IncompatibleError) as refused:
        read(imported={"kind": "huggingface", "source": "/models/x"}, training="absent")
    assert "model.path=step-00000007/model" in refused.value.do


def test_what_stands_beside_the_position_is_taken_and_may_be_absent():
    assert read(config_digest="ab", weights_version=7) == STATE


def test_the_policys_version_is_the_step_in_which_it_last_learned():
    assert [weights_version(steps, 3) for steps in (0, 3, 4, 9)] == [0, 0, 4, 9]
    assert weights_version(5, 0) == 5


def test_the_state_of_another_step_is_refused():
    with pytest.raises(IncompatibleError, match="step 8"):
        read(step=8)


def test_what_it_says_of_further_models():
    roles = {"critic": {"optimizer_steps": 9, "skipped_in_a_row": 1}}
    found = read(roles=roles)
    assert found.counts("") == {"optimizer_steps": 7, "skipped_in_a_row": 0}
    assert found.counts("critic") == roles["critic"]
    assert read(roles=...) == STATE  # as steps were written that knew of none
    with pytest.raises(IncompatibleError) as caught:
        found.counts("judge")
    assert caught.value.have == "critic"


def test_another_adapter_is_refused_with_a_table(tmp_path: Path) -> None:
    record: dict[str, Any] = {"base": "/m", "base_digest": "0", "rank": 4, "alpha": 6.0}
    record |= {"rslora": False, "targets": ["k_proj"]}
    require_same_adapter(dict(record), record, tmp_path)
    require_same_adapter(None, None, tmp_path)
    require_same_adapter(record | {"base": "/moved"}, record, tmp_path)
    other = record | {"alpha": 7.0}
    with pytest.raises(IncompatibleError):
        require_same_adapter(record, other, tmp_path)
    other = record | {"rank": 8, "targets": ["q_proj"], "base": "/other", "base_digest": "f00d"}
    with pytest.raises(IncompatibleError) as caught:
        require_same_adapter(record, other, tmp_path)
    lines = [line.split() for line in str(caught.value).splitlines()]
    assert ["rank", "4", "8"] in lines
    assert ["base", record["base"], "/other"] in lines
    assert ["base_digest", record["base_digest"], "f00d"] in lines
    assert not any(line[:1] == ["alpha"] for line in lines)
    assert "base_digest" in str(caught.value)
    for have, want in ((None, record), (record, None)):
        with pytest.raises(IncompatibleError) as caught:
            require_same_adapter(have, want, tmp_path)
        assert caught.value.have != caught.value.want
        assert caught.value.exit_code == 4
