"""Environments that cannot be used, by what is wrong with them."""

from __future__ import annotations

import burnish


def look(where: str) -> str:
    """Look.

    Args:
        where: At what.
    """
    return where


class Looking(burnish.Environment):
    """Can be used."""

    tools = (look,)


class OneTool(burnish.Environment):
    """Its tools are no list."""

    tools = look


class SameTools(burnish.Environment):
    """Two of its tools have one name."""

    tools = (look, look)


class Raising(burnish.Environment):
    """Cannot begin with this row."""

    def begin(self, row, seed):
        """Read a column that the row lacks."""
        return row["picture"]


class Unmade(burnish.Environment):
    """Its constructor raises."""

    def __init__(self) -> None:
        raise ValueError("no licence")


class Mute(burnish.Environment):
    """Begins with what is no message."""

    def begin(self, row, seed):
        """Return a text."""
        return ["hello"]


class Dying(burnish.Environment):
    """Ends its process."""

    def begin(self, row, seed):
        """Exit."""
        raise SystemExit(3)


class Rowless(burnish.Environment):
    """Brings rows without prompts."""

    @classmethod
    def rows(cls):
        """Yield one."""
        yield {"level": 3}
