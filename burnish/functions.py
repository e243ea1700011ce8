"""Find the function that a setting names: `file.py:name`, `module:name`, or a built-in."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import xxhash

from burnish.errors import BurnishError, UsageError, refusing
from burnish.redaction import redacted

Registry = Mapping[str, "Callable[..., Any] | str"]
"""Built-ins by name: the function itself, or `module:name` if it is imported on first use."""

_NONE: Registry = MappingProxyType({})
LONGEST = 500
"""Most characters of an error's text, which rollouts and the terminal repeat per completion."""


def load_function(name: str, setting: str, builtins: Registry = _NONE) -> Callable[..., Any]:
    """Import the function or class that `setting` names. Raises `UsageError` unless it is callable."""
    target = builtins.get(name, name)
    if not isinstance(target, str):
        return target
    module_name, _, attribute = target.rpartition(":")
    if not module_name or not attribute:
        raise no_function(name, setting, builtins)
    from_file = module_name.endswith(".py")
    module = (_import_file if from_file else _import_module)(module_name, setting)
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise UsageError(
            f"{setting}: there is no function {name}",
            have=f"{module_name} without {attribute}"
            if function is None
            else f"{attribute} is {type(function).__name__}",
            want=f"a function or class {attribute} at the top level of {module_name}",
            do=did_you_mean(attribute, known) or f"correct {setting}",
        )
    return function


def guarded(function: Callable[..., Any], name: str, setting: str, want: str) -> Callable[..., Any]:
    """Have a user's function raise `UsageError` for its own errors. A `RuntimeError` may be a peer's, or lack of memory."""

    @wraps(function)
    def called(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (BurnishError, RuntimeError, OSError, MemoryError):
            raise
        except Exception as error:
            have = failure(error)
            do = "correct the function"
            raise UsageError(f"{setting}: {name} failed", have=have, want=want, do=do) from error

    return called


def failure(error: BaseException) -> str:
    """Return type, text and place of an error in a user's function, without credentials."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    # `str(error)` may raise; `format_exception_only` handles that.
    text = traceback.format_exception_only(error)[-1].strip().partition(": ")[2]
    return f"{type(error).__name__}: {redacted(text)[:LONGEST]}{place}"


def name_of(function: Callable[..., Any]) -> str:
    """Return `module:name` of a callable at the top level of a module or of the script. Raises `UsageError`."""
    known = getattr(function, "__qualname__", repr(function))
    home = function.__module__
    for module in (sys.modules.get(str(home)), sys.modules["__main__"]):
        spec = getattr(module, "__spec__", None)
        file = getattr(module, "__file__", None)
        place = spec.name if spec else file and os.path.relpath(file)
        for name, value in [*vars(module).items()] if place else ():
            if value is function:
                return f"{place}:{name}"
    raise UsageError(
        "other processes cannot import this function",
        have=f"{known} of {home}",
        want="a function at the top level of a script or a module",
        do='move it into a file (in a notebook: begin its cell with "%%writefile rewards.py")',
    )


def fingerprint(name: str, setting: str, builtins: Registry = _NONE) -> str:
    """Return a digest of the file that defines `name`; without one, the name."""
    file = None if name in builtins else _source(name, setting)
    return name if file is None else xxhash.xxh3_128_hexdigest(file.read_bytes())


def no_function(name: str, setting: str, builtins: Registry) -> UsageError:
    """Return the error for a name without a module."""
    return UsageError(
        f"{setting}: {name!r} names no function",
        have=repr(name),
        want=", ".join(["file.py:function", "module:function", *builtins]),
        do=did_you_mean(name, builtins) or f"correct {setting}",
    )


def _source(target: str, setting: str) -> Path | None:
    """Return the file of `module:name` or `file.py:name`. Imports nothing, not even parents."""
    module = target.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module).expanduser()
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first) or PathFinder.find_spec(first, [os.getcwd()])
    name = first
    for part in rest:
        name = f"{name}.{part}"
        spec = spec and PathFinder.find_spec(name, list(spec.submodule_search_locations or []))
    if spec is None:
        raise _no_module(module, name, setting)
    file = Path(spec.origin) if spec.origin else None
    return file if file and file.suffix == ".py" and file.is_file() else None


def _import_module(name: str, setting: str) -> ModuleType:
    if not {"", os.getcwd()}.intersection(sys.path):
        sys.path.append(os.getcwd())  # `python -m` adds it, and the `burnish` script does not
    with _importing(name, setting):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise _no_module(name, error.name, setting) from error


def _import_file(name: str, setting: str) -> ModuleType:
    path = Path(name).expanduser()
    module_name = f"burnish_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(
            f"{setting}: there is no file {name}",
            have=f"no such file in {path.parent.absolute()}",
            want="a Python file",
            do=did_you_mean(path.name, [file.name for file in path.parent.glob("*.py")])
            or f"correct {setting}",
        )
    # A second setting, or a second model, gets the same class: the file runs again only after a change.
    content = xxhash.xxh3_128_hexdigest(path.read_bytes())
    known = getattr(sys.modules.get(module_name), "__spec__", None)
    if known and (known.origin, known.loader_state) == (spec.origin, content):
        return sys.modules[module_name]
    folder = str(path.parent.absolute())
    if folder not in sys.path:
        sys.path.append(folder)  # for modules beside it; installed ones come first
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up there
    with _importing(name, setting):
        spec.loader.exec_module(module)
    spec.loader_state = content
    return module


def _no_module(module: str, missing: str, setting: str) -> UsageError:
    return UsageError(
        f"{setting}: there is no module {module}",
        have=f"no module {missing} in the working directory or installed",
        want="module:function that Python can import, or file.py:function",
        do=did_you_mean(missing, [each.name for each in pkgutil.iter_modules()])
        or "install the module, or give its file: path/to/file.py:function",
    )


def _importing(name: str, setting: str) -> AbstractContextManager[None]:
    return refusing(
        f"{setting}: {name} cannot be imported",
        want="a module that Python can import",
        do=f"make `python -c 'import ...'` of it work with {sys.executable}",
    )


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return a question with the nearest known name, or None."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {close[0]!r}?" if close else None
