from __future__ import annotations

import importlib.util
import signal
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.rewards.builtin import (
    exact_match,
    extract_answer,
    last_number,
    math_verify,
    numeric,
    regex,
)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("42", 42),
        ("the answer is 42.", 42),
        ("-3", -3),
        ("+3", 3),
        ("x = -3", -3),
        ("\N{MINUS SIGN}3", -3),
        ("10-3=7", 7),
        ("10-3", 3),
        ("f(2)-3", 3),
        ("1,234,567", 1234567),
        ("1, 2, 3", 3),
        ("12,34", 34),
        (r"1{,}234", 1234),
        (r"10\,000", 10000),
        ("$1,000.50", Fraction(2001, 2)),
        (".5", Fraction(1, 2)),
        ("3.", 3),
        ("1e3", 1000),
        ("2.5e-1", Fraction(1, 4)),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("5 or 1/0", 5),
        ("7 then " + "9" * 5000, 7),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, want: Fraction | None) -> None:
    assert last_number(text) == want


@given(st.integers() | st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_last_number_reads_what_python_writes(number: int | Decimal) -> None:
    written = f"{number:,f}" if isinstance(number, Decimal) else f"{number:,}"
    assert last_number(f"so it is {written}.") == Fraction(number)


@given(st.text())
def test_any_text_has_an_answer_or_none(text: str) -> None:
    last_number(text)
    extract_answer(text)


@pytest.mark.parametrize("text", ["1", "1,", "111,", "\\frac{", "{"])
def test_long_texts_come_to_an_end(text: str) -> None:
    """Work that grows with the square of the length would outlast any test's limit by hours."""
    many = text * (400_000 // len(text))
    numeric("\\boxed{" + many, "1")
    numeric(many, "1")


@pytest.mark.parametrize(
    ("completion", "truth", "want"),
    [
        ("2 + 2 = 4", "4", 1),
        ("2 + 2 = 4", 4, 1),
        ("4.0", 4, 1),
        ("0.1", 0.1, 1),
        ("5", "4", 0),
        ("", "4", 0),
        ("no idea", "4", 0),
        ("#### 42", "10 + 32 = 42\n#### 42", 1),
        ("#### 42\nand 7 more words", "42", 1),
        (r"\boxed{42} is right, not 43", "42", 1),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{4", "4", 1),  # cut off: the last number of the text
        (r"\boxed{2^{10} = 1024} and 5", "1024", 1),
        ("1,000", "1000", 1),
        ("it is 4", ["4", "5.0"], 1),
        ("it is 5", [4, 5.0], 1),
        ("it is 6", ["4", "5"], 0),
    ],
)
def test_numeric(completion: str, truth: object, want: float) -> None:
    assert numeric(completion, truth) == want


def test_numeric_tolerance() -> None:
    assert numeric("3.14", "3.14159", tolerance=0.01) == 1
    assert numeric("3.1", "3.14159", tolerance=0.01) == 0


@pytest.mark.parametrize("truth", [None, "many", [], ["4", "many"], {"value": 4}])
def test_numeric_needs_a_number_to_compare_with(truth: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        numeric("4", truth)


def test_exact_match() -> None:
    assert exact_match(" 4\n", "4") == 1
    assert exact_match("4", 4) == 1
    assert exact_match("44", "4") == 0
    assert exact_match("", "") == 1
    assert exact_match("b", ["a", "b"]) == 1
    assert exact_match("Paris", "paris") == 0
    assert exact_match("Paris", "paris", ignore_case=True) == 1
    for truth in (None, [], [None], {"value": 4}):
        with pytest.raises(ValueError, match=r"data\.answer_column"):
            exact_match("4", truth)


def test_regex() -> None:
    assert regex("<a>1</a>", pattern=r"<a>.*</a>") == 1
    assert regex("see <a>1</a>", pattern=r"<a>.*</a>") == 0
    assert regex("see <a>1</a>", pattern=r"<a>.*</a>", full=False) == 1
    assert regex("<a>\n</a>", pattern=r"(?s)<a>.*</a>") == 1


@pytest.mark.parametrize(
    ("completion", "want"),
    [
        ("so 4", "4"),
        ("so 4.0", "4"),
        ("8/2", "4"),
        (".50", "1/2"),
        (r"\boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{$1,000$}", "1000"),
        (r"\boxed{2x+1}", "2x+1"),
        ("#### 42", "42"),
        ("Paris ", "Paris"),
        ("  ", None),
        (r"5 \boxed{}", None),
    ],
)
def test_extract_answer(completion: str, want: str | None) -> None:
    assert extract_answer(completion) == want


needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="the extra math is not installed"
)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """math-verify gives up after 5 seconds by the wall, which on a busy machine may come before the first answer."""
    monkeypatch.setattr(signal, "alarm", lambda seconds: 0)


@needs_math
@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize(
    ("completion", "truth", "want"),
    [
        (r"so $\frac{2}{4}$", "1/2", 1),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
        (r"\boxed{3}", 4, 0),
        ("", "4", 0),
    ],
)
def test_equivalence(completion: str, truth: object, want: float) -> None:
    assert math_verify(completion, truth) == want


@needs_math
@pytest.mark.parametrize("truth", [None, ""])
def test_a_ground_truth_without_an_expression(truth: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        math_verify("4", truth)
