"""The variables of a shell script that is read and not run, and what is not known of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from burnish.errors import BurnishError, UsageError

Value = str | list[str] | dict[str, str]
"""A text, an array, or an associative array."""
_FIRST_MARK = 0xE000
_MOST_MARKS = 0x1900
"""Characters of Unicode's private use area, each of which stands for something unknown in a text."""
_LONGEST = 100_000
"""Most characters of a value."""


class UndecidedError(BurnishError):
    """A text that is not known decides what the script does."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a character of the private use area stands for."""

    reason: str
    """Why it is not known."""
    is_unset: bool = False
    """Whether it is a variable that nothing sets, which the shell takes as empty."""
    shown: str = "…"
    """What people read in its place."""


@dataclass(slots=True)
class Variables:
    """Values by name. What the script does not set comes from the environment."""

    script: str
    environ: Mapping[str, str]
    values: dict[str, Value] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    removed: set[str] = field(default_factory=set)
    """Names of the environment that the script has unset."""
    marks: list[Mark] = field(default_factory=list)
    """Shared by all copies."""
    of_environment: set[str] = field(default_factory=set)
    """Names that were read from the environment; shared by all copies."""

    def copy(self) -> Variables:
        """Return variables of a subshell or of a branch."""
        values = {
            name: value if isinstance(value, str) else value.copy()
            for name, value in self.values.items()
        }
        return replace(self, values=values, positional=[*self.positional], removed={*self.removed})

    def get(self, name: str) -> Value | None:
        """Return the value of a variable, or None."""
        if name in self.values:
            return self.values[name]
        if name in self.environ and name not in self.removed:
            self.of_environment.add(name)
            return self.environ[name]
        return None

    def set(self, name: str, value: Value) -> None:
        """Set a variable. Raises `UsageError` for a value that no script needs."""
        if sum(map(len, [value] if isinstance(value, str) else value)) > _LONGEST:
            raise UsageError(
                f"{self.script} makes {name} too long",
                have=f"more than {_LONGEST} characters",
                do="give the arguments themselves",
            )
        self.values[name] = value

    def unset(self, name: str) -> None:
        """Forget a variable."""
        self.values.pop(name, None)
        self.removed.add(name)

    def mark(self, reason: str, *, is_unset: bool = False, shown: str = "…") -> str:
        """Return the character that stands for something unknown. The same reason has the same character."""
        mark = Mark(self.readable(reason), is_unset, shown)
        if mark not in self.marks:
            self.marks.append(mark)
        if len(self.marks) > _MOST_MARKS:
            raise UsageError(
                f"{self.script} cannot be read without running it",
                have=reason,
                do="give the arguments themselves",
            )
        return chr(_FIRST_MARK + self.marks.index(mark))

    def marks_in(self, text: str) -> list[Mark]:
        """Return what is unknown in a text."""
        places = (ord(each) - _FIRST_MARK for each in text)
        return [self.marks[place] for place in places if 0 <= place < len(self.marks)]

    def readable(self, text: str) -> str:
        """Return a text for people."""
        return "".join(marks[0].shown if (marks := self.marks_in(each)) else each for each in text)

    def known(self, text: str) -> str:
        """Return a text as the shell sees it, with nothing for what is not set. Raises `UndecidedError`."""
        for mark in self.marks_in(text):
            if not mark.is_unset:
                raise UndecidedError(mark.reason)
        return "".join(each for each in text if not self.marks_in(each))

    def merge(self, one: Variables, other: Variables, reason: str) -> None:
        """Take the values of two branches, of which only a run would tell which one is taken."""
        unknown = self.mark(reason)
        self.values = {
            name: _merged(one.values.get(name), other.values.get(name), unknown)
            for name in {**one.values, **other.values}
        }
        self.positional = [*one.positional]
        self.removed = one.removed | other.removed


def _merged(one: Value | None, other: Value | None, unknown: str) -> Value:
    if one is not None and one == other:
        return one
    if isinstance(one, list) and isinstance(other, list):
        shorter = min(one, other, key=len)
        longer = max(one, other, key=len)
        if longer[: len(shorter)] == shorter:
            return shorter + [each + unknown for each in longer[len(shorter) :]]
    return [unknown] if isinstance(one or other, list) else unknown
