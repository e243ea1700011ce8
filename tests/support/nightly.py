"""Which cells of a matrix and how many examples `make test` runs; `make nightly` runs the others, and more."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
from hypothesis import settings

BY_NIGHT = 100
"""Examples of a test that asks for no number, by night."""


def by_day(cases: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """The cases as parameters of a test: those in `kept` by day, the others by night. Tuples are several parameters."""
    return [case if case in kept else _by_night(case) for case in cases]


def draws(count: int, *, day: int | None = None, **others: Any) -> settings:
    """So many examples by night; by day so many, or as large a part as of any test."""
    share = settings().max_examples
    chosen = day if day and share < BY_NIGHT else max(1, count * share // BY_NIGHT)
    return settings(max_examples=chosen, **others)


def _by_night(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)
