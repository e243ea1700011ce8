"""Services that tests share, each started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gcs_server import GcsServer, running_gcs
from hdfs_server import HdfsServer, running_hdfs
from s3_server import S3Server, running_s3


@pytest.fixture(scope="session")
def _s3() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def s3_server(_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 service that works, and that clients find by the environment."""
    for name, text in _s3.environ.items():
        monkeypatch.setenv(name, text)
    yield _s3
    _s3.proxy.reset()


@pytest.fixture(scope="session")
def _gcs() -> Iterator[GcsServer]:
    with running_gcs() as server:
        yield server


@pytest.fixture
def gcs_server(_gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """A Cloud Storage service that works, and that clients find by the environment."""
    for name, text in _gcs.environ.items():
        monkeypatch.setenv(name, text)
    yield _gcs
    _gcs.proxy.reset()


@pytest.fixture(scope="session")
def _hdfs() -> Iterator[HdfsServer]:
    with running_hdfs() as server:
        yield server


@pytest.fixture
def hdfs_server(_hdfs: HdfsServer) -> HdfsServer:
    """A real HDFS, whatever the test before did to it. Takes ten seconds the first time."""
    _hdfs.ensure_up()
    return _hdfs
