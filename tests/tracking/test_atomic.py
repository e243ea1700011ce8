from pathlib import Path

import pytest

from burnish.tracking.atomic import discard_leftovers, write_atomically


def test_a_file_is_replaced_and_nothing_else_left(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_atomically(path, "one")
    write_atomically(path, "twö")
    assert path.read_bytes() == "twö".encode()
    write_atomically(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    assert [found.name for found in path.parent.iterdir()] == ["file.txt"]


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    write_atomically(path, "one")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "two")
    assert path.read_text() == "one"
    assert [found.name for found in tmp_path.iterdir()] == ["file.txt"]


def test_what_killed_writers_left_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "file.txt", "one")
    (tmp_path / ".hidden").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", _die)
        patch.setattr("os.rename", _die)
        patch.setattr("os.unlink", _die)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(tmp_path / "file.txt", "two")
    assert len(list(tmp_path.iterdir())) == 3
    discard_leftovers(tmp_path)
    discard_leftovers(tmp_path / "nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "file.txt"]


def _die(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
