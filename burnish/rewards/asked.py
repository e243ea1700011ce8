"""The calls of reward functions that belong together: waiting ones, answers, and functions that hang."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from burnish.rewards.call import Answer
from burnish.rewards.load import Signature

Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one function."""

    function: int
    """Its index among the workers' functions."""
    arguments: Mapping[str, Any]
    """Its keyword arguments."""
    count: int
    """How many rollouts it is about."""


Bundle = Sequence[int]
"""Calls of one function that a worker gets together, by their indices."""


class Calls:
    """Calls on their way to answers. They are named by their indices in `asked`."""

    waiting: deque[Bundle]
    """What is handed to a worker at a time: the calls of an async function, or one of another."""

    def __init__(self, asked: Sequence[Call], signatures: Sequence[Signature]) -> None:
        """`signatures` are those of the functions, by index."""
        self.asked = asked
        self._answers: dict[int, list[Answer]] = {}
        self._missed: defaultdict[int, Fraction] = defaultdict(Fraction)
        together: defaultdict[int, list[int]] = defaultdict(list)
        alone: list[Bundle] = []
        for i, call in enumerate(asked):
            if signatures[call.function].is_async:
                together[call.function].append(i)
            else:
                alone.append([i])
        self.waiting = deque([*map(_mixed, together.values()), *_mixed(alone)])

    @property
    def answered(self) -> bool:
        """Whether every call has its answers."""
        return len(self._answers) == len(self.asked)

    @property
    def answers(self) -> list[list[Answer]]:
        """The answers to each call, in the order of `asked`."""
        return [self._answers[i] for i in range(len(self.asked))]

    def answer(self, index: int, answers: list[Answer]) -> None:
        """A call has ended, so its function does not hang."""
        self._answers[index] = answers
        self._missed.pop(self.asked[index].function, None)

    def fail(self, indices: Collection[int], error: str) -> None:
        """These calls have no answer, for this reason."""
        for i in indices:
            count = self.asked[i].count
            text = error if count == 1 else f"{error} for {count} completions"
            self._answers[i] = [Answer(None, text)] * count

    def miss(self, function: int, share: Fraction) -> None:
        """Note a missed deadline, as this share of a function's concurrent calls."""
        self._missed[function] += share

    def put_back(self, function: int, indices: Collection[int]) -> None:
        """These calls of one function wait again."""
        if indices:
            self.waiting.appendleft(_mixed(sorted(indices)))

    def hanging(self, borne: Fraction) -> set[int]:
        """The functions that were waited for in vain for `borne` deadlines on end."""
        return {function for function, missed in self._missed.items() if missed >= borne}

    def refuse(self, functions: Collection[int], error: str) -> None:
        """The calls of these functions that wait have failed, for this reason."""
        for bundle in [b for b in self.waiting if self.asked[b[0]].function in functions]:
            self.waiting.remove(bundle)
            self.fail(bundle, error)


def _mixed(things: Sequence[Thing]) -> list[Thing]:
    """Shuffle, so that calls that hang, such as all samples of one prompt, do not come in a row."""
    return random.Random(0).sample(things, len(things))
