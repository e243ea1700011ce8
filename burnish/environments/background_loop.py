"""A loop for connections, which must stay alive while the worker waits for the model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import lru_cache
from typing import Any


@lru_cache
def background_loop() -> asyncio.AbstractEventLoop:
    """Return the process's loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def started(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Start a coroutine in the background."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())
