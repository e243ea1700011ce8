"""Read the signatures and results of reward functions, and make their arguments.

Parameter names tell two signatures apart:

- TRL's: `(prompts, completions, completion_ids, **columns) -> list[float | None]`, all rollouts in one call
- verl's: `(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}`, one at a time

A function, sync or async, gets the arguments that it names, or all with `**kwargs`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from burnish.errors import UsageError, refusing
from burnish.functions import LONGEST, did_you_mean, failure

if TYPE_CHECKING:  # importing it loads torch, which workers do not need
    from burnish.records import Rollout

Style = Literal["trl", "verl"]
"""Whose signature a function has."""

STACK_SIGNAL = signal.SIGUSR2
"""The signal that has a worker write the stack of its main thread."""
_TRL_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids"})
"""Arguments of a TRL function besides the data's columns."""
_VERL_ARGUMENTS = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})


@dataclass(frozen=True, slots=True)
class Signature:
    """How to call a reward function."""

    style: Style
    """One call for all rollouts (trl), or one for each (verl)."""
    accepts: frozenset[str] | None
    """The keywords that the function takes; None: any."""
    columns: frozenset[str]
    """Columns of the data that it requires."""
    is_async: bool = False
    """Whether it is declared with `async def`, so that its calls can wait concurrently."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A function's result for one rollout."""

    value: float | None
    """A finite number; None for an error, or if a TRL function returned None because it does not apply."""
    error: str | None = None
    extras: Mapping[str, float] = field(default_factory=dict)
    """Further finite numbers that a verl function returned beside the score, by name. They are shown, and not added to the reward."""
    began: float | None = field(default=None, compare=False)
    """When the function was called, in seconds since 1970; None if it was not called."""
    seconds: float = field(default=0.0, compare=False)


def read_signature(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Signature:
    """Return how to call `function` with `kwargs`. Raises `UsageError` if it fits neither signature, or does not take `kwargs`."""
    with refusing(
        f"Python knows no signature of the reward function {name!r}", do="wrap it in a function"
    ):
        parameters = inspect.signature(function).parameters.values()
    by_keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = frozenset(p.name for p in by_keyword)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = {p.name for p in by_keyword if p.default is p.empty} - kwargs.keys()
    positional = any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters)
    trl = "completions" in named
    verl = "solution_str" in named
    unmet = required - _VERL_ARGUMENTS if verl else set()
    if trl == verl or positional or unmet:
        raise UsageError(
            f"the reward function {name!r} fits no known signature",
            have=f"{getattr(function, '__name__', name)}{inspect.signature(function)}",
            want="TRL's (prompts, completions, **columns) or verl's (data_source, solution_str, ground_truth, extra_info)",
            do=f"give {', '.join(sorted(unmet))} in its kwargs"
            if unmet
            else "name its parameters like that",
        )
    for key in () if takes_any else sorted(kwargs.keys() - named):
        raise UsageError(
            f"the reward function {name!r} takes no argument {key!r}",
            have=f"reward.functions kwargs {sorted(kwargs)}",
            do=did_you_mean(key, named - _TRL_ARGUMENTS - _VERL_ARGUMENTS),
        )
    if name == "regex":
        problem = f"the pattern of the reward regex is no regular expression: {kwargs['pattern']!r}"
        with refusing(problem, do="correct pattern in the function's kwargs"):
            re.compile(kwargs["pattern"])
    declared = (function, type(function).__call__)  # an instance is async if its __call__ is
    return Signature(
        style="trl" if trl else "verl",
        accepts=None if takes_any else named,
        columns=frozenset(required - _TRL_ARGUMENTS) if trl else frozenset(),
        is_async=any(map(inspect.iscoroutinefunction, declared)),
    )


def arguments(
    signature: Signature, kwargs: Mapping[str, Any], rollouts: Sequence[Rollout]
) -> dict[str, Any]:
    """Return the keyword arguments of one call about `rollouts`; `kwargs` override others."""
    values = _trl(rollouts) if signature.style == "trl" else _verl(*rollouts)
    values |= kwargs
    accepts = signature.accepts
    return values if accepts is None else {key: values[key] for key in values.keys() & accepts}


def _trl(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return lists with one entry per rollout: prompts, completions and every column.

    As in TRL, columns named prompt or completion are left out.
    """
    names = {name for rollout in rollouts for name in rollout.prompt.columns}
    columns: dict[str, Any] = {
        name: [rollout.prompt.columns.get(name) for rollout in rollouts]
        for name in names - _TRL_ARGUMENTS - {"prompt", "completion"}
    }
    return columns | {
        "prompts": [rollout.prompt.messages or rollout.prompt.text for rollout in rollouts],
        "completions": [
            _said(rollout) if rollout.prompt.messages else rollout.text for rollout in rollouts
        ],
        "completion_ids": [rollout.completion.token_ids.tolist() for rollout in rollouts],
    }


def _said(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the messages after the prompt, with calls in OpenAI's form."""
    messages = [{"role": "assistant", "content": rollout.text}] if not rollout.conversation else []
    for said in rollout.conversation:
        calls = [{"type": "function", "function": call} for call in said.get("calls", ())]
        message = {"role": said["role"], "content": said["content"]}
        if not said.get("unseen"):
            messages.append(message | ({"tool_calls": calls} if calls else {}))
    return messages


def _verl(rollout: Rollout) -> dict[str, Any]:
    """Pass the last turn of a conversation, and `extra_info` from the column of that name, or all columns."""
    columns = rollout.prompt.columns
    turns = [each["content"] for each in rollout.conversation if each["role"] == "assistant"]
    return {
        "data_source": rollout.prompt.source,
        "solution_str": turns[-1] if turns else rollout.text,
        "ground_truth": rollout.prompt.answer,
        "extra_info": columns["extra_info"] if "extra_info" in columns else dict(columns),
    }


def call(
    function: Callable[..., Any],
    style: Style,
    arguments: Mapping[str, Any],
    count: int,
    runner: asyncio.Runner | None = None,
) -> list[Answer]:
    """Call `function` for `count` rollouts and return `count` answers.

    An exception, or a result of wrong type or length, is every answer's error; NaN or infinity only its own. Raises `MemoryError`.
    """
    began = time.time()
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            if runner is None:
                raise TypeError("an async function needs an event loop")
            result = runner.run(_finish(result))
        answers = _answers(result, style, count)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        answers = [Answer(None, failure(error))] * count
    return timed(answers, began)


async def call_async(
    function: Callable[..., Awaitable[Any]], style: Style, arguments: Mapping[str, Any], count: int
) -> list[Answer]:
    """Call an `async def` function. If it cancels itself, it fails. Raises `MemoryError`."""
    began = time.time()
    try:
        answers = _answers(await function(**arguments), style, count)
    except MemoryError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - as above
        answers = [Answer(None, failure(error))] * count
    return timed(answers, began)


def timed(answers: Sequence[Answer], began: float) -> list[Answer]:
    """Add a call's times."""
    seconds = time.time() - began
    return [replace(answer, began=began, seconds=seconds) for answer in answers]


async def _finish(result: Awaitable[Any]) -> Any:
    return await result


def _answers(result: Any, style: Style, count: int) -> list[Answer]:
    if style == "verl" and isinstance(result, Mapping):
        if "score" not in result:
            names = str(sorted(map(str, result)))[:LONGEST]
            return [Answer(None, f"returned a mapping without 'score': {names}")]
        answer = _number(result["score"])
        others = {str(name): _number(value).value for name, value in result.items()}
        extras = {name: x for name, x in others.items() if x is not None and name != "score"}
        return [answer if answer.error else replace(answer, extras=extras)]
    if style == "verl":
        return [_number(result)]
    values = _plain(result)
    if not isinstance(values, list | tuple):
        return [Answer(None, f"returned {type(result).__name__}, not a list of numbers")] * count
    if len(values) != count:
        return [Answer(None, f"returned {len(values)} values for {count} completions")] * count
    return [Answer(None) if value is None else _number(value) for value in values]


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
    return value.tolist() if hasattr(value, "tolist") else value
