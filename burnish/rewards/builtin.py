"""Built-in rewards in verl's signature, and answers for votes.

A ground truth is one right answer or several: a list, a tuple or an array, of which any counts. Raises `ValueError` for a row without
a usable one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from typing import Any

from burnish.rewards.numerals import last_number

_BOXED = r"\boxed{"
_MARK = "####"
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,4})(?![\w.])")


def exact_match(solution_str: str, ground_truth: Any, *, ignore_case: bool = False) -> float:
    """Return 1 if the stripped completion is a right answer."""
    answer = solution_str.strip()
    right_answers = [text.strip() for text in _texts(ground_truth)]
    if ignore_case:
        return float(answer.casefold() in {text.casefold() for text in right_answers})
    return float(answer in right_answers)


def numeric(
    solution_str: str, ground_truth: Any, *, rel_tol: float = 0.0, abs_tol: float = 0.0
) -> float:
    r"""Return 1 if the completion's number is that of a right answer.

    The number is what the last `\boxed{...}` holds, else the text after the last `####`, else the last number of the text. See
    `burnish.rewards.numerals`. A completion without one gets 0; a right answer without one raises `ValueError`. Numbers are compared
    exactly, or with `math.isclose`'s tolerances: relative to the larger number, and absolute.
    """
    if not (rel_tol >= 0 and abs_tol >= 0):
        raise ValueError(f"rel_tol={rel_tol} and abs_tol={abs_tol} must be at least 0")
    answer = _number(solution_str)
    is_right = False
    for text in _texts(ground_truth):
        right_number = _number(text)
        if right_number is None:
            raise ValueError(f"the ground truth {ground_truth!r} holds no number: {text!r}")
        if answer is not None:
            largest = max(abs(answer), abs(right_number))
            allowed = max(Fraction(rel_tol) * largest, Fraction(abs_tol))
            is_right = is_right or abs(answer - right_number) <= allowed
    return float(is_right)


def regex(solution_str: str, *, pattern: str, full: bool = True) -> float:
    """Return 1 if `pattern` matches the whole completion, or without `full` any part. Flags go inside: `(?s)`."""
    match = re.fullmatch if full else re.search
    return float(match(pattern, solution_str) is not None)


def math_verify(
    solution_str: str,
    ground_truth: Any,
    *,
    float_rounding: int = 12,
    numeric_precision: int = 30,
    strict: bool = True,
) -> float:
    """Return 1 if math-verify (extra `math`) finds the final expression equal to a right answer.

    Both are LaTeX or plain. The keywords are those of `math_verify.verify`, whose own defaults of 6 and 15 make 0.0000001 equal to
    0.0000003. Numbers must also agree in `float_rounding` significant digits. An expression that takes over 5 seconds to parse is
    wrong.
    """
    from math_verify import parse, verify

    golds = []
    for text in _texts(ground_truth):
        parsed = parse(rf"\boxed{{{_scientific(text)}}}")
        if not parsed:
            raise ValueError(f"math-verify cannot read the ground truth {text!r}")
        golds += parsed
    answers = parse(_scientific(solution_str))
    options = {
        "float_rounding": float_rounding,
        "numeric_precision": numeric_precision,
        "strict": strict,
    }
    pairs = ((gold, one) for gold in golds for one in answers)
    return float(
        any(verify(*pair, **options) and not _differ(*pair, float_rounding) for pair in pairs)
    )


def _scientific(text: str) -> str:
    """Write 1e-7 as LaTeX does: math-verify reads it as Euler's number minus 7."""
    return _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)


def _differ(first: Any, second: Any, digits: int) -> bool:
    """Return whether two real numbers differ in their first digits. Percentages are not compared."""
    sympy = import_module("sympy")
    if not all(isinstance(x, sympy.Basic) and x.is_number and x.is_real for x in (first, second)):
        return False
    if first.has(sympy.UnevaluatedExpr) or second.has(sympy.UnevaluatedExpr):
        return False
    one = first.evalf(digits + 20)
    other = second.evalf(digits + 20)
    largest = max(abs(one), abs(other))
    return bool(abs(one - other) > largest * sympy.Rational(10) ** (1 - digits))


def extract_answer(completion: str) -> str | None:
    r"""Return a completion's answer for a majority vote.

    It is the content of the last `\boxed{...}`, else the text after the last `####`, else the last number, else the text. 4, 4.0
    and 8/2 are one answer.
    """
    number = _number(completion)
    return str(number) if number is not None else _final_part(completion)[0].strip() or None


def _number(text: str) -> Fraction | None:
    part, is_marked = _final_part(text)
    return last_number(part, alone=is_marked)


def _final_part(text: str) -> tuple[str, bool]:
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed, True
    _, mark, tail = text.rpartition(_MARK)
    return (tail.strip().partition("\n")[0], True) if mark else (text, False)


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None  # the completion ends before the brace is closed


def _texts(ground_truth: Any) -> list[str]:
    """Return the right answers as texts. Raises `ValueError` without any, and for an answer that is none."""
    plain = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    answers = plain if isinstance(plain, list | tuple | set | frozenset) else [plain]
    if not answers or any(answer is None or _is_nested(answer) for answer in answers):
        raise ValueError(
            f"the ground truth is {ground_truth!r}, but has to be a text or a number; data.answer_column names its column"
        )
    return [_text(answer) for answer in answers]


def _is_nested(answer: Any) -> bool:
    return isinstance(answer, Mapping) or (
        isinstance(answer, Iterable) and not isinstance(answer, str)
    )


def _text(answer: Any) -> str:
    """Write a number without an exponent, as completions do."""
    is_small = isinstance(answer, float) and "e" in repr(answer)
    return format(Decimal(repr(answer)), "f") if is_small else str(answer)
