from __future__ import annotations

import pytest
from support.checkpoints.states import FaultyStorage

from burnish.errors import BurnishError
from burnish.files.durable import (
    discard,
    move_aside,
    naming_failures,
    read_whole,
    write_durably,
)
from burnish.files.storage import LocalStorage

LOCAL = LocalStorage()


def test_written_content_is_synced_before_it_has_its_name(tmp_path):
    storage = FaultyStorage()
    write_durably(storage, tmp_path / "f", b"new")
    kinds = [operation.partition(" ")[0] for operation in storage.operations]
    assert kinds == ["create", "pwrite", "sync", "rename", "sync_dir"]
    assert (tmp_path / "f").read_bytes() == b"new"


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path, fail_at):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(OSError, match="made to fail"):
        write_durably(FaultyStorage(fail_at), tmp_path / "f", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_reading_has_a_limit(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    assert read_whole(LOCAL, tmp_path / "f", 5) == b"12345"
    with pytest.raises(ValueError, match=r"5 .* 4"):
        read_whole(LOCAL, tmp_path / "f", 4)


def test_what_is_moved_aside_keeps_its_name_or_gets_a_number(tmp_path):
    for content in (b"1", b"2", b"3"):
        (tmp_path / "f").write_bytes(content)
        move_aside(LOCAL, tmp_path / "f", tmp_path / "aside")
    found = {path.name: path.read_bytes() for path in (tmp_path / "aside").iterdir()}
    assert found == {"f": b"1", "f.2": b"2", "f.3": b"3"}


def test_discarding_renames_first(tmp_path):
    (tmp_path / "step" / "model").mkdir(parents=True)
    storage = FaultyStorage()
    discard(storage, tmp_path / "step", tmp_path / "trash")
    assert "rename step step" in storage.operations
    assert [path.name for path in tmp_path.rglob("*")] == ["trash"]


def test_failures_get_a_name():
    with (
        pytest.raises(BurnishError, match=r"saving failed\n  have: .*disk"),
        naming_failures("saving failed"),
    ):
        raise OSError("disk")
