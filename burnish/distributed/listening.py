"""Listen at addresses. Loads no torch."""

from __future__ import annotations

import errno
import socket

from burnish.errors import UsageError


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises `UsageError` if it cannot."""
    try:
        if not 0 <= port < 1 << 16:  # create_server would leave its socket open
            raise OSError(errno.EINVAL, f"there is no port {port}")
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"Burnish cannot listen at {host}:{port}",
            have=error,
            want="an address of this machine, and a port that is free",
            do="give --port another number, or 0 for any that is free",
        ) from error


def url_of(listener: socket.socket) -> str:
    """Return the listener's URL for other machines."""
    host, port = listener.getsockname()[:2]
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
