"""The output of a `burnish ckpt` command: lines for people, one object for programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from burnish.errors import BurnishError

Say = Callable[[str], None]
"""Prints a line for people; does nothing where JSON was asked for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    report: dict[str, Any]
    """What it found or did, as plain values."""
    error: BurnishError | None = None
    """What it ends with; None where all is well."""

    def as_json(self) -> dict[str, Any]:
        """The report, with the error beside it where there is one."""
        if self.error is None:
            return self.report
        return self.report | {"error": self.error.parts() | {"exit_code": self.error.exit_code}}
