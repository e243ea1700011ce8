from __future__ import annotations

import errno
import os

import pytest

from burnish.files.storage import Entry, LocalStorage

LOCAL = LocalStorage()


def test_a_created_file_has_its_size_and_keeps_what_is_written(tmp_path):
    with LOCAL.create(tmp_path / "f", 10_000) as file:
        assert file.size() == 10_000
        file.pwrite(b"abc", 5000)
        file.sync()
    assert (tmp_path / "f").stat().st_blocks * 512 >= 10_000
    assert (tmp_path / "f").read_bytes() == bytes(5000) + b"abc" + bytes(4997)
    with pytest.raises(FileExistsError):
        LOCAL.create(tmp_path / "f", 1)


def test_short_reads_and_writes_are_continued(tmp_path, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:5]], at))
    data = bytes(range(256))
    with LOCAL.create(tmp_path / "f", 256) as file:
        file.pwrite(data, 0)
        found = bytearray(200)
        file.pread_into(found, 56)
    assert found == data[56:]
    assert (tmp_path / "f").read_bytes() == data


def test_a_write_that_writes_nothing_is_an_error(tmp_path, monkeypatch):
    with LOCAL.create(tmp_path / "f", 4) as file:
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
        with pytest.raises(OSError, match=f"Errno {errno.EIO}"):
            file.pwrite(b"abc", 0)


def test_reading_past_the_end_is_an_error(tmp_path):
    with (
        LOCAL.create(tmp_path / "f", 4) as file,
        pytest.raises(EOFError, match="1 bytes"),
    ):
        file.pread_into(bytearray(3), 2)


def test_a_disk_that_is_full_fails_at_creation(tmp_path, monkeypatch):
    def full(fd, start, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: .*f'"):
        LOCAL.create(tmp_path / "f", 4)


def test_a_file_system_that_cannot_allocate_gets_the_length(tmp_path, monkeypatch):
    def cannot(fd, start, size):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    with LOCAL.create(tmp_path / "f", 4) as file:
        assert file.size() == 4


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=name):
            LOCAL.open(tmp_path / name)
    with pytest.raises(OSError, match="directory"):
        LOCAL.open(tmp_path, write=True)


def test_entries_tell_links_from_what_they_point_to(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_bytes(b"xyz")
    (tmp_path / "c").symlink_to(tmp_path / "b")
    assert LOCAL.entries(tmp_path) == [
        Entry("a", "file", 3),
        Entry("b", "directory", 0),
        Entry("c", "other", 0),
    ]
    assert LOCAL.entries(tmp_path / "absent") == []


def test_removing_does_not_follow_links(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "f").write_bytes(b"")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    LOCAL.remove(tmp_path / "tree")
    LOCAL.remove(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "f").exists()


def test_rename_replaces_files_and_not_filled_directories(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(name.encode())
    LOCAL.rename(tmp_path / "a" / "f", tmp_path / "b" / "f")
    assert (tmp_path / "b" / "f").read_bytes() == b"a"
    (tmp_path / "a" / "g").write_bytes(b"")
    with pytest.raises(OSError, match="not empty"):
        LOCAL.rename(tmp_path / "a", tmp_path / "b")


def test_free_space_is_what_the_system_says(tmp_path):
    found = os.statvfs(tmp_path)
    assert LOCAL.free_bytes(tmp_path) == pytest.approx(found.f_bavail * found.f_frsize, rel=0.05)


def test_what_lies_at_a_path(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    kinds = {
        name: LocalStorage().kind(tmp_path / name) for name in ("file", "link", "no", "file/x")
    }
    assert kinds == {"file": "file", "link": "other", "no": None, "file/x": None}
    assert LocalStorage().kind(tmp_path) == "directory"
