"""Every error that a person can meet says what to do: looked for in the code, for not each can be met in a test."""

from __future__ import annotations

import ast
from pathlib import Path

import burnish
from burnish import errors

ROOT = Path(burnish.__file__).parent
KINDS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, errors.BurnishError)
    and kind is not errors.StoppedError
}
OTHERS = (
    "boxes/pieces.py",
    "boxes/plan.py",
    "cli/plan.py",  # adds it to any
    "data/balance.py",
    "data/batching.py",
    "distributed/collectives.py",
    "models/loading.py",
    "models/names.py",
    "rollout/builtin/forward.py",
    "view/server.py",
)
"""With errors of code that calls them wrongly, or after which there is nothing to do."""
PLACES = {path.relative_to(ROOT).as_posix(): path for path in ROOT.glob("**/*.py")}


def mute(code: str) -> list[str]:
    """The errors in a program that are made without `do`."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    made = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id in KINDS]
    told = [{keyword.arg: keyword.value for keyword in each.keywords} for each in made]
    nothing = [ast.Constant(None), ast.Constant("")]
    return [
        ast.unparse(each)
        for each, words in zip(made, told, strict=True)
        if any(ast.dump(words.get("do", nothing[0])) == ast.dump(none) for none in nothing)
    ]


def test_an_error_without_is_found():
    code = 'raise CorruptError("bad")\nraise MissingError("x", do="look")\nraise UsageError("y", do=None)'
    assert mute(code) == ["CorruptError('bad')", "UsageError('y', do=None)"]


def test_every_error_says_what_to_do():
    found = {name: errors for name, path in PLACES.items() if (errors := mute(path.read_text()))}
    assert found.keys() == set(OTHERS), found
