from __future__ import annotations

import builtins
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contracts.remote import QUICK, Broken, RemoteContract
from support.nightly import by_day
from support.services import shelf as shelves
from support.services.fault_proxy import Fault
from support.services.gcs import GcsServer
from support.services.hdfs import HdfsServer
from support.services.s3 import S3Server

from burnish.errors import BurnishError, MissingError, UsageError, install
from burnish.files.remote import Remote, RetryPolicy

number = itertools.count()
SHELF = Path(str(shelves.__file__))
HASTY = RetryPolicy(tries=3, seconds=10, first_pause=0.02, longest_pause=0.05, silence=2)


class TestMemory(RemoteContract):
    @pytest.fixture
    def url(self) -> str:
        return f"memory://place {next(number)}/run"


class TestFile(RemoteContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/a place"


class TestOwn(RemoteContract):
    """A class of one's own, by its file."""

    @pytest.fixture
    def url(self, shelf: Path) -> str:
        return f"{shelf}:Shelf://a box/a place"

    def test_what_fails_half_way_is_not_there(self, remote: Remote, tmp_path: Path) -> None:
        """Whatever goes wrong in it is told in one sentence."""
        (tmp_path / "source").write_bytes(bytes(17 << 20))

        def fail(count: int) -> None:
            raise Broken

        with pytest.raises(BurnishError) as caught:
            remote.put_file("file", tmp_path / "source", fail)
        assert isinstance(caught.value.__cause__, Broken)
        assert remote.files() == remote.names() == []
        assert remote.stat("file") is None


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    return shutil.copy(SHELF, tmp_path)


def test_what_can_only_be_read_is_no_destination(shelf: Path) -> None:
    Remote(f"{shelf}:Shelf://box/place").put("file", b"content")
    source = Remote(f"{shelf}:Catalogue://box/place")
    source.connect()
    assert source.read("file", 10) == b"content"
    assert source.names() == ["file"]
    for write in (lambda: source.put("file", b""), lambda: source.connect(writes=True)):
        with pytest.raises(UsageError) as caught:
            write()
        assert "write" in str(caught.value.have)


@pytest.mark.parametrize(
    ("name", "kind", "have"),
    [
        ("Closed", BurnishError, "closed"),
        ("Torn", BurnishError, "KeyError"),
        ("Missing", UsageError, "Missing"),
        ("Path", UsageError, "entries"),
    ],
)
def test_a_class_that_does_not_do_its_work(
    shelf: Path, name: str, kind: type[BurnishError], have: str
) -> None:
    with pytest.raises(kind) as caught:
        Remote(f"{shelf}:{name}://box/place").names()
    assert have in f"{caught.value.problem} {caught.value.have}"


@pytest.mark.parametrize("url", ["sftp://host/a", "nobodys.py:Store://host/a", "s4://bucket/a"])
def test_schemes_that_nobody_reads(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Remote(url).connect()
    assert caught.value.do


class TestS3(RemoteContract):
    @pytest.fixture
    def url(self, s3_server: S3Server) -> str:
        return s3_server.make_bucket(f"bucket-{next(number)}") + "/a place"


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of aiohttp to gcsfs
class TestGcs(RemoteContract):
    # The emulator takes some names for others.
    names = ("plain", "with space", "it's", "a#b", "a+b=c&d", "日本語", "deep/er/name")

    @pytest.fixture
    def url(self, gcs_server: GcsServer) -> str:
        # How the real service says that an upload was cancelled; the emulator cannot.
        gcs_server.proxy.faults.append(Fault("status", 9, "DELETE", "upload", status=499))
        return gcs_server.make_bucket(f"bucket-{next(number)}") + "/a place"


@pytest.mark.nightly
class TestHdfs(RemoteContract):
    @pytest.fixture
    def url(self, hdfs_server: HdfsServer) -> str:
        return f"{hdfs_server.url}/a place {next(number)}"


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.make_bucket(f"bucket-{next(number)}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(17 << 20))
    return path


FAULTS = {
    "503": lambda: Fault("status", 5),
    "cut in an answer": lambda: Fault("cut answer", 3, method="GET", after=1 << 20),
    "cut in an upload": lambda: Fault("cut request", 5, method="PUT", after=1 << 20),
}


@pytest.mark.parametrize("fault", by_day(FAULTS, [*FAULTS][1:]))
def test_s3_faults_that_pass_are_waited_out(
    s3_server: S3Server, bucket: str, source: Path, fault: str
) -> None:
    remote = Remote(bucket, QUICK)
    for call in (
        lambda: remote.put_file("file", source),
        lambda: remote.read("file", 1 << 30) == source.read_bytes(),
    ):
        s3_server.proxy.reset()
        s3_server.proxy.faults.append(FAULTS[fault]())
        assert call() in (None, True)
        assert remote.names() == ["file"]


@pytest.mark.nightly
def test_s3_every_call_is_tried_again(s3_server: S3Server, bucket: str) -> None:
    remote = Remote(bucket, QUICK)
    calls: dict[str, Callable[[], Any]] = {
        "put": lambda: remote.put("file", b"content"),
        "stat": lambda: remote.stat("file").size == 7,
        "files": lambda: [file.name for file in remote.files()] == ["file"],
        "names": lambda: remote.names() == ["file"],
        "remove": lambda: remote.remove("file"),
    }
    for call in calls.values():
        s3_server.proxy.faults.append(Fault("cut request", 5))
        assert call() in (None, True)
    assert remote.files() == []


@pytest.mark.nightly
def test_s3_faults_that_stay_are_named_after_so_many_tries(
    s3_server: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    s3_server.proxy.faults.append(Fault("status", 10**6))
    before = len(s3_server.proxy.asked)
    with pytest.raises(BurnishError) as caught:
        Remote(bucket, RetryPolicy(tries=4, first_pause=0.02)).put("file", b"content")
    (told,) = [each.getMessage() for each in caplog.records if each.name == "burnish"]
    assert f"{bucket}/file" in told
    assert f"{bucket}/file" in caught.value.problem
    assert (
        len(s3_server.proxy.asked) - before <= 4 * 5
    )  # in each try the client makes a few of its own
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("status", [403, 404, 400])
def test_s3_refusals_are_not_tried_again(s3_server: S3Server, bucket: str, status: int) -> None:
    s3_server.proxy.reset()
    s3_server.proxy.faults.append(Fault("status", 10**6, status=status))
    patient = Remote(bucket, RetryPolicy(first_pause=300, seconds=600))
    if status == 404:
        assert patient.stat("file") is None
    else:
        kind = UsageError if status == 403 else BurnishError
        with pytest.raises(kind):
            patient.stat("file")
    assert len(s3_server.proxy.asked) <= 2


def test_a_service_that_is_silent_is_given_up(s3_server: S3Server, bucket: str) -> None:
    s3_server.proxy.faults.append(Fault("silence", 10**6, seconds=3))
    with pytest.raises(BurnishError) as caught:
        Remote(bucket, RetryPolicy(tries=2, first_pause=0.01, silence=0.3)).stat("file")
    assert "0.3" in str(caught.value)


def test_a_bucket_that_is_not_there_is_no_reason_to_wait(s3_server: S3Server) -> None:
    remote = Remote("s3://there-is-none/run", RetryPolicy(first_pause=300, seconds=600))
    with pytest.raises(BurnishError):
        remote.put("file", b"")
    with pytest.raises(MissingError):
        remote.files()


def test_s3_without_credentials_says_which(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(UsageError) as caught:
        Remote(bucket, HASTY).stat("file")
    assert "AWS_PROFILE" in (caught.value.do or "")


def test_a_large_file_goes_up_in_parts_and_each_is_tried_again(
    s3_server: S3Server, bucket: str, source: Path
) -> None:
    s3_server.proxy.reset()
    s3_server.proxy.faults.append(Fault("status", 1, method="PUT", contains="partNumber=2"))
    Remote(bucket, QUICK).put_file("file", source)
    parts = [each.path for each in s3_server.proxy.asked if "partNumber=" in each.path]
    assert len(parts) == 4
    assert sum("partNumber=2" in each for each in parts) == 2


@pytest.mark.nightly
def test_gcs_faults_that_pass_are_waited_out(gcs_server: GcsServer) -> None:
    remote = Remote(gcs_server.make_bucket(f"bucket-{next(number)}"), QUICK)
    for fault in (Fault("status", 1), Fault("cut answer", 1, method="GET", after=2)):
        gcs_server.proxy.faults.append(fault)
        remote.put("file", b"content")
        assert remote.read("file", 10) == b"content"
        assert fault.times == 0


@pytest.mark.nightly
def test_gcs_failures_are_told_without_a_traceback(
    gcs_server: GcsServer, caplog: pytest.LogCaptureFixture
) -> None:
    remote = Remote(gcs_server.make_bucket(f"bucket-{next(number)}"), HASTY)
    gcs_server.proxy.faults.append(Fault("status", 10**6, status=409))
    with pytest.raises(BurnishError):
        remote.stat("file")
    assert "Traceback" not in caplog.text


@pytest.mark.nightly
def test_gcs_refusals_are_not_tried_again(gcs_server: GcsServer) -> None:
    remote = Remote(gcs_server.make_bucket(f"bucket-{next(number)}"), RetryPolicy(first_pause=300))
    gcs_server.proxy.faults.append(Fault("status", 10**6, status=403))
    with pytest.raises(UsageError) as caught:
        remote.stat("file")
    assert "GOOGLE_APPLICATION_CREDENTIALS" in (caught.value.do or "")


@pytest.mark.nightly
def test_hdfs_killed_and_started_again_is_waited_for(hdfs_server: HdfsServer, source: Path) -> None:
    patience = RetryPolicy(tries=100, first_pause=0.1, longest_pause=1)
    remote = Remote(f"{hdfs_server.url}/killed", patience)
    content = source.read_bytes()

    def kill_once(count: int, killed: list[bool] = []) -> None:  # noqa: B006 - remembers
        if not killed:
            killed.append(True)
            hdfs_server.kill("namenode")
            hdfs_server.start_later("namenode")

    remote.put_file("file", source, kill_once)
    assert remote.read("file", 1 << 30) == content
    assert remote.names() == ["file"]
    hdfs_server.kill("datanode")
    hdfs_server.start_later("datanode")
    assert remote.read("file", 1 << 30) == content


@pytest.mark.nightly
def test_hdfs_that_hangs_is_given_up(hdfs_server: HdfsServer) -> None:
    remote = Remote(hdfs_server.url)
    remote.put("hangs", b"content")
    hurried = Remote(hdfs_server.url, RetryPolicy(tries=2, first_pause=0.01, silence=0.5))
    hdfs_server.pause("namenode")
    try:
        with pytest.raises(BurnishError):
            hurried.stat("hangs")
    finally:
        hdfs_server.resume("namenode")
    assert remote.read("hangs", 10) == b"content"


@pytest.mark.nightly
def test_hdfs_that_is_down_is_named(hdfs_server: HdfsServer) -> None:
    remote = Remote("hdfs://127.0.0.1:9/run", RetryPolicy(tries=2, first_pause=0.01))
    with pytest.raises(BurnishError):
        remote.names()


@pytest.mark.nightly
def test_hdfs_denies_and_says_who_may(
    hdfs_server: HdfsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "a-stranger")
    with pytest.raises(UsageError) as caught:
        Remote(f"{hdfs_server.url}/denied", RetryPolicy(first_pause=300)).put("file", b"")
    assert "HADOOP_USER_NAME" in (caught.value.do or "")
    assert "\n\tat " not in str(caught.value)


@pytest.mark.parametrize("url", ["hdfs://a-name-service/run", "hdfs:///run", "hdfs://host:abc/run"])
def test_hdfs_that_no_configuration_names_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        Remote(url).names()
    assert "HADOOP_CONF_DIR" in (caught.value.do or "")


def test_a_disk_that_may_not_be_written_is_not_waited_for(tmp_path: Path) -> None:
    remote = Remote("file:///proc/run", RetryPolicy(first_pause=300))
    with pytest.raises(BurnishError):
        remote.put("file", b"")


@pytest.mark.parametrize(
    ("url", "module", "command"),
    [
        ("s3://bucket", "s3fs", install("s3")),
        ("gs://bucket", "gcsfs", install("gcs")),
        ("hdfs://host:1", "hdfs_native", install("hdfs")),
    ],
)
def test_a_missing_package_fails_with_the_command_that_installs_it(
    url: str, module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == module:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingError) as caught:
        Remote(url).connect()
    assert (caught.value.have, caught.value.do) == (f"no module {module}", command)


@pytest.mark.nightly
def test_a_write_that_hung_is_remembered_and_a_reading_is_not(
    s3_server: S3Server, bucket: str
) -> None:
    Remote(bucket).below("deep").put("file", b"content")
    remote = Remote(bucket, RetryPolicy(tries=3, seconds=30, first_pause=0.01, silence=2))
    s3_server.proxy.faults.append(Fault("silence", 1, "GET", seconds=5))
    assert remote.below("deep").read("file", 10) == b"content"
    assert not remote.may_change_late
    s3_server.proxy.faults.append(Fault("silence", 1, "PUT", seconds=5))
    remote.below("deep").put("file", b"content")
    assert remote.may_change_late
    assert not any(fault.times for fault in s3_server.proxy.faults)
