"""Mathematical equivalence by the `math-verify` package (the extra `math`), in a worker process with a deadline."""

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
    """Return 1 if the completion's final expression equals the ground truth, as math-verify sees it.

    Both are LaTeX or plain notation. An expression that math-verify cannot read within 5 seconds is wrong. Raises `ValueError` for an
    unreadable ground truth.
    """
    gold = parse(rf"\boxed{{{ground_truth}}}")
    if ground_truth is None or not gold:
        raise ValueError(f"math-verify cannot read the ground truth {ground_truth!r}")
    return float(verify(gold, parse(solution_str)))
