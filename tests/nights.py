"""Which cells of a matrix `make test` runs; `make nightly` runs the others."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def by_day(cases: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """The cases as parameters of a test: those in `kept` by day, the others by night. Tuples are several parameters."""
    return [case if case in kept else _by_night(case) for case in cases]


def _by_night(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)
