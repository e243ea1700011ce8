from __future__ import annotations

import pytest

from burnish.errors import UsageError
from burnish.rewards import builtin
from burnish.rewards.load import Signature, read_signature


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
    with pytest.raises(UsageError):
        read_signature("m:f", function, {})


def test_a_callable_that_hides_its_signature() -> None:
    with pytest.raises(UsageError):
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
    with pytest.raises(UsageError):
        read_signature("regex", builtin.regex, {"pattern": pattern})


def test_a_pattern_that_is_missing() -> None:
    with pytest.raises(UsageError, match="give pattern in its kwargs"):
        read_signature("regex", builtin.regex, {})
