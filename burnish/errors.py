"""Errors for people, and the exit code of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from burnish.redaction import in_one_line, redacted

_SHOWN = 5


class BurnishError(Exception):
    """The base of all errors that Burnish raises on purpose.

    `problem` is a sentence that names the thing at fault. `have`, `want` and `do` are phrases.
    """

    exit_code = 1
    printed_by_main = False
    """Whether only rank 0 prints it, because every rank raises it or another rank prints its own error."""

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
        """Return the parts as text, by name."""
        have, want = (None if part is None else str(part) for part in (self.have, self.want))
        return {"problem": self.problem, "have": have, "want": want, "do": self.do}

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the parts as text: not every library's exception can be pickled."""
        problem, have, want, do = self.parts().values()
        return partial(type(self), have=have, want=want, do=do), (problem,)


class UsageError(BurnishError):
    """Command line, configuration or data cannot be used."""

    exit_code = 2


class CorruptError(BurnishError):
    """A file is truncated or altered."""

    exit_code = 3


class IncompatibleError(BurnishError):
    """Two things do not fit, such as a model and a checkpoint."""

    exit_code = 4


class MissingError(BurnishError):
    """A file, directory, tensor or column is missing."""

    exit_code = 5


class StoppedError(BurnishError):
    """A signal stopped the run after a committed checkpoint; all ranks raise it.

    `exit_code` is 128 + the signal's number.
    """

    printed_by_main = True

    def __init__(self, problem: str, *, signal_number: int) -> None:
        super().__init__(problem)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number

    def __reduce__(self) -> tuple[object, ...]:
        return partial(StoppedError, self.problem, signal_number=self.signal_number), ()


@contextmanager
def of_setting(name: str) -> Iterator[None]:
    """Begin errors of the block with a setting's name."""
    try:
        yield
    except BurnishError as error:
        problem = f"{name}: {error.problem}"
        raise type(error)(problem, have=error.have, want=error.want, do=error.do) from error


@contextmanager
def refusing(
    problem: str, kind: type[BurnishError] = UsageError, *, want: str | None = None, do: str
) -> Iterator[None]:
    """Raise a `kind` for any error of another library in the block."""
    try:
        yield
    except BurnishError:
        raise
    except Exception as error:
        have = f"{type(error).__name__}: {whole_sentences(redacted(str(error)))}"
        raise kind(problem, have=have, want=want, do=do) from error


def whole_sentences(text: str, most: int = 300) -> str:
    """Return a text in one line, of whole sentences if it is too long, or else of whole words."""
    text = " ".join(text.split())
    if len(text) <= most:
        return text
    sentences = text[:most].rpartition(". ")[0]
    return f"{sentences}." if sentences else f"{text[:most].rpartition(' ')[0]} ..."


def together(errors: Sequence[BurnishError], subject: str) -> BurnishError:
    """Return one error that lists all, of their common class, or else a `UsageError`.

    `subject` names the thing with the problems (`rl.yaml`). Equal ones are one.
    """
    errors = [*{str(error): error for error in errors}.values()]
    if len(errors) == 1:
        return errors[0]
    lines = [f"{len(errors)} problems in {subject}"]
    for number, error in enumerate(errors, start=1):
        lines.append(f"{number}. {error}".replace("\n", "\n   "))
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else UsageError
    return kind("\n".join(lines))


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install -e ".[{extra}]" in your clone of Burnish'


def few(names: Sequence[str]) -> str:
    """Return the first names and the number of others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def count_text(number: int, noun: str) -> str:
    """Return a number and its noun: "1 step", "2 steps"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def bytes_text(size: float) -> str:
    """Return bytes with one to three digits before the point: "12.3 MB"."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min((len(str(int(size))) - 1) // 3, len(units) - 1)
    return f"{size / 1000**power:.{1 if power else 0}f} {units[power]}"


def neighbours(path: Path) -> str:
    """Return the names beside a missing path, or the most similar of many."""
    folder = next((each for each in (path, *path.parents) if each.exists()), Path())
    if not folder.is_dir():
        return f"{folder}, which is a file"
    if folder == path:
        return "a directory without data"
    missing = path.relative_to(folder).parts[0]
    names = sorted(each.name for each in folder.iterdir())
    near = names
    if len(names) > _SHOWN and (near := get_close_matches(missing, names, n=len(names))):
        near = list(dict.fromkeys([*near[:2], max(near)]))
    return f"no {missing} in {folder}, but {', '.join(near) or f'{len(names)} other entries'}"


def table(rows: Sequence[Sequence[str]], right: int = 0) -> Iterator[str]:
    """Yield aligned lines of `rows`; the first `right` columns are right-aligned."""
    rows = [[in_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index < right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
