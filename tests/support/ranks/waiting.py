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
    status = Path(f"/proc/{pid}/stat")

    def is_gone() -> bool:
        try:
            return status.read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(is_gone)
