"""Rewards for programs, in verl's signature: the share of a row's tests that the program in a completion passes.

What a test wants never enters the sandbox, except with `unit_tests`.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from burnish.sandbox.cases import Case, read_cases
from burnish.sandbox.sandbox import Limits, run_shared

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LANGUAGES = ("", "python", "python3", "py")
_LOAD = """
import io, json, os, sys, types
task = json.load(sys.stdin)
sys.stdin = io.StringIO()
result = os.fdopen(os.dup(3), "w")
solution = sys.modules["solution"] = types.ModuleType("solution")
exec(task["before"], vars(solution))
exec(compile(task["code"], "solution.py", "exec"), vars(solution))
"""
_CALL = (
    _LOAD
    + """
name = task["function"]
owner = solution if hasattr(solution, name) else solution.Solution()
answer = getattr(owner, name)(*task["arguments"])
json.dump(answer, result, default=lambda value: value.tolist())
result.close()
"""
)
_BEFORE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from typing import *
"""
"""What LeetCode's solutions take for granted."""
_TEST = (
    _LOAD
    + """
import inspect, unittest

def say(value):
    print(task["secret"], json.dumps(value), file=result, flush=True)

def found(names):
    entry_point = task["entry_point"]
    if entry_point and callable(names.get("check")):
        return [lambda: names["check"](names[entry_point])]
    tests = []
    for name, value in names.items():
        if vars(solution).get(name) is value:
            continue
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(value):
                tests.append(test.debug)
        elif isinstance(value, type) and name.startswith("Test"):
            for method in dir(value):
                if method.startswith("test"):
                    tests.append(lambda value=value, method=method: getattr(value(), method)())
        elif inspect.isfunction(value) and name.startswith("test"):
            tests.append(value)
    return tests

names = dict(vars(solution), __name__="tests")
exec(task["setup"], names)
tests = []
for source in task["tests"]:
    own = compile(source, "tests.py", "exec")
    if len(task["tests"]) > 1:
        tests.append(lambda own=own: exec(own, names))
    else:
        try:
            exec(own, names)
            tests += found(names) or [lambda: None]
        except BaseException:
            tests.append(lambda: exec(own, names))
say(len(tests))
for test in tests:
    try:
        test()
        passed = True
    except BaseException:
        passed = False
    say(passed)
"""
)


def input_output(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    partial: bool = True,
    rel_tol: float = 0.0,
    total_seconds: float = 20.0,
    limits: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Return the share of tests whose output, or whose function's result, is the one wanted; `burnish.sandbox.cases` reads them.

    The program is the completion's last block of Python, or the whole completion. Outputs are compared by lines, without white space
    around them; lines of numbers by value, within `rel_tol`. With `partial: false` a program that fails a test gets 0. Tests that begin
    after `total_seconds` are failed. `limits` are those of `burnish.sandbox.sandbox.Limits`.
    """
    cases = read_cases(ground_truth, extra_info or {})
    code = code_of(solution_str)
    allowed = Limits(**(limits or {}))
    end = time.monotonic() + total_seconds
    passed = 0
    late = 0
    for case in cases:
        left = end - time.monotonic()
        if left <= 0 or not code.strip():
            break
        is_right, is_late = _passes(case, code, allowed, min(left, allowed.seconds), rel_tol)
        passed += is_right
        late += is_late
        if not partial and not is_right:
            break
    return _score(passed, len(cases), partial) | {"late": float(late)}


def unit_tests(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    partial: bool = True,
    total_seconds: float = 20.0,
    limits: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Return the share of unit tests that a program passes.

    The ground truth is a list of statements (MBPP's `test_list`), or a text with functions `test_...`, classes of tests, or HumanEval's
    `check(candidate)`; or a mapping with such a `tests`, `test` or `test_list`. `from solution import ...` works in it. The tests run beside
    the program, so a program that looks for them can deceive them: prefer `input_output`.
    """
    tests, setup, entry_point = _read_tests(ground_truth, extra_info or {})
    code = code_of(solution_str)
    allowed = Limits(**(limits or {}))
    secret = secrets.token_hex()
    task = {
        "code": code,
        "before": "",
        "tests": tests,
        "setup": setup,
        "entry_point": entry_point,
        "secret": secret,
    }
    seconds = min(total_seconds, allowed.seconds)
    done = run_shared(allowed, _TEST, json.dumps(task), seconds)
    told = [line.removeprefix(secret) for line in done.result.splitlines() if secret in line]
    count, *passed = [json.loads(line) for line in told] or [len(tests)]
    return _score(sum(passed), max(count, 1), partial) | {"late": float(done.stopped == "time")}


def code_of(completion: str) -> str:
    """Return the program in a completion: its last fenced block of Python, or the whole text if it has none."""
    found = _BLOCK.findall(completion)
    blocks = [code for language, code in found if language.lower() in _LANGUAGES]
    return blocks[-1] if blocks else completion


def _score(passed: int, count: int, partial: bool) -> dict[str, float]:
    share = passed / count
    return {"score": share if partial else float(passed == count), "passed": share}


def _passes(
    case: Case, code: str, limits: Limits, seconds: float, rel_tol: float
) -> tuple[bool, bool]:
    """Return whether a program passes a test, and whether it was late."""
    if case.function is None:
        done = run_shared(limits, code, case.given, seconds)
        is_right = done.status == 0 and _same_text(done.stdout, case.wanted, rel_tol)
        return is_right, done.stopped == "time"
    task = {"code": code, "before": _BEFORE, "function": case.function, "arguments": case.given}
    done = run_shared(limits, _CALL, json.dumps(task), seconds)
    try:
        answer = json.loads(done.result)
    except ValueError:
        return False, done.stopped == "time"
    # What JSON makes of the answer, such as lists of tuples, it makes of what is wanted too.
    wanted = json.loads(json.dumps(case.wanted))
    # APPS writes each answer into a list of one.
    fine = [wanted, *wanted] if isinstance(wanted, list) and len(wanted) == 1 else [wanted]
    is_right = any(_same_value(answer, one, rel_tol) for one in fine)
    return done.status == 0 and is_right, False


def _same_text(text: str, wanted: str, rel_tol: float) -> bool:
    lines = [line.strip() for line in text.strip().split("\n")]
    wanted_lines = [line.strip() for line in wanted.strip().split("\n")]
    return len(lines) == len(wanted_lines) and all(
        one == other or _same_numbers(one.split(), other.split(), rel_tol)
        for one, other in zip(lines, wanted_lines, strict=True)
    )


def _same_numbers(words: Sequence[str], wanted: Sequence[str], rel_tol: float) -> bool:
    if len(words) != len(wanted):
        return False
    try:
        pairs = [(Decimal(a), Decimal(b)) for a, b in zip(words, wanted, strict=True)]
    except InvalidOperation:
        return False
    return all(a == b or math.isclose(a, b, rel_tol=rel_tol) for a, b in pairs)


def _same_value(value: Any, wanted: Any, rel_tol: float) -> bool:
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(
            _same_value(a, b, rel_tol) for a, b in zip(value, wanted, strict=True)
        )
    if isinstance(value, float) or isinstance(wanted, float):
        numbers = (int, float)
        return (
            isinstance(value, numbers)
            and isinstance(wanted, numbers)
            and (value == wanted or math.isclose(value, wanted, rel_tol=rel_tol))
        )
    return bool(value == wanted)


def _read_tests(ground_truth: Any, columns: Mapping[str, Any]) -> tuple[list[str], str, str]:
    """Return sources of tests, what runs before them, and the function that HumanEval's `check` gets. Raises `ValueError`."""
    value = ground_truth
    named = dict(columns)
    if isinstance(value, Mapping):
        named |= value
        keys = [key for key in ("tests", "test", "test_list", "test_code") if key in value]
        value = value[keys[0]] if keys else ()
    sources = [value] if isinstance(value, str) else [] if value is None else [*map(str, value)]
    if not any(sources):
        raise ValueError(
            "the ground truth has no unit tests: wanted a text, or a list of statements"
        )
    setup = named.get("test_setup_code") or named.get("test_imports") or ""
    setup = setup if isinstance(setup, str) else "\n".join(setup)
    return sources, setup, str(named.get("entry_point") or "")
