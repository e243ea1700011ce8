"""Built-in rewards in verl's signature, and answers for votes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A sign directly after a digit, a letter or a closing bracket is an operator: 10-3 ends in 3.
_NUMBER = re.compile(
    rf"(?:(?<![\w)\]}}.])[-+])?(?:{_DIGITS})(?:[eE][-+]?\d{{1,3}}(?!\d))?(?:/(?:{_DIGITS}))?",
    re.ASCII,
)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_LONGEST_NUMBER = 200
_BOXED = r"\boxed{"
_MARK = "####"


def exact_match(solution_str: str, ground_truth: Any, *, ignore_case: bool = False) -> float:
    """Return 1 if the stripped completion is the ground truth or in its list. Raises `ValueError` without one."""
    answer = solution_str.strip()
    wanted = [text.strip() for text in _texts(ground_truth)]
    if ignore_case:
        return float(answer.casefold() in {one.casefold() for one in wanted})
    return float(answer in wanted)


def numeric(solution_str: str, ground_truth: Any, *, tolerance: float = 0.0) -> float:
    r"""Return 1 if the completion's last number equals a ground truth's, within `tolerance`.

    Takes the last number in the last `\boxed{...}`, else after the last `####`, else in the text. It may have a sign, thousands'
    commas, a decimal point or an exponent, or be a fraction `3/4` or `\frac{3}{4}`. Compares exactly. Raises `ValueError` for a
    ground truth without a number.
    """
    wanted = [last_number(_final_part(text)[0]) for text in _texts(ground_truth)]
    numbers = [number for number in wanted if number is not None]
    if len(numbers) < len(wanted):
        raise ValueError(f"the ground truth {ground_truth!r} holds no number")
    last = last_number(_final_part(solution_str)[0])
    return float(last is not None and any(abs(last - n) <= Fraction(tolerance) for n in numbers))


def regex(solution_str: str, *, pattern: str, full: bool = True) -> float:
    """Return 1 if `pattern` matches the whole completion, or without `full` any part. Flags go inside: `(?s)`."""
    match = re.fullmatch if full else re.search
    return float(match(pattern, solution_str) is not None)


def math_verify(solution_str: str, ground_truth: Any) -> float:
    """Return 1 if math-verify (extra `math`) finds the final expression equal to the ground truth.

    Both are LaTeX or plain. An expression that takes over 5 seconds to parse is wrong. Raises `ValueError` for an unreadable ground
    truth.
    """
    from math_verify import parse, verify

    gold = parse(rf"\boxed{{{ground_truth}}}")
    if ground_truth is None or not gold:
        raise ValueError(f"math-verify cannot read the ground truth {ground_truth!r}")
    return float(verify(gold, parse(solution_str)))


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, exactly."""
    return next(_values(_NUMBER.findall(_plain(text))), None)


def extract_answer(completion: str) -> str | None:
    r"""Return a completion's answer for a majority vote.

    It is the content of the last `\boxed{...}`, else the text after the last `####`, else the last number, else the text. 4, 4.0
    and 8/2 are one answer.
    """
    part, marked = _final_part(completion)
    plain = _plain(part).lstrip(" $").rstrip(" $%.")
    whole = _NUMBER.fullmatch(plain)
    numbers = ([whole[0]] if whole else []) if marked else _NUMBER.findall(plain)
    number = next(_values(numbers), None)
    return str(number) if number is not None else part.strip() or None


def _plain(text: str) -> str:
    plain = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace(r"\,", "")
    return _FRACTION.sub(r"\1/\2", plain)


def _values(numbers: Sequence[str]) -> Iterator[Fraction]:
    for found in reversed(numbers):
        top, _, bottom = found.replace(",", "").partition("/")
        if len(found) <= _LONGEST_NUMBER and (not bottom or Fraction(bottom) != 0):
            yield Fraction(top) / Fraction(bottom or 1)


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
    texts = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not texts or any(one is None or isinstance(one, Mapping) for one in texts):
        raise ValueError(
            f"the ground truth is {ground_truth!r}, no text or number; data.answer_column names its column"
        )
    return [str(one) for one in texts]
