from __future__ import annotations

from pathlib import Path

import pytest

from burnish.errors import UsageError
from burnish.rewards import builtin
from burnish.rewards.load import BUILTINS, Signature, load_function, read_signature

SOURCE = """
NUMBER = 4

def reward(completions, **kwargs):
    return [0.0] * len(completions)
"""


@pytest.fixture
def rewards_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def test_a_function_of_a_module() -> None:
    assert load_function("burnish.rewards.builtin:numeric") is builtin.numeric


def test_a_function_of_a_file(rewards_file: Path) -> None:
    assert load_function(f"{rewards_file}:reward")(["a"]) == [0.0]


@pytest.mark.parametrize("name", ["exact_match", "numeric", "regex"])
def test_the_built_in_ones(name: str) -> None:
    assert load_function(name) is getattr(builtin, name)


def problem(name: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_function(name)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_misspelt_built_in_names_the_nearest() -> None:
    assert "did you mean 'exact_match'?" in problem("exact_mach")
    assert all(name in problem("exact_mach") for name in BUILTINS)


@pytest.mark.parametrize("name", [":reward", "module:", ""])
def test_half_a_name(name: str) -> None:
    assert "names no reward function" in problem(name)


def test_a_module_that_is_not_there() -> None:
    assert "did you mean 'burnish'?" in problem("burnisch:reward")
    assert "'burnish.rewards.bultin'" in problem("burnish.rewards.bultin:numeric")


def test_a_file_that_is_not_there(rewards_file: Path) -> None:
    text = problem(f"{rewards_file.parent}/my_reward.py:reward")
    assert "is not there" in text
    assert "did you mean 'my_rewards.py'?" in text


def test_a_function_that_is_not_there(rewards_file: Path) -> None:
    text = problem(f"{rewards_file}:rewad")
    assert "without 'rewad'" in text
    assert "did you mean 'reward'?" in text


def test_something_that_cannot_be_called(rewards_file: Path) -> None:
    assert "NUMBER is int" in problem(f"{rewards_file}:NUMBER")


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("import no_such_package", "No module named 'no_such_package'"),
    ],
)
def test_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch, source: str, want: str
) -> None:
    (tmp_path / "broken_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("broken_rewards:f", f"{tmp_path}/broken_rewards.py:f"):
        text = problem(name)
        assert "cannot be imported" in text
        assert want in text


def everything(data_source, solution_str, ground_truth, extra_info=None): ...
def solution_only(solution_str): ...
def with_scale(solution_str, scale, offset=0): ...
def anything_else(completions, **kwargs): ...
def with_column(prompts, completions, answer, hint=None): ...
async def asynchronous(completions, answer): ...
def neither(text, label): ...
def both(completions, solution_str): ...
def only_kwargs(**kwargs): ...
def positional(completions, x, /): ...


class Judge:
    def __call__(self, completions, answer): ...


class AsyncJudge:
    async def __call__(self, solution_str): ...


@pytest.mark.parametrize(
    ("function", "kwargs", "want"),
    [
        (
            everything,
            {},
            Signature(
                "verl",
                frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
                frozenset(),
            ),
        ),
        (solution_only, {}, Signature("verl", frozenset({"solution_str"}), frozenset())),
        (
            with_scale,
            {"scale": 2},
            Signature("verl", frozenset({"solution_str", "scale", "offset"}), frozenset()),
        ),
        (anything_else, {"scale": 2}, Signature("trl", None, frozenset())),
        (
            with_column,
            {},
            Signature(
                "trl",
                frozenset({"prompts", "completions", "answer", "hint"}),
                frozenset({"answer"}),
            ),
        ),
        (
            asynchronous,
            {"answer": 1},
            Signature("trl", frozenset({"completions", "answer"}), frozenset(), is_async=True),
        ),
        (
            Judge(),
            {},
            Signature("trl", frozenset({"completions", "answer"}), frozenset({"answer"})),
        ),
        (
            AsyncJudge(),
            {},
            Signature("verl", frozenset({"solution_str"}), frozenset(), is_async=True),
        ),
    ],
)
def test_signatures(function, kwargs: dict, want: Signature) -> None:
    assert read_signature("m:f", function, kwargs) == want


@pytest.mark.parametrize("function", [neither, both, only_kwargs, positional])
def test_no_known_signature(function) -> None:
    with pytest.raises(UsageError) as caught:
        read_signature("m:f", function, {})
    assert function.__name__ + "(" in str(caught.value)
    assert "verl's (data_source, solution_str" in str(caught.value)


def test_a_callable_that_hides_its_signature() -> None:
    with pytest.raises(UsageError, match="has no signature"):
        read_signature("builtins:dict", dict, {})


def test_an_argument_that_only_kwargs_can_give() -> None:
    with pytest.raises(UsageError, match="give scale in its kwargs"):
        read_signature("m:f", with_scale, {})


def test_kwargs_that_the_function_does_not_take() -> None:
    with pytest.raises(UsageError) as caught:
        read_signature("m:f", with_scale, {"scale": 1, "ofset": 2})
    assert "takes no argument 'ofset'" in str(caught.value)
    assert "did you mean 'offset'?" in str(caught.value)


@pytest.mark.parametrize("pattern", ["(", 4])
def test_a_pattern_that_is_none(pattern: object) -> None:
    with pytest.raises(UsageError, match="not a regular expression"):
        read_signature("regex", builtin.regex, {"pattern": pattern})


def test_a_pattern_that_is_missing() -> None:
    with pytest.raises(UsageError, match="give pattern in its kwargs"):
        read_signature("regex", builtin.regex, {})
