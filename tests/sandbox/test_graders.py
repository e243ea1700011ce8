"""Graders against programs whose score is known, with rows as published data sets have them."""

from __future__ import annotations

import json

import pytest
from support.nightly import by_day

from burnish.sandbox.cases import Case, read_cases
from burnish.sandbox.graders import code_of, input_output, unit_tests
from burnish.sandbox.sandbox import Sandbox, SandboxError

DOUBLE = "```python\nprint(int(input()) * 2)\n```"
PAIRS = {"inputs": ["2\n", "0\n", "-7\n"], "outputs": ["4\n", "0", "-14\n"]}
CALLS = {"inputs": [[[3, 1, 2]], [[]]], "outputs": [[[1, 2, 3]], [[]]], "fn_name": "order"}
SORTED = "class Solution:\n    def order(self, a: List[int]):\n        return sorted(a)"
LISTED = [
    {"input": "[3, 1]\n2", "output": "[2, 6]", "testtype": "functional"},
    {"input": "[]\n2", "output": "[]", "testtype": "functional"},
]
SCALED = "def scale(values, factor):\n    return tuple(sorted(each * factor for each in values))"
ROWS = {
    "verl": (json.dumps(PAIRS), {}),
    "lists": (PAIRS, {}),
    "CodeContests": ({"input": PAIRS["inputs"], "output": PAIRS["outputs"]}, {}),
    "open-r1": (
        {
            "language": "python",
            "test_cases": [
                {"input": given, "output": wanted, "type": "stdin_stdout", "fn_name": None}
                for given, wanted in zip(*PAIRS.values(), strict=True)
            ],
        },
        {},
    ),
    "LiveCodeBench": (
        json.dumps(
            [
                {"input": given, "output": wanted, "testtype": "stdin"}
                for given, wanted in zip(*PAIRS.values(), strict=True)
            ]
        ),
        {"metadata": "{}"},
    ),
}
MORE_TESTS = """
import unittest
from solution import double

class TestDouble(unittest.TestCase):
    def test_two(self):
        self.assertEqual(double(2), 4)
    def test_wrong(self):
        self.assertEqual(double(2), 5)

class TestPlain:
    def test_zero(self):
        assert double(0) == 0

def test_text():
    assert double("a") == "aa"
"""
UNITS = {
    "MBPP": (["assert double(1) == 2", "assert double(2) == 4"], {}, 1.0),
    "MBPP, half": (["assert double(1) == 2", "assert double(2) == 5"], {}, 0.5),
    "a list in a mapping": (
        {"test_list": ["assert t(double(1)) == '2'"], "test_imports": ["t = str"]},
        {},
        1.0,
    ),
    "HumanEval": ("def check(f):\n    assert f(1) == 2\n", {"entry_point": "double"}, 1.0),
    "HumanEval, wrong": ("def check(f):\n    assert f(1) == 3\n", {"entry_point": "double"}, 0.0),
    "functions and classes": (MORE_TESTS, {}, 0.75),
    "plain asserts": ("assert double(1) == 2\nassert double(0) == 1", {}, 0.0),
}
CHEATS = [
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
    "import os; os.write(3, b'[1, true]\\n1\\ntrue\\n')",
    "raise KeyboardInterrupt",
    "class Equal:\n    def __eq__(self, other): return True\n",
]


@pytest.fixture(scope="module", autouse=True)
def _isolated() -> None:
    try:
        Sandbox().close()
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", by_day(ROWS, ("verl",)))
def test_rows_of_published_data_sets_are_read(name):
    truth, columns = ROWS[name]
    cases = read_cases(truth, columns)
    assert cases == [Case(*pair, None) for pair in zip(*PAIRS.values(), strict=True)]
    assert input_output(DOUBLE, truth, columns) == {"score": 1.0, "passed": 1.0, "late": 0.0}


@pytest.mark.parametrize(
    ("program", "share"),
    [
        ("print(abs(int(input())) * 2)", 2 / 3),
        ("print(int(input()) * 2); raise SystemExit(1)", 0.0),
        ("print(float(input()) * 2)", 1.0),
        ("print('x')", 0.0),
        ("", 0.0),
        ("no program at all", 0.0),
    ],
)
def test_the_score_is_the_share_of_tests_passed(program, share):
    assert input_output(program, PAIRS)["score"] == share
    assert input_output(program, PAIRS, partial=False)["score"] == float(share == 1)


def test_functions_are_called_with_arguments():
    assert input_output(SORTED, CALLS)["score"] == 1
    assert input_output(SCALED, LISTED, {"metadata": {"func_name": "scale"}})["score"] == 1
    wrong = SORTED.replace("sorted(a)", "a[::-1]")
    assert input_output(wrong, CALLS)["score"] == 0.5
    assert input_output("def other(): pass", CALLS)["score"] == 0


def test_numbers_are_compared_within_a_tolerance():
    truth = {"inputs": [""], "outputs": ["0.333333 1e3"]}
    assert input_output("print(1/3, 1000)", truth)["score"] == 0
    assert input_output("print(1/3, 1000)", truth, rel_tol=1e-5)["score"] == 1
    call = {"inputs": [[]], "outputs": [[0.3]], "fn_name": "f"}
    assert input_output("def f(): return 0.1 + 0.2", call)["score"] == 0
    assert input_output("def f(): return 0.1 + 0.2", call, rel_tol=1e-9)["score"] == 1


def test_a_program_that_is_late_fails_and_does_not_hold_up_the_others():
    code = "n = int(input())\nwhile n == 0: pass\nprint(n * 2)"
    limits = {"seconds": 3.0}
    scores = input_output(code, PAIRS, limits=limits)
    assert scores == {"score": 2 / 3, "passed": 2 / 3, "late": 1.0}
    scores = input_output("while True: pass", PAIRS, total_seconds=0.2)
    assert scores == {"score": 0.0, "passed": 0.0, "late": 1.0}


@pytest.mark.parametrize(
    "name", by_day(UNITS, ("MBPP, half", "HumanEval", "functions and classes"))
)
def test_unit_tests_of_many_forms(name):
    tests, columns, share = UNITS[name]
    assert unit_tests("def double(x): return x + x", tests, columns)["score"] == share


@pytest.mark.parametrize("cheat", by_day(CHEATS, CHEATS[:2]))
def test_a_program_that_ends_before_its_tests_has_not_passed_them(cheat):
    assert unit_tests(cheat, ["assert double(1) == 2"])["score"] == 0
    assert input_output(cheat, CALLS)["score"] == 0


@pytest.mark.parametrize(
    "truth",
    [
        None,
        "",
        "[]",
        "no JSON",
        {},
        {"inputs": ["1"], "outputs": []},
        [{"input": "1"}],
        {"language": "cpp", "test_cases": []},
        [{"input": "1", "output": "1", "type": "function_call"}],
    ],
)
def test_rows_without_tests_are_errors(truth):
    with pytest.raises(ValueError, match=r"ground truth|test"):
        input_output(DOUBLE, truth)


@pytest.mark.parametrize("truth", [None, "", [], {}, {"tests": []}])
def test_rows_without_unit_tests_are_errors(truth):
    with pytest.raises(ValueError, match=r"ground truth|test"):
        unit_tests(DOUBLE, truth)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("a\n```python\nx = 1\n```\nb\n```py\ny = 2\n```\nc", "y = 2\n"),
        ("```python\nx = 1\n```\nIt prints\n```text\n1\n```", "x = 1\n"),
        ("```\nx = '```'\n```", "x = '```'\n"),
        ("```Python title\nx\n```", "x\n"),
    ],
)
def test_the_last_block_of_python_is_the_program(text, code):
    assert code_of(text) == code
