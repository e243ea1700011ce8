"""What a run was given is remembered: what may change is told, what may not is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from support.models.tokenizers import char_tokenizer
from support.ranks.processes import run_ranks

from burnish.config.algorithm import AlgorithmConfig
from burnish.config.schema import DataConfig, RewardFunctionConfig, RunConfig
from burnish.data.examples import ExampleDataset
from burnish.data.sources import load_rows
from burnish.data.tasks import PromptDataset
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, IncompatibleError
from burnish.methods.table import METHODS
from burnish.runs.run import Run
from burnish.runs.session import open_run
from burnish.runs.trainer_state import Fingerprints

STEP = Path("step-00000007")
ROWS = [{"prompt": f"{n}+1=", "completion": str(n + 1), "answer": str(n + 1)} for n in range(6)]


def dataset(tmp_path, rows, kind=ExampleDataset, tokenizer=None, limit=None):
    path = tmp_path / f"{abs(hash(str(rows)))}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = {"max_length": limit} if kind is ExampleDataset else {"limits": {"x": limit or 99}}
    loaded = load_rows([str(path)], "data.train")
    return kind(loaded, tokenizer or char_tokenizer(), DataConfig(), **limits)


@pytest.mark.parametrize("kind", [ExampleDataset, PromptDataset])
def test_the_digest_is_of_what_is_trained_on(tmp_path, kind):
    def digest(rows, **how):
        return dataset(tmp_path, rows, kind, **how).digest

    same = digest(ROWS)
    assert digest(list(ROWS)) == same
    assert digest([{**row, "note": "x"} for row in ROWS]) == same
    assert digest(ROWS[::-1]) != same
    assert digest(ROWS[:-1]) != same
    assert digest([*ROWS[:-1], {**ROWS[-1], "prompt": "5+2="}]) != same
    assert digest([*ROWS, {**ROWS[0], "prompt": "1" * 50}], limit=20) == same  # left out
    answers = [{**ROWS[0], "answer": "9", "completion": "9"}, *ROWS[1:]]
    assert digest(answers) != same


def inputs(tmp_path, rows=ROWS, tokenizer=None):
    tokenizer = tokenizer or char_tokenizer()
    return Fingerprints.of(tokenizer, dataset(tmp_path, rows, tokenizer=tokenizer), None)


def test_what_is_the_same_is_fine(tmp_path):
    one = inputs(tmp_path)
    used = char_tokenizer()
    used(["a", "bcd"], padding=True, truncation=True, max_length=3)
    assert inputs(tmp_path, tokenizer=used) == one
    assert one.changed_since(json.loads(json.dumps(asdict(one))), STEP) == []


def test_what_may_change_is_told(tmp_path):
    before = asdict(inputs(tmp_path))
    changed = [{**ROWS[0], "completion": "7"}, *ROWS[1:]]
    assert inputs(tmp_path, changed).changed_since(before, STEP) == ["the content of data.train"]
    tokenizer = copy.deepcopy(char_tokenizer())
    tokenizer.chat_template = "{{ messages }}"
    [told] = inputs(tmp_path, tokenizer=tokenizer).changed_since(before, STEP)
    assert "chat template" in told


def test_another_number_of_samples_is_refused(tmp_path):
    with pytest.raises(IncompatibleError, match=r"6 samples(.|\n)*7 samples"):
        inputs(tmp_path, [*ROWS, ROWS[0]]).changed_since(asdict(inputs(tmp_path)), STEP)


def test_another_vocabulary_is_refused(tmp_path):
    tokenizer = copy.deepcopy(char_tokenizer())
    tokenizer.add_tokens(["<new>"])
    for other in (inputs(tmp_path, tokenizer=tokenizer), replace(inputs(tmp_path), vocabulary="")):
        with pytest.raises(IncompatibleError):
            other.changed_since(asdict(inputs(tmp_path)), STEP)


@pytest.mark.parametrize(
    "change", [{"data": ...}, {"samples": "6"}, {"samples": True}, {"more": 1}]
)
def test_what_does_not_say_so_is_refused(tmp_path, change):
    one = inputs(tmp_path)
    state = {name: value for name, value in {**asdict(one), **change}.items() if value is not ...}
    for recorded in (state, None, [], {}):
        with pytest.raises(IncompatibleError, match="step-00000007"):
            one.changed_since(recorded, STEP)


def begin_with_own_data(layout: Layout, directory: Path) -> str:
    config = RunConfig.model_validate({"name": "run", "output_dir": str(directory)})
    inputs = Fingerprints("vocabulary", "rules", 10, f"the data of rank {layout.rank}")
    with (
        open_run(config, METHODS["sft"], layout, torch.device("cpu")) as session,
        pytest.raises(BurnishError) as error,
    ):
        Run(session, {}, inputs, 1, Fraction(1))
    return str(error.value)


def test_ranks_that_see_different_data_do_not_begin(tmp_path: Path) -> None:
    for said in run_ranks(begin_with_own_data, 2, tmp_path):
        assert "data.train" in said
        assert "rank 1" in said


def test_another_formula_is_refused_and_the_same_one_elsewhere_is_not(tmp_path):
    def given(name: str, code: str):
        (tmp_path / name).write_text(code)
        algorithm = AlgorithmConfig(advantage=f"{tmp_path / name}:mine")
        data = dataset(tmp_path, ROWS, tokenizer=char_tokenizer())
        return Fingerprints.of(char_tokenizer(), data, None, algorithm)

    before = given("a.py", "def mine(rollouts): return rollouts.rewards")
    assert given("b.py", "def mine(rollouts): return rollouts.rewards") == before
    with pytest.raises(IncompatibleError):
        given("a.py", "def mine(rollouts): return 2 * rollouts.rewards").changed_since(
            asdict(before), STEP
        )


def test_another_reward_is_told_and_the_same_one_elsewhere_is_not(tmp_path):
    def given(name: str, code: str):
        (tmp_path / name).write_text(code)
        data = dataset(tmp_path, ROWS, tokenizer=char_tokenizer())
        names = "numeric", f"{tmp_path / name}:mine"
        functions = [RewardFunctionConfig(function=each) for each in names]
        return Fingerprints.of(char_tokenizer(), data, None, None, functions)

    before = given("a.py", "def mine(completions, **columns): return [1.0] * len(completions)")
    other = given("b.py", "def mine(completions, **columns): return [1.0] * len(completions)")
    assert other == before
    changed = given("a.py", "def mine(completions, **columns): return [0.0] * len(completions)")
    assert changed.changed_since(asdict(before), STEP) == ["the files of reward.functions"]
