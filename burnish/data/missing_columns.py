"""Say which column is missing, and which one may be meant. Only errors load this."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from burnish.errors import MissingError


def missing_columns(
    columns: Sequence[str],
    files: str,
    names: Sequence[str],
    setting: str,
    others: Sequence[str] = (),
) -> MissingError:
    """Return the error for rows of `files` that have `columns`, and none of `names`. `others` may have what they hold."""
    near = [match for name in names for match in get_close_matches(name, columns, n=1)]
    near += [name for name in others if name in columns]
    guess = f"did you mean {near[0]!r}? " if near else ""
    several = " " in setting
    do = f"Set {setting}={near[0]}" if near and not several else f"name the column in {setting}"
    return MissingError(
        f"no column {' or '.join(map(repr, names))} in {files}",
        have="columns " + ", ".join(columns),
        want=f"{setting}: an existing column",
        do=f"{guess}{do}",
    )
