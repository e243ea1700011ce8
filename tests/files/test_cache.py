"""Copies of remote files. Among the cases are those in which verl's fs.py and hdfs_io.py fail."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from contracts.remote import NAMES, QUICK
from support.ranks.processes import run_ranks
from support.services.fault_proxy import Fault
from support.services.hdfs import HdfsServer
from support.services.s3 import S3Server

from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, MissingError, UsageError
from burnish.files import remote_copy as module
from burnish.files.once import made_once
from burnish.files.remote import Remote, RemoteFile, RetryPolicy
from burnish.files.remote_copy import Selected, copied, select

PIECE = 4 << 20
number = itertools.count()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def remote() -> Remote:
    return Remote(f"memory://cached {next(number)}/dir", QUICK)


@pytest.fixture
def bucket(s3_server: S3Server) -> Remote:
    s3_server.proxy.reset()
    return Remote(s3_server.make_bucket(f"cached-{next(number)}"), QUICK)


def everything(remote: Remote) -> Selected:
    return Selected(remote, tuple(remote.files()))


def copy(url: str) -> Path:
    return copied(select(Remote(url, QUICK), lambda name: True))


def asked(server: S3Server) -> list[str]:
    """The ranges of content that were asked for and not refused on purpose."""
    asked = [each for each in server.proxy.asked if "/cached-" in each.path]  # not by other tests
    gets = [each for each in asked if each.range and each.method == "GET"]
    return sorted(each.range for each in gets if each.fault is None)


def test_any_names_and_contents_are_copied_as_they_are(remote: Remote) -> None:
    contents = {name: name.encode() * 3 for name in NAMES} | {"empty": b""}
    for name, content in contents.items():
        remote.put(name, content)
    path = copied(everything(remote))
    there = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    assert there == contents


def test_files_of_many_pieces_come_back_whole(bucket: Remote, s3_server: S3Server) -> None:
    contents = {"big": os.urandom(3 * PIECE + 17), "exact": os.urandom(PIECE), "d/small": b"x"}
    for name, content in contents.items():
        bucket.put(name, content)
    path = copied(everything(bucket))
    assert {name: (path / name).read_bytes() for name in contents} == contents
    assert len(asked(s3_server)) == 6


def test_the_second_time_nothing_is_copied(bucket: Remote, s3_server: S3Server) -> None:
    bucket.put("file", b"content")
    first = copy(f"{bucket}/file")
    s3_server.proxy.reset()
    assert copy(f"{bucket}/file") == first
    assert asked(s3_server) == []


@pytest.mark.parametrize("end", ["/", "///"])
def test_a_slash_at_the_end_changes_nothing(remote: Remote, end: str) -> None:
    remote.put("a", b"1")
    assert copy(f"{remote.url}{end}") == copy(str(remote.url))


def test_a_file_of_the_same_name_and_size_but_another_content_is_copied_again(
    bucket: Remote,
) -> None:
    bucket.put("file", b"before")
    before = copy(f"{bucket}/file")
    bucket.put("file", b"after!")
    after = copy(f"{bucket}/file")
    assert (before / "file").read_bytes() == b"before"  # whoever uses it goes on to
    assert (after / "file").read_bytes() == b"after!"


def test_equal_files_of_two_places_are_two_copies(remote: Remote) -> None:
    other = Remote(f"memory://cached {next(number)}/dir", QUICK)
    for each in (remote, other):
        each.put("a", b"1")
    assert copied(everything(remote)) != copied(everything(other))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path / "b", 1),
        lambda path: (path / "b").unlink(),
        lambda path: shutil.rmtree(path),
        lambda path: (path / "b").write_bytes(b"longer than it was"),
    ],
    ids=["cut", "gone", "all gone", "longer"],
)
def test_a_copy_that_is_not_whole_any_more_is_made_again(
    remote: Remote, damage: Callable[[Path], None]
) -> None:
    for name in "ab":
        remote.put(name, name.encode() * 5)
    path = copied(everything(remote))
    damage(path)
    again = copied(everything(remote))
    assert [(again / name).read_bytes() for name in "ab"] == [b"aaaaa", b"bbbbb"]


def test_what_is_not_there_is_an_error(remote: Remote, cache: Path) -> None:
    with pytest.raises(MissingError):
        copy(f"{remote.url}/none")
    assert not cache.exists()


def test_a_copy_that_fails_is_not_there_and_says_so(
    bucket: Remote, s3_server: S3Server, cache: Path
) -> None:
    bucket.put("file", b"content")
    selection = everything(Remote(bucket.url, RetryPolicy(tries=2, first_pause=0.01)))
    s3_server.proxy.faults.append(Fault("cut answer", 10**6, "GET", after=3))
    with pytest.raises(BurnishError):
        copied(selection)
    assert [path.name for path in cache.iterdir() if not path.name.startswith(".")] == []
    s3_server.proxy.reset()
    assert (copied(selection) / "file").read_bytes() == b"content"
    assert [
        path.name for path in cache.iterdir() if path.name.endswith(("partial", "journal"))
    ] == []


def test_connections_cut_in_the_middle_of_bodies_lose_nothing(
    bucket: Remote, s3_server: S3Server
) -> None:
    content = os.urandom(6 * PIECE)
    bucket.put("file", content)
    s3_server.proxy.faults.append(Fault("cut answer", 6, "GET", after=PIECE // 2))
    assert (copied(everything(bucket)) / "file").read_bytes() == content


COPY = """
    import signal, sys, time
    from pathlib import Path
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    from burnish.files.remote_copy import copied, select
    from burnish.files.remote import Remote
    print(copied(select(Remote(sys.argv[1]), lambda name: True)), flush=True)
"""


def start(url: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(COPY), url],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.nightly
def test_processes_that_want_the_same_copy_it_once(bucket: Remote, s3_server: S3Server) -> None:
    """With different seeds of Python's hash, on which a lock's name must not depend."""
    content = os.urandom(5 * PIECE)
    bucket.put("file", content)
    s3_server.proxy.reset()
    processes = [start(str(bucket.url), PYTHONHASHSEED=str(seed)) for seed in (1, 2)]
    paths = {process.communicate(timeout=100)[0].strip() for process in processes}
    (path,) = paths
    assert Path(path, "file").read_bytes() == content
    assert len(asked(s3_server)) == 5


def test_a_killed_copy_is_taken_up_where_it_was(
    bucket: Remote, s3_server: S3Server, cache: Path
) -> None:
    content = os.urandom(12 * PIECE)
    bucket.put("file", content)
    s3_server.proxy.reset()
    # Some pieces come, then the service is silent.
    s3_server.proxy.faults += [
        Fault("silence", 100, contains="file", method="GET", after=0, seconds=30),
    ]
    s3_server.proxy.faults[0].times = 0
    process = start(str(bucket.url))
    until(lambda: len(asked(s3_server)) >= 3)
    s3_server.proxy.faults[0].times = 100
    until(lambda: len(journal(cache)) >= 3)
    process.kill()
    process.wait()
    process.stdout.close()
    kept = len([line for line in journal(cache) if line.endswith("]")])
    s3_server.proxy.reset()
    assert 3 <= kept < 12
    assert (copied(everything(bucket)) / "file").read_bytes() == content
    assert len({*asked(s3_server)}) == 12 - kept


def journal(cache: Path) -> list[str]:
    found = list(cache.glob(".*.journal"))
    return found[0].read_text().splitlines() if found else []


def until(happened: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_beginning_that_is_not_what_its_journal_says_is_copied_again(
    remote: Remote, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power loss leaves: the journal survived, the data did not."""
    content = os.urandom(2 * PIECE)
    remote.put("file", content)
    selection = everything(remote)
    monkeypatch.setattr(module._Copy, "_check_unchanged", interrupt)
    with pytest.raises(KeyboardInterrupt):
        copied(selection)
    monkeypatch.undo()
    monkeypatch.setenv("BURNISH_CACHE", str(cache))
    (partial,) = cache.glob(".*.partial")
    data = bytearray((partial / "file").read_bytes())
    data[PIECE + 5] ^= 1
    (partial / "file").write_bytes(data)
    (log,) = cache.glob(".*.journal")
    log.write_text(log.read_text() + '["file", 0, "ab')
    assert (copied(selection) / "file").read_bytes() == content


def interrupt(self: Any) -> None:
    raise KeyboardInterrupt


def test_a_file_that_changes_meanwhile_is_not_mixed(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put("file", b"before")
    selection = everything(remote)
    remote.put("file", b"after!")
    with pytest.raises(BurnishError):
        copied(selection)
    assert (copied(everything(remote)) / "file").read_bytes() == b"after!"


def test_there_has_to_be_room_before_anything_is_copied(
    remote: Remote, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put("file", b"content")
    monkeypatch.setattr(module, "_RESERVE", 1 << 60)
    with pytest.raises(BurnishError) as caught:
        copied(everything(remote))
    assert "BURNISH_CACHE" in (caught.value.do or "")


def test_a_cache_that_cannot_be_written_is_named(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put("file", b"content")
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "taken"))
    with pytest.raises(BurnishError):
        copied(everything(remote))


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "a//b", "/etc/evil"])
def test_a_name_that_leads_out_of_the_copy_is_refused(
    remote: Remote, tmp_path: Path, name: str
) -> None:
    with pytest.raises(UsageError):
        copied(Selected(remote, (RemoteFile(name, 0, "1"),)))
    assert not (tmp_path / "evil").exists()


def test_a_file_in_the_place_of_a_directory_is_an_error(remote: Remote) -> None:
    """An object store can hold both "a" and "a/b"."""
    files = tuple(RemoteFile(name, 0, "1") for name in ("a", "a/b"))
    with pytest.raises(BurnishError):
        copied(Selected(remote, files))


def test_what_is_mounted_is_used_where_it_is(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{}")
    assert copy(f"file://{tmp_path}/data.jsonl") == tmp_path
    assert not cache.exists()


def test_progress_is_shown_in_megabytes(remote: Remote) -> None:
    remote.put("file", bytes(2 * PIECE))
    shown: list[Any] = []

    class Bar:
        def advance(self, count: float = 1) -> None:
            shown.append(count)

    @contextmanager
    def watch(name: str, total: float) -> Iterator[Bar]:
        shown.append((name, total))
        yield Bar()

    copied(everything(remote), watch)
    assert shown[0] == (f"copying {remote.url}", 2 * PIECE / 1e6)
    assert sum(shown[1:]) == pytest.approx(2 * PIECE / 1e6)


@pytest.mark.nightly
def test_memory_does_not_depend_on_the_size(bucket: Remote) -> None:
    for index in range(6):
        bucket.put(f"part-{index}", bytes(20 << 20))
    measure = """
        def most():
            (line,) = [each for each in open("/proc/self/status") if each.startswith("VmHWM")]
            return int(line.split()[1]) >> 10
        selection = select(Remote(sys.argv[1]), lambda name: True)
        before = most()
        copied(selection)
        print(most() - before)
    """
    program = textwrap.dedent(COPY.rpartition("    print")[0]) + textwrap.dedent(measure)
    done = subprocess.run(
        [sys.executable, "-c", program, str(bucket.url)], capture_output=True, text=True, check=True
    )
    assert 4 < int(done.stdout) < 96


def test_an_interrupt_ends_a_copy_at_once(bucket: Remote, s3_server: S3Server) -> None:
    bucket.put("file", bytes(2 * PIECE))
    s3_server.proxy.faults.append(Fault("silence", 100, "GET", "file", seconds=1000))
    process = start(str(bucket.url))
    until(lambda: any(each.fault == "silence" for each in s3_server.proxy.asked))
    process.send_signal(signal.SIGINT)
    assert process.wait(100) != 0
    process.stdout.close()


@pytest.mark.nightly
def test_hdfs_restarted_in_the_middle_of_a_copy(hdfs_server: HdfsServer) -> None:
    remote = Remote(f"{hdfs_server.url}/cached", RetryPolicy(first_pause=0.1, longest_pause=1))
    content = os.urandom(5 * PIECE)
    remote.put("file", content)
    selection = everything(remote)
    hdfs_server.kill("datanode")
    hdfs_server.start_later("datanode")
    assert (copied(selection) / "file").read_bytes() == content


def _makes(layout: Layout, root: Path) -> bytes:
    os.environ["BURNISH_CACHE"] = str(root)

    def make() -> bytes:
        with (root / "calls").open("a") as calls:
            calls.write(f"{layout.rank}\n")
        time.sleep(0.2)
        return b"what one of them fetched"

    return made_once("below/window", make)


def test_one_process_of_a_machine_makes_what_all_get(cache: Path) -> None:
    cache.mkdir()
    assert run_ranks(_makes, 3, cache) == [b"what one of them fetched"] * 3
    assert len((cache / "calls").read_text().split()) == 1


def test_what_is_not_whole_is_made_again(cache: Path) -> None:
    assert made_once("window", lambda: b"one") == b"one"
    assert made_once("window", lambda: b"two") == b"one"
    (cache / "window").write_bytes((cache / "window").read_bytes()[:-1])
    assert made_once("window", lambda: b"two") == b"two"
    assert sorted(path.name for path in cache.iterdir()) == ["window", "window.lock"]


def test_without_a_cache_each_makes_its_own(cache: Path) -> None:
    cache.write_text("a file")
    assert made_once("window", lambda: b"one") == b"one"
    assert made_once("window", lambda: b"two") == b"two"
