"""What every kind of remote storage does."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from burnish.errors import CorruptError, MissingError, UsageError
from burnish.files.remote import Remote, RemoteFile, RetryPolicy

QUICK = RetryPolicy(tries=6, seconds=30, first_pause=0.02, longest_pause=0.2, silence=20)
"""Enough to get over what tests do."""

NAMES = (
    "plain", "with space", "it's", 'a "quote"', "100%", "%20", "a#b", "a?b", "a+b=c&d", "$(touch x)",
    "`id`", "; rm -rf ~", "[0-9]*.bin", "-rf", ".hidden", "日本語", "Ünïcode", "a\\b", "deep/er/name",
)  # fmt: skip
"""Names that shells, URLs and patterns would take apart."""


class Broken(Exception):
    """A mistake in a program, not a fault of a service."""


class RemoteContract:
    """Subclasses have a fixture `url`: a place where nothing is yet."""

    names = NAMES

    @pytest.fixture
    def remote(self, url: str) -> Remote:
        return Remote(url, QUICK)

    def test_where_nothing_is_nothing_is_found(self, remote: Remote) -> None:
        assert remote.files() == remote.names() == remote.names("a/b") == []
        assert remote.stat("a") is remote.stat() is None
        remote.remove("a")
        remote.remove_below("a/b")
        for call in (
            lambda: remote.read("a", 10),
            lambda: remote.read_into("a", bytearray(1)),
        ):
            with pytest.raises(MissingError) as caught:
                call()
            assert caught.value.problem == f"there is no {remote.url}/a"

    def test_any_name_is_kept_as_it_is(self, remote: Remote) -> None:
        for name in self.names:
            remote.put(name, name.encode())
        files = remote.files()
        assert [file.name for file in files] == sorted(self.names)
        for name in self.names:
            assert remote.read(name, 100) == name.encode()
            assert remote.stat(name) in files
            remote.remove(name)
        assert remote.files() == []

    def test_content_comes_back_and_is_replaced_whole(self, remote: Remote) -> None:
        for content in (b"first and longer", b"second", b""):
            remote.put("file", content)
            assert remote.read("file", 100) == content
            assert remote.stat("file").size == len(content)

    def test_another_content_is_another_version(self, remote: Remote) -> None:
        versions = []
        for content in (b"aa", b"bb", b"cc"):
            remote.put("file", content)
            versions.append(remote.stat("file").version)
            assert remote.stat("file").version == versions[-1] != ""
        assert len(set(versions)) == 3

    def test_directories_are_listed_at_any_depth_or_one(self, remote: Remote) -> None:
        sizes = {"step-1/a": 1, "step-1/b/c": 2, "step-10/a": 3, "top": 4}
        for name, size in sizes.items():
            remote.put(name, b"x" * size)
        assert {file.name: file.size for file in remote.files()} == sizes
        assert [file.name for file in remote.files("step-1")] == ["step-1/a", "step-1/b/c"]
        assert [file.name for file in remote.below("step-1").files()] == ["a", "b/c"]
        assert remote.below("step-1").parent().names() == remote.names()
        assert remote.names() == ["step-1", "step-10", "top"]
        assert remote.names("step-1") == ["a", "b"]
        assert remote.stat("step-1") is None
        assert Remote(f"{remote.url}/top").stat() == RemoteFile("", 4, remote.stat("top").version)
        remote.remove_below("step-1")
        assert [file.name for file in remote.files()] == ["step-10/a", "top"]
        assert remote.names() == ["step-10", "top"]

    def test_any_range_can_be_read(self, remote: Remote) -> None:
        content = np.random.default_rng(0).bytes(5000)
        remote.put("file", content)
        for offset, length in ((0, 5000), (0, 1), (4999, 1), (17, 0), (1234, 2345)):
            buffer = bytearray(length)
            remote.read_into("file", buffer, offset)
            assert buffer == content[offset : offset + length]

    @pytest.mark.parametrize("offset", [2, 4, 5, 100])
    def test_a_file_that_ends_before_is_said_to_be_short(self, remote: Remote, offset: int) -> None:
        remote.put("file", b"1234")
        buffer = bytearray(b"untouched")
        with pytest.raises(CorruptError):
            remote.read_into("file", buffer, offset)
        assert buffer == b"untouched"

    def test_a_longer_file_than_expected_is_not_read(self, remote: Remote) -> None:
        remote.put("file", b"12345")
        with pytest.raises(CorruptError):
            remote.read("file", 4)

    @pytest.mark.parametrize("size", [0, 5, (17 << 20) + 3])
    def test_a_file_is_sent(self, remote: Remote, tmp_path: Path, size: int) -> None:
        content = np.random.default_rng(1).bytes(size)
        (tmp_path / "source").write_bytes(content)
        sent: list[int] = []
        remote.put_file("deep/file", tmp_path / "source", sent.append)
        assert sum(sent) == size
        assert remote.stat("deep/file").size == size
        assert remote.read("deep/file", size) == content

    def test_what_fails_half_way_is_not_there(self, remote: Remote, tmp_path: Path) -> None:
        (tmp_path / "source").write_bytes(bytes(17 << 20))

        def fail(count: int) -> None:
            raise Broken

        with pytest.raises(Broken):
            remote.put_file("file", tmp_path / "source", fail)
        assert remote.files() == remote.names() == []
        assert remote.stat("file") is None

    def test_a_source_that_is_not_there_is_the_callers_mistake(
        self, remote: Remote, tmp_path: Path
    ) -> None:
        with pytest.raises(FileNotFoundError):
            remote.put_file("file", tmp_path / "none")

    def test_threads_share_one(self, remote: Remote) -> None:
        contents = {f"file {n}": np.random.default_rng(n).bytes(1000 + n) for n in range(16)}
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(remote.put, contents, contents.values()))
            assert list(pool.map(lambda name: remote.read(name, 2000), contents)) == list(
                contents.values()
            )

    def test_a_pickled_one_opens_its_own_connection(self, remote: Remote) -> None:
        remote.put("file", b"content")
        again = pickle.loads(pickle.dumps(remote))  # noqa: S301 - made here
        assert again.read("file", 10) == b"content"

    def test_a_forked_process_does_not_use_its_parents(
        self, remote: Remote, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        remote.connect()
        parent = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(RuntimeError):
            remote.names()

    @pytest.mark.parametrize("name", ["..", "a/../../b", "./a"])
    def test_a_name_does_not_lead_out(self, remote: Remote, name: str) -> None:
        for call in (remote.stat, remote.remove, remote.remove_below, remote.names):
            with pytest.raises(UsageError):
                call(name)
