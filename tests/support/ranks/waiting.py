"""For tests that watch processes which they did not start: wait until something holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(fine: Callable[[], Any], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not fine():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_gone(pid: int) -> None:
    """Wait until a process has ended, also if nobody waits for it."""
    until(lambda: _state(pid) in ("", "Z"))


def until_stopped(pid: int) -> None:
    """Wait until a signal has stopped a process."""
    until(lambda: _state(pid) == "T")


def _state(pid: int) -> str:
    """The system's letter for what a process does, or nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
