"""Pause a rank at a place of its run until somebody kills it. Every Python that has this directory in PYTHONPATH runs this file first.

`BURNISH_TESTS_PAUSES` names a directory with `plan.json`, a list of [rank, place, nth]: a place is as in `support.runs.training_files.At`. The first
entry that no file of its number tells of is the one that counts. The rank writes its file when it gets there.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Pausing(importlib.abc.MetaPathFinder):
    """Changes one function of a module once it is imported."""

    def __init__(self, reached: Path, place: str, nth: int) -> None:
        self._reached, self._left = reached, nth
        self._module, _, self._path = place.partition(":")

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec

    def _change(self, holder: Any) -> None:
        *parents, name = self._path.split(".")
        for parent in parents:
            holder = getattr(holder, parent)
        called = getattr(holder, name)

        def paused(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._reached.touch()
                while True:
                    time.sleep(3600)
            return called(*args, **kwargs)

        setattr(holder, name, paused)


def install(directory: Path, rank: int) -> None:
    plan = json.loads((directory / "plan.json").read_text())
    files = [directory / str(number) for number in range(len(plan))]
    for reached, (paused, place, nth) in zip(files, plan, strict=True):
        if not reached.exists():
            if paused == rank:
                sys.meta_path.insert(0, Pausing(reached, place, nth))
            return


if "BURNISH_TESTS_PAUSES" in os.environ and "RANK" in os.environ:
    install(Path(os.environ["BURNISH_TESTS_PAUSES"]), int(os.environ["RANK"]))
