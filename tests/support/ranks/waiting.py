"""For tests that watch processes which they did not start: wait until something holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(fine: Callable[[], Any], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not fine():
        assert time.monotonic() < deadline
        time.sleep(0.05)
