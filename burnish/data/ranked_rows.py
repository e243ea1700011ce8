"""Ranked lists of answers as rows of pairs."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from burnish.config.preferences import SCORES, PairSettings
from burnish.data.columns import Row
from burnish.data.preference_columns import ranking_column
from burnish.data.sources import Rows
from burnish.errors import UsageError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RankedRows(Rows):
    """Rows with a list of answers and their scores or ranks, as one row for each pair of answers that differ in it.

    A row has the list's other columns, and the columns of the chosen and of the rejected answer and of their scores. A rank's score is
    its negative.
    """

    lists: Rows = field(kw_only=True)
    """The rows with lists."""
    settings: PairSettings = field(kw_only=True)
    pairs: npt.NDArray[np.int64] = field(kw_only=True)
    """[P, 3] the list's row, and the places of the chosen and of the rejected answer in it."""

    @classmethod
    def of(cls, rows: Rows, settings: PairSettings) -> Rows:
        """Return the pairs of ranked lists; the rows themselves if they have none. Raises `UsageError` for lists that do not fit."""
        answers = settings.completions_column
        ranking = ranking_column(rows, settings)
        if ranking is None or any(map(rows.has, settings.sides)):
            return rows
        if rows.is_streamed:
            raise UsageError(
                "ranked lists cannot be streamed",
                have=f"the columns {answers} and {ranking}",
                want="pairs, or rows that are read before training",
                do="remove data.streaming",
            )
        pairs = []
        without = []
        for index, (own, numbers) in enumerate(
            zip(rows.column(answers), rows.column(ranking), strict=True)
        ):
            scores = _scores(own, numbers, rows.where(index), (answers, ranking))
            if ranking == settings.ranks_column:
                scores = [-score for score in scores]
            unequal = [
                (index, *sorted(places, key=lambda place: -scores[place]))
                for places in combinations(range(len(scores)), 2)
                if scores[places[0]] != scores[places[1]]
            ]
            pairs += unequal
            without += [] if unequal else [index]
        if without:
            name = rows.where(without[0])
            _log.warning(
                "dropped %d rows whose answers do not differ in %s, such as %s",
                len(without),
                ranking,
                name,
            )
        if not pairs:
            raise UsageError(
                f"no answers of {rows.files[0]} differ in {ranking}",
                want="lists of at least two answers, of which some are better",
                do=f"correct the column {ranking}",
            )
        array = np.array(pairs, np.int64)
        digest = xxhash.xxh3_128_hexdigest(array.tobytes())
        return cls(
            rows.table,
            rows.files,
            (),
            f"{rows.digest} {digest}",
            lists=rows,
            settings=settings,
            pairs=array,
            has_share=rows.has_share,
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def span(self, start: int, stop: int) -> list[Row]:
        """See `Rows.span`."""
        rows = []
        for index, chosen, rejected in self.pairs[start:stop].tolist():
            row = self.lists[index]
            answers = row.pop(self.settings.completions_column)
            scores = row.pop(self.settings.scores_column, None)
            ranks = row.pop(self.settings.ranks_column, None)
            scores = [-rank for rank in ranks] if scores is None else scores
            row.update(zip(self.settings.sides, (answers[chosen], answers[rejected]), strict=True))
            row.update(zip(SCORES[0], (scores[chosen], scores[rejected]), strict=True))
            rows.append(row)
        return rows

    @property
    def columns(self) -> list[str]:
        """See `Rows.columns`."""
        return list(self.span(0, 1)[0])

    def column(self, name: str) -> list[Any]:
        """See `Rows.column`."""
        return [row.get(name) for row in self.span(0, len(self))]

    def where(self, index: int) -> str:
        """See `Rows.where`."""
        row, chosen, rejected = self.pairs[index].tolist()
        return f"{self.lists.where(row)}, answers {chosen} and {rejected},"


def _scores(answers: Any, numbers: Any, name: str, columns: tuple[str, str]) -> list[float]:
    """Return the numbers of a list. Raises `UsageError` unless each answer has one."""
    if (
        isinstance(answers, list)
        and isinstance(numbers, Sequence)
        and len(answers) == len(numbers)
        and all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    ):
        return [float(number) for number in numbers]
    raise UsageError(
        f"{name} is no ranked list",
        have=f"{answers!s:.60} and {numbers!s:.60}",
        want=f"a list of answers in {columns[0]}, and a number for each in {columns[1]}",
        do="correct the row",
    )
