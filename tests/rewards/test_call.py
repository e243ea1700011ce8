from __future__ import annotations

import asyncio
import math
import sys

import numpy as np
import pytest
import torch

from burnish.rewards.call import Answer, call


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
        (math.nan, "returned nan"),
        (-math.inf, "returned -inf"),
        (10**400, "returned inf"),
        (None, "returned NoneType, not a number"),
        ("1", "returned str, not a number"),
        ([1.0], "returned list, not a number"),
        ({"acc": 1}, "returned a mapping without 'score': ['acc']"),
        ({"score": math.nan}, "returned nan"),
    ],
)
def test_what_is_not_a_number(result: object, error: str) -> None:
    assert verl(result) == Answer(None, error)


def test_numbers_beside_a_score_come_along_and_nothing_else_does() -> None:
    said = {"acc": True, "steps": np.int64(3), 7: 0.5, "pred": "4", "cut": None, "loss": math.nan}
    answer = verl({"score": -1, **said, "all": [1.0]})
    assert (answer.value, answer.extras) == (-1.0, {"acc": 1.0, "steps": 3.0, "7": 0.5})
    assert verl({"score": math.nan, "acc": 1}) == Answer(None, "returned nan")


@pytest.mark.parametrize("result", [[1, 0.5], (1, 0.5), np.array([1, 0.5]), torch.tensor([1, 0.5])])
def test_lists_of_every_kind(result: object) -> None:
    assert trl(result) == [Answer(1.0), Answer(0.5)]


def test_none_in_a_list_means_it_does_not_apply() -> None:
    assert trl([None, 1.0]) == [Answer(None), Answer(1.0)]


def test_nan_in_a_list_is_the_error_of_its_rollout_alone() -> None:
    assert trl([math.nan, 1.0]) == [Answer(None, "returned nan"), Answer(1.0)]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([], "returned 0 values for 2 completions"),
        (1.0, "returned float, not a list of numbers"),
        (None, "returned NoneType, not a list of numbers"),
        ({"score": 1}, "returned dict, not a list of numbers"),
    ],
)
def test_what_is_not_a_list_for_the_rollouts(result: object, error: str) -> None:
    assert trl(result) == [Answer(None, error)] * 2


def raising(error: BaseException):
    def function() -> float:
        raise error

    return function


def test_an_exception_is_every_rollouts_error_and_says_where() -> None:
    first, second = call(raising(KeyError("x")), "trl", {}, 2)
    assert first == second
    assert first.value is None
    assert first.error.startswith("KeyError: 'x' (")
    assert "test_call.py:" in first.error


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
