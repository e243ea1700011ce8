from __future__ import annotations

import socket

import pytest

from burnish.distributed.ports import format_address, reserve_port


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
HOSTS = ["127.0.0.1", "localhost", pytest.param("::1", marks=needs_ipv6)]


@pytest.mark.parametrize("host", HOSTS)
def test_nobody_else_gets_a_reserved_port(host):
    with reserve_port(host) as reserved:
        with socket.socket(reserved.socket.family) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind((reserved.host, reserved.port))
        with socket.create_connection((host, reserved.port), timeout=5):
            pass


def test_the_port_is_free_afterwards():
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.port
    with socket.create_server(("127.0.0.1", port)):
        pass


@needs_ipv6
def test_no_host_means_both_families():
    with reserve_port("") as reserved:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, reserved.port), timeout=5).close()


def test_a_host_elsewhere_is_refused():
    with pytest.raises(OSError, match="assign"), reserve_port("192.0.2.199"):
        pass


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("node1", "node1:29500"),
        ("10.0.0.1", "10.0.0.1:29500"),
        ("fd00::2", "[fd00::2]:29500"),
        ("[fd00::2]", "[fd00::2]:29500"),
        ("fe80::1%eth0", "[fe80::1%eth0]:29500"),
    ],
)
def test_format_address(host, text):
    assert format_address(host, 29500) == text
