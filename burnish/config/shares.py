"""Read settings that may count in shares or epochs: `10%` of all steps, `5%` of the rows, `1/4 epoch`."""

from __future__ import annotations

import math
from fractions import Fraction


def exact_part(setting: int | str, total: int) -> Fraction:
    """Return a number of steps or rows; a text such as "10%" is a share of `total`."""
    if isinstance(setting, int):
        return Fraction(setting)
    return Fraction(setting.removesuffix("%")) / 100 * total


def part_of(setting: int | str, total: int) -> int:
    """Return `exact_part`, rounded up, as transformers does."""
    return math.ceil(exact_part(setting, total))


def steps_between(every: int | str, epoch_steps: Fraction) -> Fraction:
    """Return an interval in steps; "1/4 epoch" is a part of the `epoch_steps` of an epoch."""
    if isinstance(every, int):
        return Fraction(every)
    return Fraction(every.split()[0]) * epoch_steps


def every_text(every: int | str) -> str:
    """Return an interval in words."""
    return f"every {every} steps" if isinstance(every, int) else f"every {every}"
