"""A Cloud Storage service on loopback: an emulator in a process of its own, behind a proxy that can break it.

What is stored lies in that process's memory. It ends when its standard input is closed, which the end
of the test's process does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from fault_proxy import FaultProxy


@dataclass(frozen=True)
class GcsServer:
    """A service that runs."""

    proxy: FaultProxy

    @property
    def environ(self) -> Mapping[str, str]:
        """What a client needs to find it, of this process and of others."""
        return {"STORAGE_EMULATOR_HOST": self.proxy.url}

    def make_bucket(self, name: str) -> str:
        """The URL of a new bucket."""
        body = json.dumps({"name": name}).encode()
        headers = {"Content-Type": "application/json"}
        address = f"{self.proxy.url}/storage/v1/b?project=tests"
        request = urllib.request.Request(address, body, headers, method="POST")
        urllib.request.urlopen(request, timeout=30).close()
        return f"gs://{name}"


@contextmanager
def running_gcs() -> Iterator[GcsServer]:
    """A service that runs inside the block."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = int(process.stdout.readline())
        with FaultProxy("127.0.0.1", port) as proxy:
            yield GcsServer(proxy)
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def _serve() -> None:
    from gcp_storage_emulator.server import create_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    create_server("127.0.0.1", port, in_memory=True).start()
    print(port, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _serve()
