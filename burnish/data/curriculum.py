"""Read the column of numbers by which `data.curriculum` orders rows."""

from __future__ import annotations

import numpy as np

from burnish.data.loader import Difficulty
from burnish.data.sources import Rows
from burnish.errors import UsageError


def difficulties(rows: Rows, curriculum: str) -> Difficulty:
    """Return each row's number, [len(rows)], with its sign changed if a minus stands before the column's name.

    Raises `MissingError` for a missing column, and `UsageError` for other values than numbers.
    """
    name = curriculum.removeprefix("-")
    if name not in rows.columns:
        raise rows.missing([name], "data.curriculum")
    try:
        numbers = np.asarray(rows.column(name), dtype=np.float64).reshape(len(rows))
    except (TypeError, ValueError):
        numbers = np.full(len(rows), np.nan)
    if np.isnan(numbers).any():
        raise UsageError(
            "the column of data.curriculum does not hold numbers",
            have=f"{rows[int(np.flatnonzero(np.isnan(numbers))[0])][name]!r} in {name}",
            want="a number in every row",
            do="correct the rows, or name another column",
        )
    return numbers * (1.0 if name == curriculum else -1.0)
