"""Text on standard output: numbers, columns, and a reader who may stop before its end."""

from __future__ import annotations

import os
import sys


def print_text(text: str) -> None:
    """Print to standard output. Ends the command where whoever was reading, as `head`, has seen enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def bytes_text(size: float) -> str:
    """Return bytes in the unit that leaves one to three digits before the point: "12.3 MB"."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min((len(str(int(size))) - 1) // 3, len(units) - 1)
    return f"{size / 1000**power:.{1 if power else 0}f} {units[power]}"


def count_text(number: int, noun: str) -> str:
    """Return a number and its noun: "1 step", "2 steps"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
