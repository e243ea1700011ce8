"""An S3 service on loopback: moto's server."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from support.services.fault_proxy import FaultProxy
from support.services.object_store import behind_proxy, serve


@dataclass(frozen=True)
class S3Server:
    """A service that runs."""

    proxy: FaultProxy

    @property
    def environ(self) -> Mapping[str, str]:
        """What a client needs to find it, of this process and of others."""
        return {
            "AWS_ENDPOINT_URL": self.proxy.url,
            "AWS_ACCESS_KEY_ID": "test-key-id",
            "AWS_SECRET_ACCESS_KEY": "test-secret-key",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def make_bucket(self, name: str) -> str:
        """The URL of a new bucket."""
        scope = "Credential=test-key-id/20260101/us-east-1/s3/aws4_request"  # moto looks for the region there
        headers = {"Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=0"}
        request = urllib.request.Request(f"{self.proxy.url}/{name}", headers=headers, method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        return f"s3://{name}"


@contextmanager
def running_s3() -> Iterator[S3Server]:
    """A service that runs inside the block."""
    with behind_proxy(__name__) as proxy:
        yield S3Server(proxy)


def _serve() -> None:
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    serve(server.get_host_and_port()[1])


if __name__ == "__main__":
    _serve()
