from __future__ import annotations

import importlib.util
import signal
import sys

import pytest

from burnish.errors import UsageError, install
from burnish.functions import load_function
from burnish.rewards.load import BUILTINS

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
    assert load_function("math_verify", "reward.functions", BUILTINS)(completion, truth) == want


@needs_math
@pytest.mark.parametrize("truth", [None, ""])
def test_a_ground_truth_without_an_expression(truth: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        load_function("math_verify", "reward.functions", BUILTINS)("4", truth)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "burnish.rewards.symbolic", raising=False)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UsageError) as caught:
        load_function("math_verify", "reward.functions", BUILTINS)
    assert caught.value.do == install("math")
