"""The process that runs environments: `python -m burnish.environments.worker FD PARENT`.

It gets bundles of calls over the connection FD, and answers each one. An environment lives here from its `begin` to its `close`.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from burnish.distributed.parent_watch import exit_without
from burnish.environments.base import Environment, Observation
from burnish.environments.calls import (
    Answered,
    Asked,
    Begin,
    Call,
    Close,
    Described,
    Key,
    Score,
    ScoreGroup,
    Step,
)
from burnish.errors import BurnishError, UsageError
from burnish.functions import failure, load_function

MOST_CHARACTERS = 1 << 20
"""Most characters of a text that leave the process. `rollout.environment.max_reply_tokens` cuts the rest."""
_MOST_MESSAGES = 8
"""Most texts of that length in an answer."""
_MOST_NUMBERS = 1000
"""Most rewards or metrics in an answer."""


def main(descriptor: int, parent: int) -> None:
    """Describe the class if asked to, then serve calls until the connection closes or the process `parent` is gone."""
    os.set_inheritable(descriptor, False)
    exit_without(parent)
    # The trainer may close the connection before an answer, and then nobody wants it.
    with (
        suppress(ConnectionError),
        Connection(descriptor) as connection,
        asyncio.Runner() as runner,
    ):
        try:
            function, kwargs, asked, sys.argv, sys.path = connection.recv()
            make = load_function(function, "rollout.environment.function")
            described = description_of(make, function, kwargs) if asked else Described((), None)
            if asked == "rows":
                described = described._replace(rows=brought_by(make, "rows", function, kwargs))
        except BurnishError as error:
            connection.send(error)
            return
        connection.send(described)
        environments = dict[Key, Any]()
        own = os.getpid()

        def send(answer: Answered) -> None:
            if os.getpid() != own:
                os._exit(0)  # an environment has forked, and returned in both processes
            connection.send(answer)

        while True:
            try:
                calls = connection.recv()
            except EOFError:
                return
            serve(environments, calls, lambda: make(**kwargs), send, runner)
            if os.getpid() != own:
                os._exit(0)


def description_of(make: Any, name: str, kwargs: Mapping[str, Any]) -> Described:
    """Return the tools of the class `make`. Raises `UsageError` for one that is no environment."""
    missing = [each for each in ("begin", "step", "close") if not hasattr(make, each)]
    if missing:
        raise UsageError(
            f"rollout.environment.function: {name} is no environment",
            have=f"no methods {', '.join(missing)}",
            want="a class with the methods of burnish.Environment",
            do="let the class inherit from burnish.Environment",
        )
    try:
        inspect.signature(make).bind(**kwargs)
    except TypeError as error:
        raise UsageError(
            f"rollout.environment.kwargs: {name} does not take them",
            have=f"{', '.join(kwargs) or 'none'} ({error})",
            want=f"{name}{inspect.signature(make)}",
            do="correct rollout.environment.kwargs",
        ) from error
    schemas = brought_by(make, "schemas", name, kwargs)
    tools = getattr(make, "tools", ()) if schemas is None else schemas
    if not isinstance(tools, Sequence):
        raise UsageError(
            f"the tools of {name} are no list",
            have=f"{tools!r:.200}",
            want="a list of functions",
            do="write tools = [...] into the class",
        )
    schemas = [schema_of(tool) if callable(tool) else tool for tool in tools]
    named = [schema.get("function", schema).get("name") for schema in schemas]
    twice = [each for number, each in enumerate(named) if each in named[:number]]
    if twice:
        raise UsageError(
            f"two tools of {name} have one name", have=twice[0], do="rename one of them"
        )
    return Described(schemas, None, _overrides(make, "score"), _overrides(make, "score_group"))


def _overrides(make: Any, method: str) -> bool:
    """Whether a class has a method of its own, and not that of `Environment`."""
    return getattr(make, method, None) not in (None, getattr(Environment, method))


def brought_by(
    make: Any, what: str, name: str, kwargs: Mapping[str, Any]
) -> list[Mapping[str, Any]] | None:
    """Return what a class method of `make` makes, `rows` or `schemas`, or None. Raises `UsageError` if it fails."""
    method = getattr(make, what, None)
    if method is None:
        return None
    try:
        parameters = inspect.signature(method).parameters.values()
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        names = kwargs if takes_all else {each.name for each in parameters} & kwargs.keys()
        made = method(**{key: kwargs[key] for key in names})
        return None if made is None else [*made]
    except BurnishError:
        raise
    except Exception as error:
        raise UsageError(
            f"rollout.environment: {name} cannot make its {what}",
            have=failure(error),
            do="correct the class",
        ) from error


def schema_of(tool: Callable[..., Any]) -> Mapping[str, Any]:
    """Return a function's JSON schema, as transformers writes it. Raises `UsageError` without types or a docstring."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: Mapping[str, Any] = get_json_schema(tool)
    except Exception as error:
        raise UsageError(
            f"the tool {getattr(tool, '__name__', tool)} cannot be described to the model",
            have=str(error),
            want="a type for each argument, and a docstring that describes the function and under 'Args:' each argument",
            do="add them",
        ) from error
    return schema


def serve(
    environments: dict[Key, Any],
    calls: Sequence[Call],
    make: Callable[[], Environment],
    send: Callable[[Answered], None],
    runner: asyncio.Runner,
) -> None:
    """Make calls in order, those that are coroutines at the same time, and send each answer."""
    waiting = []
    for call in calls:
        if isinstance(call, Close):
            for key in call.closed:
                if key in environments:
                    _closed(environments.pop(key), runner)
            send(Answered(call.key, None, None, 0.0))
            continue
        began = time.monotonic()
        try:
            if isinstance(call, Begin):
                environments[call.key] = make()
                result = environments[call.key].begin(call.row, call.seed)
            elif isinstance(call, Score):
                result = environments[call.key].score()
            elif isinstance(call, ScoreGroup):
                result = make().score_group(call.conversations)
            else:
                result = environments[call.key].step(call.action)
        except MemoryError:
            os._exit(errno.ENOMEM)
        except Exception as error:  # noqa: BLE001 - of a user's class
            send(_ended(call.key, None, failure(error), began))
            continue
        if inspect.isawaitable(result):
            waiting.append(_awaited(call, result, began, send))
        else:
            send(_answer(call, result, began))
    if waiting:
        runner.run(_together(waiting))


async def _together(waiting: Sequence[Any]) -> None:
    await asyncio.gather(*waiting)


async def _awaited(
    call: Asked, result: Any, began: float, send: Callable[[Answered], None]
) -> None:
    try:
        value = await result
    except Exception as error:  # noqa: BLE001 - of a user's class
        send(_ended(call.key, None, failure(error), began))
        return
    send(_answer(call, value, began))


def _answer(call: Asked, result: Any, began: float) -> Answered:
    key = call.key
    if isinstance(call, ScoreGroup):
        return _scored(call, result, began)
    try:
        if result is None and isinstance(call, Step):
            raise TypeError("`step` returned None")
        if not isinstance(result, Observation):
            is_score = isinstance(result, Mapping | float | int)
            result = Observation(rewards=result) if is_score else Observation(result or ())
        messages = _messages(result.messages)
        notes = [_note(message) for message in messages]
        observation = replace(
            result,
            messages=messages,
            rewards=_numbers(result.rewards),
            done=bool(result.done),
            metrics=_numbers(result.metrics),
            replaces_prompt=bool(result.replaces_prompt),
        )
    except Exception as error:  # noqa: BLE001 - of a user's objects
        return _ended(key, None, f"an answer that is no burnish.Observation: {error!s:.500}", began)
    return _ended(key, observation, None, began, notes)


def _scored(call: ScoreGroup, result: Any, began: float) -> Answered:
    try:
        rewards = [_numbers(values) for values in result]
    except (TypeError, ValueError) as error:
        return _ended(call.key, None, f"score_group returned no rewards: {error}", began)
    count = len(call.conversations)
    if len(rewards) != count:
        problem = f"score_group returned {len(rewards)} rewards for {count} conversations"
        return _ended(call.key, None, problem, began)
    return _ended(call.key, Observation(), None, began)._replace(rewards=rewards)


def _ended(
    key: Key,
    observation: Observation | None,
    error: str | None,
    began: float,
    notes: Sequence[Mapping[str, Any]] = (),
) -> Answered:
    seconds = time.monotonic() - began
    return Answered(key, observation, error, seconds, time.time() - seconds, notes)


def _messages(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return messages as JSON has them, with long texts cut. Raises `ValueError` or `TypeError` for anything else, and for too many."""
    plain = []
    length = 0
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(f"a message that is {message!r:.200}")
        fields = _cut(json.loads(json.dumps(dict(message), allow_nan=False)))
        if not isinstance(fields.get("role"), str) or not isinstance(
            fields.get("content"), str | list
        ):
            raise ValueError(f"a message without role or content: {fields!s:.200}")
        plain.append(fields)
        length += len(json.dumps(fields, ensure_ascii=False))
        if length > _MOST_MESSAGES * MOST_CHARACTERS:
            raise ValueError(f"more than {length} characters")
    return plain


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        # Half of a surrogate pair is no text, and no tokenizer takes it.
        return value[:MOST_CHARACTERS].encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_cut(key): _cut(each) for key, each in value.items()}
    return [_cut(each) for each in value] if isinstance(value, list) else value


def _note(message: dict[str, Any]) -> dict[str, Any]:
    """Take from a message what the model does not see."""
    kinds: dict[str, Callable[[Any], Any]] = {"is_error": bool, "began": float, "seconds": float}
    return {name: kind(message.pop(name)) for name, kind in kinds.items() if name in message}


def _numbers(values: Any) -> dict[str, float]:
    named = values if isinstance(values, Mapping) else {"reward": values}
    if len(named) > _MOST_NUMBERS:
        raise ValueError(f"more than {_MOST_NUMBERS} rewards or metrics")
    numbers = {_cut(str(name)): float(value) for name, value in named.items()}
    wrong = [
        name for name, value in numbers.items() if value != value or abs(value) == float("inf")
    ]
    if wrong:
        raise ValueError(f"{wrong[0]} is {numbers[wrong[0]]}")
    return numbers


def _closed(environment: Any, runner: asyncio.Runner) -> None:
    try:
        result = environment.close()
        if inspect.isawaitable(result):
            runner.run(_together([result]))
    except Exception as error:  # noqa: BLE001 - of a user's class
        print(f"an environment did not close: {failure(error)}", file=sys.stderr)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
