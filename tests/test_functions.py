from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

import pytest

from burnish.errors import UsageError
from burnish.extend import REWARDS
from burnish.functions import fingerprint, load_function, name_of
from burnish.rewards import builtin

SETTING = "reward.functions"
SOURCE = """
NUMBER = 4

def double(values):
    return [2 * value for value in values]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_of_test.py").write_text(SOURCE)
    return tmp_path


def test_functions_of_modules_files_and_built_in_ones(here: Path) -> None:
    assert load_function("burnish.rewards.builtin:numeric", SETTING) is builtin.numeric
    for name in ("mine_of_test.py:double", f"{here}/mine_of_test.py:double", "mine_of_test:double"):
        assert load_function(name, SETTING)([2]) == [4]
    for name in ("exact_match", "numeric", "regex"):
        assert load_function(name, SETTING, REWARDS) is getattr(builtin, name)
    assert load_function("len", SETTING, {"len": len}) is len
    assert load_function("pathlib:Path", SETTING) is Path


def test_a_file_may_import_another_beside_it(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any working directory. What is installed comes first."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (here / "beside_mine_of_test.py").write_text("def twice(x):\n    return 2 * x\n")
    (here / "json.py").write_text("1 / 0")
    (here / "with_other.py").write_text("import json\nfrom beside_mine_of_test import twice\n")
    assert load_function(f"{here}/with_other.py:twice", SETTING)(2) == 4


@pytest.mark.parametrize(
    "name",
    [
        "exact_mach",
        ":double",
        "module:",
        "",
        "burnisch:double",
        "burnish.rewards.bultin:numeric",
        "mine_of_tests.py:double",
        "mine_of_test.py:dubble",
        "mine_of_test.py:NUMBER",
    ],
)
def test_names_that_lead_nowhere(here: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_function(name, SETTING, REWARDS)
    assert caught.value.problem.startswith(SETTING)
    assert caught.value.have
    assert caught.value.want
    assert caught.value.do


def test_a_misspelt_name_gets_the_nearest(here: Path) -> None:
    for name, near in {
        "exact_mach": "'exact_match'",
        "burnisch:f": "'burnish'",
        "mine_of_tests.py:double": "'mine_of_test.py'",
        "mine_of_test:dubble": "'double'",
    }.items():
        with pytest.raises(UsageError) as caught:
            load_function(name, SETTING, REWARDS)
        assert near in str(caught.value.do)


@pytest.mark.parametrize(
    ("source", "have"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("import no_such_package", "no_such_package"),
    ],
)
def test_a_module_that_cannot_be_imported(here: Path, source: str, have: str) -> None:
    (here / "broken_of_test.py").write_text(source)
    for name in ("broken_of_test:f", "broken_of_test.py:f"):
        with pytest.raises(UsageError) as caught:
            load_function(name, SETTING)
        assert have in str(caught.value.have)


def test_a_fingerprint_is_of_the_content(here: Path) -> None:
    first = fingerprint("mine_of_test.py:double", SETTING)
    (here / "other_of_test.py").write_text(SOURCE)
    assert fingerprint("other_of_test:double", SETTING) == first
    (here / "moved.py").write_text(SOURCE)
    assert fingerprint("moved.py:double", SETTING) == first
    (here / "moved.py").write_text(f"{SOURCE}\n")
    assert fingerprint("moved.py:double", SETTING) != first
    assert fingerprint("numeric", SETTING, REWARDS) == "numeric"
    assert fingerprint("math:sqrt", SETTING) == "math:sqrt"
    with pytest.raises(UsageError):
        fingerprint("nowhere_of_test:f", SETTING)


CALLABLES = """
import functools

def plain(values): return 1

def halved(function):
    @functools.wraps(function)
    def inner(values): return function(values) / 2
    return inner

half = halved(plain)
@halved
def decorated(values): return 4
class Scorer:
    def __call__(self, values): return 5
    def method(self, values): return 6
scorer = Scorer()
of_lambda = lambda values: 7
given = functools.partial(lambda values, k: k, k=8)
"""


def test_a_function_has_the_name_under_which_others_find_it(here: Path, monkeypatch) -> None:
    (here / "callables_of_test.py").write_text(CALLABLES)
    monkeypatch.syspath_prepend(str(here))
    module = importlib.import_module("callables_of_test")
    for name in ("plain", "half", "decorated", "scorer", "of_lambda", "Scorer"):
        assert name_of(getattr(module, name)) == f"callables_of_test:{name}"
    former = module.plain
    module.plain = lambda values: 9
    for function in (former, module.scorer.method, module.halved(former), module.given):
        with pytest.raises(UsageError):
            name_of(function)
    assert name_of(functools.wraps) == "functools:wraps"


def test_a_file_may_refuse_its_own_import(here: Path) -> None:
    (here / "refuses.py").write_text(
        "from burnish.errors import UsageError\nraise UsageError('not here')"
    )
    with pytest.raises(UsageError, match=r"^not here"):
        load_function("refuses.py:f", SETTING)
