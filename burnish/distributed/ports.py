"""TCP ports that stay ours between being chosen and being used, and addresses written right.

A port that is found free, let go, and opened again a moment later may be another program's by then.
Here the socket that found it keeps it, and is itself what is used. Left out: ports given from
outside (MASTER_PORT), which whoever opens them binds directly.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReservedPort:
    """A port held by a listening socket."""

    host: str
    """The numeric address it is bound to; `::` or `0.0.0.0` for all."""
    port: int
    """The number the system gave."""
    socket: socket.socket
    """Bound and listening: bound alone would not keep others out where SO_REUSEADDR is set."""


@contextmanager
def reserve_port(host: str) -> Iterator[ReservedPort]:
    """Hold a free port of `host`, a name or address of this machine; "" means all of its addresses.

    Without a host it listens for IPv4 and IPv6 alike, where the machine has both. The port is let
    go at the end of the block. Raises `OSError` for a host that is not this machine.
    """
    with _listening(host) as listener:
        address = listener.getsockname()
        yield ReservedPort(address[0], address[1], listener)


def _listening(host: str) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    if not host:
        return socket.create_server(("", 0))
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(address[0]), 0), family=family)


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address: `[fd00::2]:29500`."""
    bare = host.strip("[]")
    try:
        bracketed = ipaddress.ip_address(bare.partition("%")[0]).version == 6
    except ValueError:
        bracketed = False
    return f"[{bare}]:{port}" if bracketed else f"{bare}:{port}"
