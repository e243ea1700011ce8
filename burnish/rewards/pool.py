"""The reward of rollouts: call every configured function, weight and add the values.

An error in a function is recorded for its rollout and does not end the run. `exact_match` and `numeric` run in this process, all
others in `burnish.rewards.workers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from burnish.config.schema import RewardConfig, RewardFunctionConfig
from burnish.errors import MissingError, UsageError
from burnish.functions import load_function
from burnish.records import Rollout
from burnish.rewards.arguments import arguments
from burnish.rewards.asked import Call
from burnish.rewards.call import Answer, call
from burnish.rewards.load import BUILTINS, Signature, read_signature
from burnish.rewards.worker import Pace
from burnish.rewards.workers import Check, Workers

ALWAYS_END = frozenset({"exact_match", "numeric"})
"""Built-in functions that need no deadline. A regular expression can backtrack for ever, and sympy think."""


@dataclass(frozen=True, slots=True)
class _Function:
    part: str
    """Its name in `Rollout.reward_parts`."""
    config: RewardFunctionConfig
    signature: Signature
    here: Callable[..., Any] | None
    """The function itself, where it is called in this process."""
    worker_index: int
    """Its index among the workers' functions, where it is not."""


class RewardPool:
    """Scores rollouts with the functions of a configuration. A context manager; `close` ends its processes."""

    def __init__(self, config: RewardConfig) -> None:
        """Load every function. Raises `UsageError` for one that cannot be used, before anything is generated."""
        if not config.given:
            raise UsageError(
                "No reward function is configured.",
                have="reward.functions: []",
                want="at least one",
                do="reward.functions: [{function: exact_match}]",
            )
        self._config = config
        away = [f for f in config.functions if f.function not in ALWAYS_END]
        loaded = {
            f.function: load_function(f.function, "reward.functions", BUILTINS)
            for f in config.functions
            if f.function in ALWAYS_END
        }
        signatures = [
            read_signature(f.function, loaded[f.function], f.kwargs)
            if f.function in loaded
            else None
            for f in config.functions
        ]
        self._workers: Workers | None = None
        if away:
            named = [(f.function, f.kwargs) for f in away]
            self._workers = Workers(
                named, config.workers, Pace(config.concurrency, config.timeout_seconds)
            )
        remote = iter(enumerate(self._workers.signatures if self._workers else ()))
        self._functions = []
        for part, each, signature in zip(
            config.part_names[: len(config.functions)], config.functions, signatures, strict=True
        ):
            index, known = (-1, signature) if signature else next(remote)
            here = loaded.get(each.function)
            self._functions.append(_Function(part, each, known, here, index))

    def check_columns(self, columns: Collection[str], setting: str) -> None:
        """Raise `MissingError` if `columns` lack one that a function requires; `setting` names the data."""
        for function in self._functions:
            for column in sorted(function.signature.columns - set(columns)):
                raise MissingError(
                    f"The reward function {function.config.function!r} needs a column that {setting} lacks.",
                    have=f"columns {sorted(columns)}",
                    want=column,
                    do="rename the parameter or the column, or give a value in the function's kwargs",
                )

    def score(self, rollouts: Sequence[Rollout], check: Check = lambda: None) -> list[Rollout]:
        """Return the rollouts, in order, with `reward`, `reward_parts` and `reward_error`.

        A failure counts as `on_error`. A TRL function's None takes no part in the reward; None from all is a failure. Further numbers of a
        verl function are parts named FUNCTION/NAME, shown and not added. The order of answers does not matter. `check` is called at
        least each second while functions run in other processes; what it raises is raised here.
        """
        said: list[dict[str, Answer]] = [{} for _ in rollouts]
        calls: list[Call] = []
        places: list[tuple[_Function, Sequence[int]]] = []
        for function in self._functions:
            for members in _members(function, len(rollouts)):
                given = arguments(
                    function.signature, function.config.kwargs, [rollouts[i] for i in members]
                )
                if function.here is not None:
                    answers = call(function.here, function.signature.style, given, len(members))
                    _note(said, function, members, answers)
                else:
                    calls.append(Call(function.worker_index, given, len(members)))
                    places.append((function, members))
        if self._workers and calls:
            for (function, members), answers in zip(
                places, self._workers.run(calls, check), strict=True
            ):
                _note(said, function, members, answers)
        return [self._scored(*pair) for pair in zip(rollouts, said, strict=True)]

    def close(self) -> None:
        """End the worker processes."""
        if self._workers:
            self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scored(self, rollout: Rollout, said: Mapping[str, Answer]) -> Rollout:
        reward, parts, errors = 0.0, {}, []
        for function in self._functions:
            answer = said[function.part]
            value = answer.value
            if answer.error is not None:
                errors.append(f"{function.part}: {answer.error}")
                value = self._config.on_error
            if value is not None:
                parts[function.part] = value
                reward += function.config.weight * value
            parts |= {f"{function.part}/{name}": x for name, x in answer.extras.items()}
        if self._functions and not parts and not self._config.models:
            errors.append("every reward function answered None")
            reward = self._config.on_error
        error = "; ".join(errors) or None
        return replace(rollout, reward=reward, reward_parts=parts, reward_error=error)


def _members(function: _Function, count: int) -> Iterator[Sequence[int]]:
    """Return the rollouts of each call: one, or for a TRL function all or as many as configured."""
    size = 1 if function.signature.style == "verl" else function.config.per_call or max(count, 1)
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def _note(
    said: list[dict[str, Answer]],
    function: _Function,
    members: Sequence[int],
    answers: Sequence[Answer],
) -> None:
    for i, answer in zip(members, answers, strict=True):
        said[i][function.part] = answer
