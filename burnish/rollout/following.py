"""Feed a running generation with requests that follow from the completions that have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from burnish.records import Completion, Request
from burnish.rollout.base import Follow

if TYPE_CHECKING:
    from burnish.rollout.running import Running

R = TypeVar("R", bound="Running")


class Following(Generic[R]):
    """Tells a `Follow` what has ended, and begins what it asks for."""

    def __init__(
        self,
        follow: Follow,
        begun: list[tuple[Request, list[R], float]],
        begin: Callable[[Sequence[Request]], list[R]],
        completed: Callable[[Sequence[R], float], list[Completion]],
    ) -> None:
        """`begun` has each request with its completions and its time; `begin` appends to it."""
        self._follow = follow
        self._begun = begun
        self._begin = begin
        self._completed = completed
        self._open: list[tuple[Request, R, float]] = []
        self._seen = 0

    def __call__(self, idle: bool) -> list[R]:
        """Return new completions; none if `idle` ends the generation."""
        for request, group, asked in self._begun[self._seen :]:
            for number, running in enumerate(group):
                alone = replace(request, samples=1, first_sample=request.first_sample + number)
                self._open.append((alone, running, asked))
        self._seen = len(self._begun)
        ended = [each for each in self._open if each[1].reason is not None]
        if ended:
            self._open = [each for each in self._open if each[1].reason is None]
        pairs = [(request, self._completed([r], asked)[0]) for request, r, asked in ended]
        return self._begin(self._follow(pairs, idle))
