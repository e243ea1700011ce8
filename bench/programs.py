"""The time of a program in the sandbox, beside a bare process of Python with the same program.

    python -m bench.programs [--json] [--rounds N]

A round runs each program once on each side, in turns. The sandbox forks a process that has started Python, and makes namespaces and
mounts. The bare process starts the interpreter (`python -I -c`), as graders of other frameworks do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

from bench.machine import Result, command_line, interleaved, ratio, report
from burnish.sandbox.graders import input_output
from burnish.sandbox.sandbox import Sandbox

PROGRAMS: Mapping[str, str] = {
    "empty": "",
    "sum": "print(sum(map(int, input().split())))",
    "imports": "import collections, heapq, itertools, math, re, json\nprint(math.gcd(4, 6))",
    "loop": "print(sum(number % 7 for number in range(300_000)))",
}
GIVEN = "1 2 3\n"
TESTS = json.dumps({"inputs": [GIVEN] * 4, "outputs": ["6"] * 4})


def bare(code: str) -> str:
    argv = [sys.executable, "-I", "-c", code]
    done = subprocess.run(argv, input=GIVEN, capture_output=True, text=True, check=False)
    return done.stdout


def bare_grader(code: str) -> float:
    return sum(bare(code).strip() == "6" for _ in range(4)) / 4


def main() -> None:
    arguments = command_line(__doc__, rounds=100).parse_args()
    results = []
    with Sandbox() as sandbox:
        for name, code in PROGRAMS.items():
            sides: dict[str, Callable[[], object]] = {
                "ours": partial(sandbox.run, code, GIVEN),
                "bare": partial(bare, code),
            }
            results.append(_result(f"programs/{name}", sides, arguments.rounds))
    code = PROGRAMS["sum"]
    sides = {"ours": partial(input_output, code, TESTS), "bare": partial(bare_grader, code)}
    results.append(_result("programs/grader of 4 tests", sides, arguments.rounds // 4))
    report(results, arguments.json)


def _result(name: str, sides: Mapping[str, Callable[[], object]], rounds: int) -> Result:
    seconds = interleaved(sides, rounds)
    mine, theirs = (1e3 * median(seconds[side]) for side in sides)
    return Result(name, mine, theirs, None, "ms", ratio(seconds["bare"], seconds["ours"]), 1.0)


if __name__ == "__main__":
    main()
