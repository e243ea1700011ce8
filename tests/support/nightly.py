"""Which cells of a matrix and how many examples `make test` runs; `make nightly` runs the others, and more."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
from hypothesis import settings


def by_day(cases: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """The cases as parameters of a test: those in `kept` by day, the others by night. Tuples are several parameters."""
    return [case if case in kept else _by_night(case) for case in cases]


def draws(count: int, **others: Any) -> settings:
    """So many examples by night, and as large a part of them by day as of any test."""
    return settings(max_examples=max(1, count * settings().max_examples // 100), **others)


def _by_night(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)
