"""Hold the arguments of another framework, and give each of them one fate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.config.document import one_line
from burnish.errors import UsageError

_LARGEST = 1e15


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one argument, or of several that mean something together."""

    names: tuple[str, ...]
    settings: Mapping[str, Any] | None = None
    """The settings here that say the same, or an empty mapping if Burnish does that anyway; None if there are none."""
    reason: str = ""
    """Why there are none."""
    is_open: bool = False
    """Whether a person has to decide, because Burnish has the setting and the meaning differs or is unknown."""


@dataclass(slots=True)
class Arguments:
    """Arguments of another framework by name, as they were given.

    An argument has no fate until `carry`, `drop` or `leave` gives it one, and then keeps it. So none can vanish. An *ending* is
    the last parts of a name, such as `max_steps` or `kl_ctrl.kl_coef`; it means the first argument with it that has no fate.
    """

    given: Mapping[str, Any]
    """Values by name."""
    program: tuple[str, ...] = ()
    """The words before the first argument, such as `trl grpo`."""
    strays: frozenset[str] = frozenset()
    """Words after the program that are no argument. They stand among the given ones, as names without a value."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Arguments whose value only a run would tell, and the reason."""
    source: str = ""
    """The file and line that they stand in, if that is a script."""
    doubt: str = ""
    """Why only a run would tell whether their program is started."""
    fates: list[Fate] = field(default_factory=list)
    """In the order of the decisions."""
    implied: dict[str, Any] = field(default_factory=dict)
    """What the framework does without being told, by the names of its own arguments."""
    remarks: list[str] = field(default_factory=list)
    """Sentences for the person who reads the result."""

    def imply(self, defaults: Mapping[str, Any]) -> None:
        """Add the framework's defaults, where the argument is not given."""
        self.implied |= {name: value for name, value in defaults.items() if name not in self.given}

    @property
    def unsettled(self) -> dict[str, Any]:
        """Arguments without a fate, the given ones first."""
        values = {**self.given, **self.implied}
        settled = {name for fate in self.fates for name in fate.names}
        return {name: value for name, value in values.items() if name not in settled}

    def name_of(self, ending: str) -> str | None:
        """Return the name of the first argument with an ending, or None."""
        return next((name for name in self.unsettled if f".{name}".endswith(f".{ending}")), None)

    def look_up(self, ending: str) -> Any:
        """Return the value of the first argument with an ending, or None."""
        name = self.name_of(ending)
        return None if name is None else self.unsettled[name]

    def number(self, ending: str) -> Any:
        """Return the number with an ending, or None. Raises `UsageError` for anything else."""
        value = self.look_up(ending)
        is_number = isinstance(value, int | float) and abs(value) < _LARGEST
        if value is not None and not is_number:
            name = self.name_of(ending)
            raise UsageError(
                f"{name} is not a number",
                have=one_line(value),
                want="a number",
                do=f"correct {name}",
            )
        return value

    def carry(self, settings: Mapping[str, Any], *endings: str) -> None:
        """Say that arguments mean settings together; none if Burnish does that anyway."""
        self._settle(endings, settings=settings)

    def drop(self, reason: str, *endings: str) -> None:
        """Say why arguments have no counterpart."""
        self._settle(endings, reason=reason)

    def leave(self, reason: str, *endings: str) -> None:
        """Say what a person has to decide about arguments."""
        self._settle(endings, reason=reason, is_open=True)

    def _settle(self, endings: Sequence[str], **fate: Any) -> None:
        names = tuple(name for name in map(self.name_of, endings) if name is not None)
        if names:
            self.fates.append(Fate(names, **fate))
