"""Make one call of a reward function, sync or async, and read its result for each rollout.

Runs where the function runs. Exceptions, results of the wrong type or length, and NaN become an `Answer` with an error.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from burnish.rewards.load import Style


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reward function said of one rollout."""

    value: float | None
    """A finite number; None where there is an error, or where a TRL function says by None that it does not apply."""
    error: str | None = None
    """Why there is no value."""
    extras: Mapping[str, float] = field(default_factory=dict)
    """Further finite numbers that a verl function gave beside the score, by name: shown, and no part of the reward."""


def call(
    function: Callable[..., Any],
    style: Style,
    arguments: Mapping[str, Any],
    count: int,
    runner: asyncio.Runner | None = None,
) -> list[Answer]:
    """Call `function` for `count` rollouts and return `count` answers, all with the same error if the call failed.

    An awaitable result runs to its end in `runner`, one event loop for all calls.
    """
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            if runner is None:
                raise TypeError("an async function needs an event loop")
            result = runner.run(_finish(result))
        return _answers(result, style, count)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary behind which code is not ours
        return [Answer(None, _text(error))] * count


async def call_async(
    function: Callable[..., Awaitable[Any]], style: Style, arguments: Mapping[str, Any], count: int
) -> list[Answer]:
    """Do the same for an `async def` function, beside others in one event loop. Cancelling itself counts as failing."""
    try:
        return _answers(await function(**arguments), style, count)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - as above
        return [Answer(None, _text(error))] * count


async def _finish(result: Awaitable[Any]) -> Any:
    return await result


def _answers(result: Any, style: Style, count: int) -> list[Answer]:
    return _scores(result, count) if style == "trl" else [_score(result)]


def _scores(result: Any, count: int) -> list[Answer]:
    """TRL: one number or None for each rollout, in a list, array or tensor."""
    values = _plain(result)
    if not isinstance(values, list | tuple):
        return [Answer(None, f"returned {type(result).__name__}, not a list of numbers")] * count
    if len(values) != count:
        return [Answer(None, f"returned {len(values)} values for {count} completions")] * count
    return [Answer(None) if value is None else _number(value) for value in values]


def _score(result: Any) -> Answer:
    """Read verl's result: a number, or a mapping with one under "score".

    Other finite numbers and booleans in the mapping come along; everything else is left out.
    """
    if not isinstance(result, Mapping):
        return _number(result)
    if "score" not in result:
        return Answer(None, f"returned a mapping without 'score': {sorted(map(str, result))}")
    answer = _number(result["score"])
    if answer.error is not None:
        return answer
    others = {str(name): _number(value).value for name, value in result.items() if name != "score"}
    return replace(answer, extras={name: x for name, x in others.items() if x is not None})


def _number(value: Any) -> Answer:
    plain = _plain(value)
    if not isinstance(plain, int | float):
        return Answer(None, f"returned {type(plain).__name__}, not a number")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    return Answer(number) if math.isfinite(number) else Answer(None, f"returned {number}")


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as Python's own."""
    return value.tolist() if hasattr(value, "tolist") else value


def _text(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{place}"
