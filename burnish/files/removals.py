"""Removing many things where one that stays must not keep the others, nor end what somebody is doing.

A disk may refuse to let go of what is no longer wanted: an error of its own, an attribute that
forbids it, a file that a network mount keeps while somebody has it open. Nothing is lost by that
but room, so it is told when all has been tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

from burnish.errors import BurnishError, few


class NotRemovedError(BurnishError):
    """What is no longer wanted is still there, and nothing else is wrong."""


class Removals:
    """Removals below a directory, each inside `trying`; then `check` or `error`."""

    def __init__(self, root: PurePath) -> None:
        self._root = root
        self._failed: list[str] = []

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Note what the system refuses inside the block, and go on after it."""
        try:
            yield
        except OSError as error:
            self._failed.append(str(error))

    def check(self) -> None:
        """Raise what `error` says, if anything."""
        if (error := self.error()) is not None:
            raise error

    def error(self) -> NotRemovedError | None:
        """Names what was refused; None where nothing was."""
        if not self._failed:
            return None
        return NotRemovedError(
            f"not all that is no longer wanted in {self._root} could be removed",
            have=few(self._failed),
            want="its room on the disk back",
            do="see that this user may remove it and that nobody has it open; the next start and "
            "burnish ckpt gc try again",
        )
