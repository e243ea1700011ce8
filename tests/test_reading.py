"""The page of a step's thirty places: its names exist, they run in its order, and its count of lines is true."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs.training_files import RL, make_files

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "explanation" / "read-a-grpo-step.md").read_text()
PLACE = re.compile(r"^(\d+)\. `([\w.]+):([\w.]+)` \(([\d,]+) lines\)", re.M)
TOTAL = re.compile(r"Together they have ([\d,]+) lines")
RUN = """
import json, sys
from pathlib import Path
from burnish.cli.main import main
places, root = json.loads(sys.argv[1]), sys.argv[2]
calls = []
def seen(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root):
        name = f"{frame.f_globals['__name__']}:{code.co_qualname}."
        for number, place in enumerate(places):
            if name.startswith(f"{place}.") and calls[-1:] != [number]:
                calls.append(number)
sys.setprofile(seen)
status = main(["rl", "rl.yaml"])
sys.setprofile(None)
Path("calls.json").write_text(json.dumps(calls))
sys.exit(status)
"""
"""A run that notes in which order the main thread comes to the places."""


def lines_of(module: str, name: str) -> int:
    """Lines of a function or class with its decorators, docstrings and comments."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    node: ast.AST = ast.parse(path.read_text())
    for part in name.split("."):
        body = getattr(node, "body", [])
        inner = [each for each in body if getattr(each, "name", None) == part]
        assert inner, f"{module} has no {name}"
        node = inner[-1]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return (node.end_lineno or first) - first + 1


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_there_are_thirty_places_and_each_exists() -> None:
    found = PLACE.findall(PAGE)
    assert [int(count) for count, *_ in found] == list(range(1, 31))
    others = re.findall(r"`(burnish[\w.]*):([\w.]+)`", PAGE)
    assert all(lines_of(module, name) for module, name in others)


def test_the_count_of_lines_is_true() -> None:
    places = PLACE.findall(PAGE)
    told = [number(lines) for *_, lines in places]
    counted = [lines_of(module, name) for _, module, name, _ in places]
    total = TOTAL.search(PAGE)
    assert total is not None
    assert number(total[1]) == sum(told)
    assert sum(told) == pytest.approx(sum(counted), rel=0.05), counted


@pytest.mark.nightly
def test_a_run_comes_to_the_places_in_this_order(tmp_path: Path) -> None:
    root = make_files(tmp_path)
    settings = {key: value for key, value in RL.items() if key not in ("evaluation", "tracking")}
    settings |= {"steps": 1, "data": {"train": ["train.jsonl"]}}
    (root / "rl.yaml").write_text(json.dumps(settings))
    places = [f"{module}:{name}" for _, module, name, _ in PLACE.findall(PAGE)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", RUN, json.dumps(places), str(ROOT / "burnish")]
    subprocess.run(argv, cwd=root, env=environ, check=True)
    calls = iter(json.loads((root / "calls.json").read_text()))
    missing = [places[wanted] for wanted in range(30) if wanted not in calls]
    assert missing == []
