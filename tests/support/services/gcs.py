"""A Cloud Storage service on loopback: an emulator."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from support.ranks.ports import free_port
from support.services.fault_proxy import FaultProxy
from support.services.object_store import behind_proxy, serve


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
    with behind_proxy(__name__) as proxy:
        yield GcsServer(proxy)


def _serve() -> None:
    from gcp_storage_emulator.server import create_server

    port = free_port()
    create_server("127.0.0.1", port, in_memory=True).start()
    serve(port)


if __name__ == "__main__":
    _serve()
