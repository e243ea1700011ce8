"""`make nightly` and `make contract` leave out no test: each file is of one part, and make runs each part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.faults.campaigns import CAMPAIGNS
from support.parts import PARTS, TESTS, files_with_tests, part_of

ROOT = TESTS.parent


def targets(variable: str) -> list[str]:
    """The names that a variable of the Makefile lists, after the prefix that they all have."""
    text = (ROOT / "Makefile").read_text()
    found = re.search(rf"^{variable} := (?:\$\(addprefix [a-z]+-,)?([a-z -]+)\)?$", text, re.M)
    assert found is not None
    return found[1].split()


def test_each_file_is_of_one_part() -> None:
    parts = {file: part_of(file) for file in files_with_tests()}
    assert set(parts.values()) == set(PARTS)


def test_no_place_is_named_twice_or_empty() -> None:
    named = [path for paths in PARTS.values() for path in paths]
    assert sorted(named) == sorted(set(named))
    files = [Path(file) for file in files_with_tests()]
    assert [path for path in named if not any(file.is_relative_to(path) for file in files)] == []


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("check/test_listed_models.py", "listed"),
        ("check/test_new.py", "models"),
        ("engines/megatron/test_new.py", "megatron"),
        ("checkpoint/tools/test_new.py", "checkpoints"),
        ("new/test_new.py", "units"),
        ("test_new.py", "units"),
    ],
)
def test_a_file_is_of_the_part_that_names_it_most_closely(file: str, part: str) -> None:
    assert part_of(file) == part


def test_pytest_collects_no_other_files() -> None:
    assert list(TESTS.rglob("*_test.py")) == []


def test_make_runs_every_part() -> None:
    assert targets("PARTS") == list(PARTS)


def test_make_runs_every_contract() -> None:
    marked = [file for file in files_with_tests() if "mark.contract" in (TESTS / file).read_text()]
    assert len(marked) > 5
    assert {part_of(file) for file in marked} == set(targets("CONTRACTS"))


def test_make_runs_every_campaign() -> None:
    assert targets("CAMPAIGNS") == list(CAMPAIGNS)
