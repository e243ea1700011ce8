"""For servers that open their port later: ports that nobody else takes."""

from __future__ import annotations

import errno
import random
import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` at which nobody listens, below those that systems give to whoever asks for any.

    So no connection takes it before the server does that it is meant for, and no test at the same time.
    Raises `OSError` where this machine has no such address.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket(family) as trial:
            try:
                trial.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        return port
