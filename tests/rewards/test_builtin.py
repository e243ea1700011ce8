from __future__ import annotations

import importlib.util
import math
import signal
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws

from burnish.rewards.builtin import (
    exact_match,
    extract_answer,
    math_verify,
    numeric,
    regex,
)


@given(st.text())
def test_any_text_has_an_answer_or_none(text: str) -> None:
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
        (r"\boxed{4", "4", 0),  # cut off: it may have been 42
        (r"\boxed{2^{10} = 1024} and 5", "1024", 1),
        (r"\boxed{\frac12}", "12", 0),
        (r"\boxed{5\frac{1}{2}}", "25.5", 0),
        (r"\boxed{5\frac{1}{2}}", 5.5, 1),
        (r"\boxed{10^{3}}", "3", 0),
        (r"\boxed{10^{3}}", "1,000", 1),
        (r"\boxed{3, 4}", "4", 0),
        (r"\boxed{3 \text{ or } 4}", "4", 0),
        ("between 3 and 5", "5", 0),
        ("0.0000003", 1e-7, 0),
        ("0.0000001", 1e-7, 1),
        ("it is 4", ("3", 4), 1),
        ("it is 4", np.array([3, 4]), 1),
        ("it is 4", np.float32(4), 1),
        ("1,000", "1000", 1),
        ("it is 4", ["4", "5.0"], 1),
        ("it is 5", [4, 5.0], 1),
        ("it is 6", ["4", "5"], 0),
    ],
)
def test_numeric(completion: str, truth: object, want: float) -> None:
    assert numeric(completion, truth) == want


@draws(50)
@given(*[st.integers(-(10**6), 10**6)] * 2, *[st.floats(0, 1)] * 2)
def test_tolerances_are_those_of_python(
    said: int, right: int, rel_tol: float, abs_tol: float
) -> None:
    """`math.isclose` rounds, so numbers at the limit are left out."""
    close = [
        math.isclose(said / 1e3, right / 1e3, rel_tol=rel_tol * factor, abs_tol=abs_tol * factor)
        for factor in (0.999, 1.0)
    ]
    if close[0] == close[1]:
        found = numeric(f"{said / 1e3:.3f}", f"{right / 1e3:.3f}", rel_tol=rel_tol, abs_tol=abs_tol)
        assert found == close[0]


@pytest.mark.parametrize("tolerance", [-1, math.nan])
@pytest.mark.parametrize("name", ["rel_tol", "abs_tol"])
def test_a_tolerance_that_is_none_is_refused(name: str, tolerance: float) -> None:
    with pytest.raises(ValueError, match="tol"):
        numeric("4", "4", **{name: tolerance})


@pytest.mark.parametrize(
    "truth", [None, "many", [], ["4", "many"], {"value": 4}, "3-5", "3 or 4", True, math.nan]
)
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
    assert exact_match("True", True) == 1
    assert exact_match("b", np.array(["a", "b"])) == 1
    for truth in (None, [], [None], {"value": 4}, [["4"]], np.array([])):
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


WRITTEN: dict[str, Callable[[Fraction], str]] = {
    "plain": str,
    "braces": lambda x: rf"{_sign(x)}\frac{{{abs(x.numerator)}}}{{{x.denominator}}}",
    "spaces": lambda x: rf"{_sign(x)}\dfrac {{{abs(x.numerator)}}} {{{x.denominator}}}",
    "equation": lambda x: rf"x = {_sign(x)}\frac{{{abs(x.numerator)}}}{{{x.denominator}}}",
    "dollars": lambda x: rf"${x}$",
    "mixed": lambda x: _mixed(x),
}
"""Ways to write a fraction."""


def _sign(value: Fraction) -> str:
    return "-" if value < 0 else ""


def _mixed(value: Fraction) -> str:
    whole, rest = divmod(abs(value), 1)
    if not whole or not rest:
        return str(value)
    return rf"{_sign(value)}{whole}\frac{{{rest.numerator}}}{{{rest.denominator}}}"


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
        (r"so \boxed{5}", ["five", "5"], 1),
        (r"so \boxed{5}", np.array(["4", "6"]), 0),
        (r"\boxed{0.0000003}", 1e-7, 0),
        (r"\boxed{1e-7}", 1e-7, 1),
        (r"\boxed{10^{-40}}", "3 \\times 10^{-40}", 0),
        (r"\boxed{\{0.0000003\}}", r"\{0.0000001\}", 0),
        (r"\boxed{0.333333}", r"\frac13", 0),
        (r"\boxed{0.333333333333}", r"\frac13", 1),
        (r"\boxed{\sqrt{2}}", "1.4142135623731", 1),
        (r"\boxed{50\%}", "0.5", 1),
    ],
)
def test_equivalence(completion: str, truth: object, want: float) -> None:
    assert math_verify(completion, truth) == want


@needs_math
@pytest.mark.usefixtures("_patient")
def test_the_precision_of_math_verify_is_a_setting() -> None:
    """With its own defaults a third has six digits."""
    how = {"float_rounding": 6, "numeric_precision": 15}
    assert math_verify(r"\boxed{0.333333}", r"\frac13", **how) == 1
    assert math_verify(r"\boxed{1.0000001}", "1.0000002", **how) == 1
    assert math_verify(r"\boxed{0.0000003}", "0.0000001", **how) == 0


@needs_math
@pytest.mark.usefixtures("_patient")
@draws(25)
@given(st.fractions(max_denominator=99), st.sampled_from(sorted(WRITTEN)))
def test_a_number_is_read_as_math_verify_reads_it(value: Fraction, form: str) -> None:
    """In any notation of LaTeX: the value, or none."""
    text = WRITTEN[form](value)
    assert numeric(f"so {value + 1} and \\boxed{{{text}}}", str(value)) == 1
    assert math_verify(rf"\boxed{{{text}}}", str(value)) == 1


@needs_math
@pytest.mark.parametrize("truth", [None, "", [], ["4", None], [["4"]], {"value": 4}])
def test_a_ground_truth_without_an_expression(truth: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        math_verify("4", truth)
