"""Listen at addresses. Loads no torch."""

from __future__ import annotations

import errno
import logging
import socket
from http.server import ThreadingHTTPServer
from typing import Any

from burnish.errors import UsageError

log = logging.getLogger("burnish")


class HttpServer(ThreadingHTTPServer):
    """Serves HTTP at a socket that listens, each connection in a thread."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: Any) -> None:
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell only those who look for it: clients may hang up at any time."""
        log.debug("a request from %s failed", client_address, exc_info=True)


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
