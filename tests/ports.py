"""Ports for servers that open them later."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port of this machine at which nobody listens, below those that systems give to whoever asks for any.

    So no connection takes it before the server does that it is meant for, and no test at the same time.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
