"""The errors a person meets, and the exit code each one ends a command with.

Every error says what was found (``have``), what was wanted (``want``) and what to do (``do``), so
that the message alone is enough to act on. Left out: wrapping of library errors that already say
these things.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 5


class BurnishError(Exception):
    """Something a person has to know about; the base of all errors Burnish raises on purpose.

    ``problem`` is one sentence that names the thing at fault. ``have``, ``want`` and ``do`` are
    short phrases printed on lines of their own.
    """

    exit_code = 1
    told_elsewhere = False
    """Whether another rank raises the same and says so: then only the main rank says it too."""

    def __init__(
        self,
        problem: str,
        *,
        have: object = None,
        want: object = None,
        do: str | None = None,
    ) -> None:
        self.problem = problem
        self.have = have
        self.want = want
        self.do = do
        lines = [problem]
        lines += [f"  have: {have}"] if have is not None else []
        lines += [f"  want: {want}"] if want is not None else []
        lines += [f"  do:   {do}"] if do is not None else []
        super().__init__("\n".join(lines))

    def parts(self) -> dict[str, str | None]:
        """What it says, by name, as text."""
        have, want = (None if part is None else str(part) for part in (self.have, self.want))
        return {"problem": self.problem, "have": have, "want": want, "do": self.do}

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the parts when the error crosses a process boundary, as text: not every library's exception can."""
        return (_rebuild, (type(self), *self.parts().values()))


def _rebuild(
    kind: type[BurnishError], problem: str, have: object, want: object, do: str | None
) -> BurnishError:
    return kind(problem, have=have, want=want, do=do)


class UsageError(BurnishError):
    """The command line, the configuration or the data given is not usable as it stands."""

    exit_code = 2


class CorruptError(BurnishError):
    """A file is not what was once written: truncated, flipped, forged or half there."""

    exit_code = 3


class IncompatibleError(BurnishError):
    """Two good things that do not fit: a model and a checkpoint, a run and a configuration."""

    exit_code = 4


class MissingError(BurnishError):
    """A file, directory, tensor or column that has to be there is not."""

    exit_code = 5


class StoppedError(BurnishError):
    """The run was asked to stop by a signal and left a committed checkpoint; all ranks raise it.

    ``exit_code`` is 128 + the signal's number, as shells report it.
    """

    told_elsewhere = True

    def __init__(self, problem: str, *, signal_number: int) -> None:
        super().__init__(problem)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the signal when the error crosses a process boundary."""
        return (_rebuild_stopped, (self.problem, self.signal_number))


def _rebuild_stopped(problem: str, signal_number: int) -> StoppedError:
    return StoppedError(problem, signal_number=signal_number)


def install(extra: str) -> str:
    """What to do where a package of one of Burnish's extras (`pyproject.toml`) is missing."""
    return f'pip install -e ".[{extra}]" in your clone of Burnish'


def few(names: Sequence[str]) -> str:
    """The first of the names and how many more there are, for a message; "" for none."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
