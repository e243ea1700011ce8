"""Whether a reward function is in the source that its name points to, without running any of that.

For a dry run. Left out: whether it can be called (`burnish.rewards.load`), which only importing it tells.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from burnish.errors import UsageError, few
from burnish.rewards.load import BUILTINS

_HIDING = {"*", "__getattr__", "globals", "exec", "setattr"}
# A module with one of these may have more names than its source shows.


def require_function(name: str) -> None:
    """Raise `UsageError` where `module:function`, `file.py:function` or a built-in's name leads to source without that function.

    What has no source on this machine (a URL, a compiled module) passes.
    """
    module, colon, function = BUILTINS.get(name, name).rpartition(":")
    if not colon or not module or not function:
        raise UsageError(
            f"{name!r} names no reward function",
            have=name,
            want=f"module:function, file.py:function or one of {', '.join(BUILTINS)}",
            do=_did_you_mean(name, list(BUILTINS)) or "correct reward.functions",
        )
    file = Path(module).expanduser() if module.endswith(".py") else _file_of(module)
    if file is None or file.suffix != ".py" or not file.is_file():
        return
    names = list(dict.fromkeys(_names(_parsed(file))))
    if function not in names and not _HIDING.intersection(names):
        raise UsageError(
            f"the reward function {name} is not there",
            have=f"{file} with {few(names) or 'nothing'}",
            want=f"{function} at its top level",
            do=_did_you_mean(function, names) or "correct reward.functions",
        )


def _file_of(module: str) -> Path | None:
    """Where a module's source is, which `find_spec` of a dotted name would import its packages to say."""
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first) or PathFinder.find_spec(first, [os.getcwd()])
    name = first
    for part in rest:
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, _folders(spec)) if spec else None
    if spec is None:
        raise UsageError(
            f"there is no module {name}",
            have=f"nothing of that name in the working directory or installed, for {module}",
            want="module:function that Python can import, or file.py:function",
            do="correct reward.functions, or install the module",
        )
    return Path(spec.origin) if spec.origin else None


def _folders(spec: ModuleSpec) -> list[str]:
    return list(spec.submodule_search_locations or [])


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        line = getattr(error, "lineno", None)
        raise UsageError(
            f"{file}, which holds a reward function, is not Python",
            have=f"line {line}: {getattr(error, 'msg', error)}" if line else error,
            want="a file that Python can import",
            do="correct the file",
        ) from error


def _names(node: ast.AST) -> Iterator[str]:
    """What a module binds, also in its conditions and loops, and which of `_HIDING` it uses there."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child.name
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from (each.asname or each.name.partition(".")[0] for each in child.names)
        if isinstance(child, ast.Name) and (
            isinstance(child.ctx, ast.Store) or child.id in _HIDING
        ):
            yield child.id
        yield from _names(child)


def _did_you_mean(name: str, known: list[str]) -> str | None:
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else None
