"""The notes in which a server says where it is, and with which token it may be asked."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from burnish.train.serve import _read_note, _write_note

NOTE = {"url": "http://127.0.0.1:1", "token": "hunter2"}


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_only_its_user_can_read_a_note(mask: int, tmp_path: Path) -> None:
    """From its creation on: no file with the token was ever open to others."""
    path, before = tmp_path / "a.json", os.umask(mask)
    modes = list[int]()
    try:
        created = os.open

        def watched(name: str | Path, flags: int, mode: int = 0o777) -> int:
            modes.append(mode)
            return created(name, flags, mode)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "open", watched)
            _write_note(path, NOTE)
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert _read_note(path) == (NOTE["url"], NOTE["token"])
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_note_takes_the_place_of_an_open_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    path.chmod(0o644)
    _write_note(path, NOTE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_no_note_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "device.json").symlink_to("/dev/zero")
    (tmp_path / "half.json").write_text(json.dumps(NOTE)[:20])
    (tmp_path / "list.json").write_text("[]")
    assert [_read_note(path) for path in tmp_path.iterdir()] == [None] * 5
