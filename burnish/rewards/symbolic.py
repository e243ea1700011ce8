"""Mathematical equivalence by the `math-verify` package (the extra `math`).

A module of its own because importing it needs the package. Expressions can take sympy very long, so
it runs in a worker process, where it has a deadline.
"""

from __future__ import annotations

from typing import Any

from burnish.errors import UsageError, install

try:
    from math_verify import parse, verify
except ImportError as error:
    raise UsageError(
        "The reward math_verify needs a package that is not installed.",
        have=f"{error}",
        want="math-verify",
        do=install("math"),
    ) from error


def math_verify(solution_str: str, ground_truth: Any) -> float:
    """1 where the completion's final expression equals the ground truth, as math-verify sees it.

    Both in LaTeX or plain notation. An expression that math-verify cannot read within its own 5
    seconds is wrong. Raises `ValueError` for a ground truth that it cannot read.
    """
    gold = parse(rf"\boxed{{{ground_truth}}}")
    if ground_truth is None or not gold:
        raise ValueError(f"math-verify cannot read the ground truth {ground_truth!r}")
    return float(verify(gold, parse(solution_str)))
