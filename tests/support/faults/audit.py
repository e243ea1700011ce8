"""What a process does that could run somebody else's code: a hook of the interpreter that writes it down.

A line of JSON per event: every class that is looked up for a pickle and who asked, every call of
`torch.load`, whatever it is told to allow, code that is unmarshalled, compiled or run from below a
directory, and every file below it that is opened.
"""

from __future__ import annotations

import json
import os
import sys
from functools import wraps
from types import FrameType
from typing import Any

import torch

_ASKERS = {
    ("distributed_c10d.py", "_tensor_to_object"): "a collective",
    ("connection.py", "recv"): "a pipe",
}
"""Who may unpickle: what a live process of the same run has sent."""


def install(log: str, directory: str) -> None:
    """From here on, and in forks of this process, write events to `log`."""
    directory = os.path.realpath(directory)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event not in (
            "pickle.find_class",
            "open",
            "exec",
            "compile",
            "marshal.loads",
            "marshal.load",
            "torch.load",
        ):
            return
        found = _described(event, arguments, directory)
        if found is not None:
            os.write(out, json.dumps(found).encode() + b"\n")

    sys.addaudithook(hook)
    torch.load = torch.serialization.load = _noted(torch.load)


def _noted(load: Any) -> Any:
    """torch's own unpickler for `weights_only` looks up no class that the interpreter would tell of."""

    @wraps(load)
    def noted(*args: Any, **options: Any) -> Any:
        sys.audit("torch.load")
        return load(*args, **options)

    return noted


def _described(event: str, arguments: tuple[object, ...], directory: str) -> list[str] | None:
    if event == "pickle.find_class":
        return [event, f"{arguments[0]}.{arguments[1]}", _asker(sys._getframe(2))]
    if event == "torch.load":
        return [event, "", _asker(sys._getframe(3))]
    if event.startswith("marshal"):
        asker = _asker(sys._getframe(2))
        return None if asker == "an import" else [event, "", asker]
    what = arguments[0]
    if event in ("exec", "compile"):
        what = getattr(what, "co_filename", arguments[-1])
    if not isinstance(what, (str, bytes, os.PathLike)):
        return None
    path = os.path.realpath(os.fsdecode(what))
    return [event, os.path.relpath(path, directory)] if path.startswith(f"{directory}/") else None


def _asker(frame: FrameType | None) -> str:
    """Who it is for, by the stack."""
    names = []
    while frame is not None:
        code = frame.f_code
        name = os.path.basename(code.co_filename)
        if name.startswith("<frozen importlib"):
            return "an import"
        if (name, code.co_name) in _ASKERS:
            return _ASKERS[name, code.co_name]
        names.append(f"{name}:{code.co_name}")
        frame = frame.f_back
    return " < ".join(names[:6])
