"""What all tests share: services, each started when the first test asks for it, and where temporary files go."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from support.nightly import BY_NIGHT
from support.ranks import fork_server
from support.services.gcs import GcsServer, running_gcs
from support.services.hdfs import HdfsServer, running_hdfs
from support.services.s3 import S3Server, running_s3

Server = TypeVar("Server", S3Server, GcsServer)

os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # before huggingface_hub reads it: no test asks the hub

# How long an example takes says only what else the machine does.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("night", UNTIMED, max_examples=BY_NIGHT)
settings.register_profile("day", UNTIMED, max_examples=30)
settings.load_profile("day")
MEMORY = Path("/dev/shm")
GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Files of the drivers of NVIDIA and AMD."""


def pytest_configure(config: pytest.Config) -> None:
    """Choose where temporary files go, and start what forks all workers and their processes: they find both by the environment."""
    if is_roomy(MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    if config.getoption("markexpr", "").startswith("(nightly or hypothesis)"):
        settings.load_profile("night")
    # What is imported before a fork may touch a GPU, of which the fork then has no use.
    if (workers := config.getoption("numprocesses", None)) and not any(map(os.path.exists, GPUS)):
        fork_server.address()
        python = shlex.join([sys.executable, str(fork_server.__file__)])
        config.option.tx = [f"popen//python={python}"] * workers


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Give memory back if all tests passed; otherwise temporary files are there to be looked at."""
    root = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT", os.devnull))
    if root == MEMORY and exitstatus == 0 and "PYTEST_XDIST_WORKER" not in os.environ:
        files: pytest.TempPathFactory = session.config._tmp_path_factory
        shutil.rmtree(files.getbasetemp(), ignore_errors=True)


def is_roomy(directory: Path) -> bool:
    """Whether the file system and the memory behind it have more than 8 GiB left."""
    memory = Path("/proc/meminfo")
    if not (os.access(directory, os.W_OK) and memory.is_file()):
        return False
    available = int(memory.read_text().split("MemAvailable:")[1].split()[0]) << 10
    return min(available, shutil.disk_usage(directory).free) > 8 << 30


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what collecting makes from the garbage collector, which would look at millions of objects again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than this process may use cores, by its affinity and by the quota of its control group.

    Tests wait a third of their time, for processes, time-outs and disks.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = Path("/sys/fs/cgroup/cpu.max")
    limit, period = quota.read_text().split() if quota.is_file() else ("max", "")
    usable = cores or 1
    return 1 + (usable if limit == "max" else max(1, min(usable, int(limit) // int(period))))


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary directory for this process and its children, as the killed ones among them leave their files."""
    base = tmp_path_factory.getbasetemp()  # stays where pytest keeps those of the latest runs
    multiprocessing.util.get_temp_dir()  # which is removed later than this one
    with (
        tempfile.TemporaryDirectory(
            prefix="burnish-tests-",
            dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"),
            ignore_cleanup_errors=True,
        ) as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", name)
        # Proofs that have passed are those of all processes of the session.
        shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        patch.setenv("BURNISH_CACHE", str(shared / "burnish-cache"))
        patch.setattr(tempfile, "tempdir", name)
        fork_server.fork_companions()
        yield Path(name)


@pytest.fixture(scope="session")
def _s3() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def s3_server(_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 service that works, and that clients find by the environment."""
    yield from _found_by_clients(_s3, monkeypatch)


@pytest.fixture(scope="session")
def _gcs() -> Iterator[GcsServer]:
    with running_gcs() as server:
        yield server


@pytest.fixture
def gcs_server(_gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """A Cloud Storage service that works, and that clients find by the environment."""
    yield from _found_by_clients(_gcs, monkeypatch)


def _found_by_clients(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, text in server.environ.items():
        monkeypatch.setenv(name, text)
    yield server
    server.proxy.reset()


@pytest.fixture(scope="session")
def _hdfs() -> Iterator[HdfsServer]:
    with running_hdfs() as server:
        yield server


@pytest.fixture
def hdfs_server(_hdfs: HdfsServer) -> HdfsServer:
    """A real HDFS, whatever the test before did to it. Takes ten seconds the first time."""
    _hdfs.ensure_up()
    return _hdfs
