"""Several problems of a configuration in one error: three mistakes should take two runs of the command, not four."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.errors import BurnishError, UsageError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong; the fields are those of `BurnishError`."""

    problem: str
    """One sentence that names the setting at fault."""
    have: str
    """What was found."""
    want: str
    """What would be right."""
    do: str
    """What to do about it."""


def refusal(
    problems: Sequence[Problem], subject: str, kind: type[BurnishError] = UsageError
) -> BurnishError:
    """Return one error that lists all `problems`; a single one has no list.

    `subject` names what is refused (`rl.yaml`) in the headline.
    """
    if len(problems) == 1:
        only = problems[0]
        return kind(only.problem, have=only.have, want=only.want, do=only.do)
    lines = [f"{len(problems)} problems in {subject}"]
    for number, each in enumerate(problems, start=1):
        lines += [
            f"{number}. {each.problem}",
            f"     have: {each.have}",
            f"     want: {each.want}",
            f"     do:   {each.do}",
        ]
    return kind("\n".join(lines))


def either(numbers: Sequence[int]) -> str:
    """As 3 or 4."""
    return " or ".join(str(each) for each in numbers)
