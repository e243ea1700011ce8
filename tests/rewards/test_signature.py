from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from burnish.errors import UsageError
from burnish.rewards import builtin
from burnish.rewards.signature import Answer, Signature, arguments, call, read_signature

TRL = Signature("trl", None, frozenset())
VERL = Signature("verl", None, frozenset())


def test_trl_gets_lists_and_the_columns(make_rollout) -> None:
    rollouts = [
        make_rollout("3", columns={"answer": "3", "level": 1}),
        make_rollout("4", columns={"answer": "4", "prompt": "left out"}),
    ]
    assert arguments(TRL, {}, rollouts) == {
        "prompts": ["2+2=", "2+2="],
        "completions": ["3", "4"],
        "completion_ids": [[0, 1, 2], [0, 1, 2]],
        "answer": ["3", "4"],
        "level": [1, None],
    }


def test_trl_gets_messages_where_the_prompt_was_messages(make_rollout) -> None:
    messages = [{"role": "user", "content": "2+2="}]
    given = arguments(TRL, {}, [make_rollout("4", messages=messages)])
    assert given["prompts"] == [messages]
    assert given["completions"] == [[{"role": "assistant", "content": "4"}]]


def test_functions_get_the_turns_of_a_conversation(make_rollout) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    asked = [{"role": "user", "content": "1+1?"}]
    rollout = replace(
        make_rollout("calls add 2 It is 2.", messages=asked),
        conversation=(
            {"role": "assistant", "content": "calls add", "calls": [call], "tokens": 3},
            {"role": "tool", "content": "2", "is_error": False},
            {"role": "assistant", "content": "It is 2.", "calls": []},
            {"role": "user", "content": "Right.", "unseen": True},
        ),
    )
    (said,) = arguments(TRL, {}, [rollout])["completions"]
    assert said == [
        {
            "role": "assistant",
            "content": "calls add",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    assert arguments(VERL, {}, [rollout])["solution_str"] == "It is 2."


def test_verl_gets_one_rollout(make_rollout) -> None:
    extra = {"split": "train"}
    rollout = make_rollout("5", "4", columns={"extra_info": extra})
    assert arguments(VERL, {}, [rollout]) == {
        "data_source": "sums",
        "solution_str": "5",
        "ground_truth": "4",
        "extra_info": extra,
    }
    plain = make_rollout("5", "4", columns={"answer": "4"})
    assert arguments(VERL, {}, [plain])["extra_info"] == {"answer": "4"}


def test_a_function_gets_what_it_names_and_kwargs_win(make_rollout) -> None:
    names = frozenset({"completions", "answer", "scale", "absent"})
    given = arguments(
        Signature("trl", names, frozenset()), {"scale": 2, "answer": "x"}, [make_rollout()]
    )
    assert given == {"completions": ["4"], "answer": "x", "scale": 2}


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
    with pytest.raises(UsageError):
        read_signature("m:f", with_scale, {})


def test_kwargs_that_the_function_does_not_take() -> None:
    with pytest.raises(UsageError) as caught:
        read_signature("m:f", with_scale, {"scale": 1, "ofset": 2})
    assert "'ofset'" in str(caught.value)
    assert "'offset'" in str(caught.value)


@pytest.mark.parametrize("pattern", ["(", 4])
def test_a_pattern_that_is_none(pattern: object) -> None:
    with pytest.raises(UsageError):
        read_signature("regex", builtin.regex, {"pattern": pattern})


def test_a_pattern_that_is_missing() -> None:
    with pytest.raises(UsageError):
        read_signature("regex", builtin.regex, {})


def verl(result: object) -> Answer:
    (answer,) = call(lambda: result, "verl", {}, 1)
    return answer


def trl(result: object, count: int = 2) -> list[Answer]:
    return call(lambda: result, "trl", {}, count)


@pytest.mark.parametrize(
    "result",
    [1, 1.0, True, np.float32(1), np.array(1), torch.tensor(1.0), {"score": 1, "pred": "4"}],
)
def test_numbers_of_every_kind(result: object) -> None:
    assert verl(result) == Answer(1.0)


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (10**400, "inf"),
        (None, "NoneType"),
        ("1", "str"),
        ([1.0], "list"),
        ({"acc": 1}, "['acc']"),
        ({"score": math.nan}, "nan"),
    ],
)
def test_what_is_not_a_number(result: object, error: str) -> None:
    answer = verl(result)
    assert answer.value is None
    assert error in str(answer.error)


def test_numbers_beside_a_score_come_along_and_nothing_else_does() -> None:
    said = {"acc": True, "steps": np.int64(3), 7: 0.5, "pred": "4", "cut": None, "loss": math.nan}
    answer = verl({"score": -1, **said, "all": [1.0]})
    assert (answer.value, answer.extras) == (-1.0, {"acc": 1.0, "steps": 3.0, "7": 0.5})
    answer = verl({"score": math.nan, "acc": 1})
    assert (answer.value, answer.extras) == (None, {})


@pytest.mark.parametrize("result", [[1, 0.5], (1, 0.5), np.array([1, 0.5]), torch.tensor([1, 0.5])])
def test_lists_of_every_kind(result: object) -> None:
    assert trl(result) == [Answer(1.0), Answer(0.5)]


def test_none_in_a_list_means_it_does_not_apply() -> None:
    assert trl([None, 1.0]) == [Answer(None), Answer(1.0)]


def test_nan_in_a_list_is_the_error_of_its_rollout_alone() -> None:
    wrong, right = trl([math.nan, 1.0])
    assert wrong.value is None
    assert "nan" in str(wrong.error)
    assert right == Answer(1.0)


@pytest.mark.parametrize(
    ("result", "error"),
    [
        ([1.0], "1 values for 2 completions"),
        ([], "0 values for 2 completions"),
        (1.0, "float"),
        (None, "NoneType"),
        ({"score": 1}, "dict"),
    ],
)
def test_what_is_not_a_list_for_the_rollouts(result: object, error: str) -> None:
    for answer in trl(result):
        assert answer.value is None
        assert error in str(answer.error)


def raising(error: BaseException):
    def function() -> float:
        raise error

    return function


def test_an_exception_is_every_rollouts_error_and_says_where() -> None:
    first, second = call(raising(KeyError("x")), "trl", {}, 2)
    assert first == second
    assert first.value is None
    assert first.error.startswith("KeyError: 'x' (")
    assert "test_signature.py:" in first.error


def test_a_call_that_does_not_fit() -> None:
    (answer,) = call(lambda: 1.0, "verl", {"x": 1}, 1)
    assert "TypeError" in answer.error
    assert "'x'" in answer.error


def test_sys_exit_is_an_error_and_ctrl_c_is_not() -> None:
    (answer,) = call(lambda: sys.exit(3), "verl", {}, 1)
    assert answer.error.startswith("SystemExit: 3")
    with pytest.raises(KeyboardInterrupt):
        call(raising(KeyboardInterrupt()), "verl", {}, 1)


def test_async_functions_share_one_event_loop() -> None:
    loops = []

    async def judge(x: float) -> float:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        if x < 0:
            raise ValueError("negative")
        return x

    with asyncio.Runner() as runner:
        assert call(judge, "verl", {"x": 1}, 1, runner) == [Answer(1.0)]
        (answer,) = call(judge, "verl", {"x": -1}, 1, runner)
    assert "ValueError: negative" in answer.error
    assert loops[0] is loops[1]
