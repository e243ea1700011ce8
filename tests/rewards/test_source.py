from __future__ import annotations

import sys
from pathlib import Path

import pytest

from burnish.errors import UsageError
from burnish.rewards.load import BUILTINS
from burnish.rewards.source import require_function


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        "def f(completions): ...",
        "async def f(completions): ...",
        "class f: ...",
        "f = lambda completions: []",
        "f: object = print",
        "from math import sqrt as f",
        "import math as f",
        "if True:\n    def f(): ...\nelse:\n    f = None",
        "try:\n    from fast import f\nexcept ImportError:\n    def f(): ...",
        "from somewhere import *",
        "def __getattr__(name): ...",
        "globals()['f'] = print",
    ],
)
def test_a_function_that_is_there_or_may_be(here: Path, source: str) -> None:
    (here / "r.py").write_text(source)
    require_function("r.py:f")


@pytest.mark.parametrize(
    "source",
    ["", "def g(): ...", "def g():\n    f = 1\n    def f(): ...", "class G:\n    def f(self): ..."],
)
def test_a_function_that_is_not_there(here: Path, source: str) -> None:
    (here / "r.py").write_text(source)
    with pytest.raises(UsageError, match=r"the reward function r\.py:f is not there"):
        require_function("r.py:f")


def test_a_misspelt_function_names_the_nearest(here: Path) -> None:
    (here / "r.py").write_text("def correct(): ...")
    with pytest.raises(UsageError, match=r"did you mean correct\?"):
        require_function("r.py:corect")
    with pytest.raises(UsageError, match=r"did you mean numeric\?"):
        require_function("numerik")


@pytest.mark.parametrize("source", ["def f(:", "\0"])
def test_what_is_not_python(here: Path, source: str) -> None:
    (here / "r.py").write_text(source)
    with pytest.raises(UsageError, match="is not Python"):
        require_function("r.py:f")


def test_modules_are_found_and_not_imported(here: Path) -> None:
    (here / "outer_of_test").mkdir()
    (here / "outer_of_test/__init__.py").write_text("raise RuntimeError")
    (here / "outer_of_test/inner.py").write_text("raise RuntimeError\ndef f(): ...")
    require_function("outer_of_test.inner:f")
    with pytest.raises(UsageError, match="is not there"):
        require_function("outer_of_test.inner:g")
    with pytest.raises(UsageError, match=r"there is no module outer_of_test\.other"):
        require_function("outer_of_test.other:f")
    assert not [name for name in sys.modules if name.startswith("outer_of_test")]


def test_built_in_and_compiled_ones_pass() -> None:
    for name in [*BUILTINS, "math:sqrt", "s3://bucket/rewards.py:f"]:
        require_function(name)
