"""Find the columns of preferences. Imports neither `datasets` nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burnish.config.preferences import SCORES, PairSettings
from burnish.config.schema import DataConfig
from burnish.data.columns import PROMPT_COLUMNS, first_present
from burnish.errors import UsageError

if TYPE_CHECKING:
    from burnish.data.sources import Rows


_LABELS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": -1.0, "0": -1.0, "0.0": -1.0}
"""Labels that say yes or no, by their text."""


def ranking_column(rows: Rows, settings: PairSettings) -> str | None:
    """Return the column that ranks lists of answers; None if the rows have none."""
    has_lists = rows.has(settings.completions_column)
    return (
        first_present((settings.scores_column, settings.ranks_column), rows) if has_lists else None
    )


def answer_columns(data: DataConfig, rows: Rows, settings: PairSettings) -> tuple[str, ...]:
    """Return the columns of a row's answers: of both sides, of the one that has a label, or of a ranked list. Raises `MissingError` without them."""
    completion = data.completion_column or "completion"
    if not all(map(rows.has, settings.sides)):
        if rows.has(completion) and rows.has(settings.label_column):
            return (completion,)
        if ranking_column(rows, settings):
            return (settings.completions_column,)
    preference_prompt_column(data, rows, settings.sides)
    return settings.sides


def preference_prompt_column(data: DataConfig, rows: Rows, answers: tuple[str, ...]) -> str | None:
    """Return the prompt column of preferences: the chosen one, else the first usual one; None if the answers are whole conversations.

    Raises `MissingError` without the columns `answers`.
    """
    missing = [name for name in answers if not rows.has(name)]
    if missing:
        raise rows.missing(missing, "method.chosen_column and method.rejected_column")
    if data.prompt_column and not rows.has(data.prompt_column):
        raise rows.missing((data.prompt_column,), "data.prompt_column")
    return data.prompt_column or first_present(PROMPT_COLUMNS, rows)


def margin_columns(rows: Rows, settings: PairSettings) -> tuple[str, ...]:
    """Return the column of margins, those of scores, or none. Raises `MissingError` without scores where margins come from them."""
    if settings.is_of_answers:
        return ()
    if not settings.margin_per_score:
        return (settings.margin_column,) if rows.has(settings.margin_column) else ()
    for names in SCORES:
        if all(map(rows.has, names)):
            return names
    raise rows.missing(SCORES[0], "method.margin_per_score")


def label_of(value: Any, row: str, column: str, setting: str, what: str) -> float:
    """Return 1 for a label that says yes, -1 for no. Raises `UsageError`, which names row, column and setting: it does not say whether `what`."""
    label = _LABELS.get(str(value).strip().lower())
    if label is None:
        raise UsageError(
            f"{row} does not say whether {what}",
            have=f"{value!r:.60} in the column {column}",
            want="true or false, 1 or 0",
            do=f"correct the row, or name another column in {setting}",
        )
    return label
