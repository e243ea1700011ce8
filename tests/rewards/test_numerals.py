"""Numbers in texts: one reading, or none."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.rewards.numerals import last_number

NUMBERS = [
    ("42", 42),
    ("the answer is 42.", 42),
    ("-3", -3),
    ("+3", 3),
    ("x = -3", -3),
    ("\u22123", -3),
    ("10-3=7", 7),
    ("1,234,567", 1234567),
    ("1{,}234", 1234),
    ("10\\,000", 10000),
    ("$1,000.50", Fraction(2001, 2)),
    (".5", Fraction(1, 2)),
    ("3.", 3),
    ("1e3", 1000),
    ("2.5e-1", Fraction(1, 4)),
    ("3/4", Fraction(3, 4)),
    ("-3/4", Fraction(-3, 4)),
    ("\\frac{3}{4}", Fraction(3, 4)),
    ("-\\dfrac{3}{4}", Fraction(-3, 4)),
    ("\\frac12", Fraction(1, 2)),
    ("5\\frac{1}{2}", Fraction(11, 2)),
    ("5\\frac12", Fraction(11, 2)),
    ("10^{3}", 1000),
    ("10^3", 1000),
    ("3 \\times 10^{8}", 300000000),
    ("3x10^8", 300000000),
    ("50%", 50),
    ("50\\%", 50),
    ("3rd", 3),
    ("3^{\\text{rd}}", 3),
    ("5\xbd", Fraction(11, 2)),
    ("\xbd", Fraction(1, 2)),
    ("10\xb3", 1000),
    ("5 m\xb2", 5),
    ("5 m^2", 5),
    ("5\\text{ cm}^2", 5),
    ("5kg", 5),
    ("area is 5 cm^2", 5),
    ("-$5", -5),
    ("\\$5", 5),
    ("**42**", 42),
    ("<answer>42</answer>", 42),
    ("-> 5", 5),
    ("(5)", 5),
    ("5!", 5),
    ("5 1/2", Fraction(11, 2)),
    ("3 apples and 5 oranges", 5),
    ("Chapter 5", 5),
    ("is -3", -3),
    ("= - 3", -3),
    ("42 (forty-two)", 42),
    ("60 km/h", 60),
    ("$60/hour", 60),
    ("a 10-mile run", 10),
    ("Answer:42", 42),
    ("1\u202f234", 1234),
    ("90^\\circ", 90),
    ("5\xb0C", 5),
    ("So, $4$", 4),
    ("2^{10}", 1024),
    ("2^{-3}", Fraction(1, 8)),
    ("-2^2", -4),
    ("\\frac{-1}{2}", Fraction(-1, 2)),
    ("6.02e23", 602000000000000000000000),
    ("4%", 4),
    ("#5", 5),
    ("5 dollars", 5),
    ("\\mathbf{42}", 42),
    ("~5", 5),
    ("about 5", 5),
    ("\u7b54\u6848\u662f42\u3002", 42),
    ("\u51715\u4e2a", 5),
    ("R\xe9ponse : 42", 42),
    ("| 42 |", 42),
    ("\u041e\u0442\u0432\u0435\u0442: 7 \u0448\u0442\u0443\u043a", 7),
]
NONE = [
    "10-3",
    "f(2)-3",
    "1, 2, 3",
    "12,34",
    "5 or 1/0",
    "none",
    "",
    "10^31",
    "3-5",
    "3\u20135",
    "2024-01-05",
    "10:30",
    "x=3 or 4",
    "2\\sqrt{3}",
    "3\\pi",
    "5x",
    "H2O",
    "1.234,5",
    "0,5",
    "10-$5",
    "2**3",
    "x < 5",
    "5 < x",
    "x != 5",
    "(1,234)",
    "(3, 4)",
    "5 million",
    "$5M",
    "minus 5",
    "5 3/2",
    "between 3 and 5",
    "5 out of 7",
    "COVID-19",
    "x -3",
    "- 3",
    "192.168.0.1",
    "v1.2.3",
    "1 234",
    "3 + 4i",
    "0.333...",
    "$3$, $4$",
    "$3$ and $4$",
    "\\frac123",
    "\\frac{\\pi}{2}",
    "\\frac{x}{2}",
    "12/5/2024",
    "[3,5)",
    "|5|",
    "x \\ge 5",
    "5 squared",
    "the square root of 16",
    "5 x 6",
    "2x+1",
    "1/0",
    "1\uff12",
    "three",
    "5 - 3i",
    "1e400000",
    "1_000",
    "1'000",
    "\xb1 5",
    "5\u4e07",
    "\u8d1f5",
    "|-5|",
    "= |-5|",
    "half of 10",
    "7 then " + "9" * 5000,
]
ANSWERS = [
    ("x=3, y=4", None),
    ("5 \\text{ of } 7", None),
    ("2^{10} = 1024", 1024),
    ("x = 5", 5),
    ("5 \\text{ apples}", 5),
    ("5!", None),
    ("1, 2, 3", None),
    ("3 \\text{ or } 4", None),
    ("x \\in [1,2]", None),
    ("3 \\text{ hours } 20 \\text{ minutes}", None),
    ("a = 3 and b = 4", None),
]


@pytest.mark.parametrize(("text", "want"), NUMBERS)
def test_a_number_is_read(text: str, want: Fraction) -> None:
    assert last_number(text) == want


@pytest.mark.parametrize("text", NONE)
def test_what_has_no_single_reading_is_no_number(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(("text", "want"), ANSWERS)
def test_an_answer_is_one_number(text: str, want: Fraction | None) -> None:
    assert last_number(text, alone=True) == want


@given(st.integers() | st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_what_python_writes_is_read(number: int | Decimal) -> None:
    written = f"{number:,f}" if isinstance(number, Decimal) else f"{number:,}"
    assert last_number(f"so it is {written}.") == Fraction(number)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_what_json_writes_is_read(number: float) -> None:
    assert last_number(f"x = {number!r}") == Fraction(repr(number))


@given(st.text())
def test_any_text_has_a_number_or_none(text: str) -> None:
    last_number(text)
    last_number(text, alone=True)


@given(st.text(alphabet="0123456789.,-+*/^x ={}\\frac$%"), st.booleans())
def test_no_number_is_invented(text: str, alone: bool) -> None:
    """A number that is read stands in the text, unless it is a power, a fraction or a decimal."""
    found = last_number(text, alone=alone)
    if found is not None and not set("^/.f") & set(text):
        assert abs(found) in {int(digits) for digits in re.findall(r"\d+", text.replace(",", ""))}
