"""The notes in which a server says where it is, and with which token it may be asked."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from burnish.errors import UsageError
from burnish.methods.parts.serve import _answering_servers, _read_note, _write_note

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


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A server that answers everything with this body."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\x00\n",
        b"[]\n",
        b'{"arrays": {}, "error": {"kind": "UsageError", "problem": "sorry"}}\n',
        b'{"arrays": {}, "error": {"kind": [1], "problem": 3, "odd": 1}}\n',
        b'{"arrays": {}, "failed": "t0ken hunter2 \x1b[2J"}\n'.replace(b"\x1b", b"\\u001b"),
        b"",
    ],
)
def test_a_server_that_does_not_say_what_it_is_is_named_once(
    body: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard = set[str]()
    with answering(body) as url:
        _write_note(tmp_path / "a.json", {"url": url, "token": "hunter2"})
        for _ in range(3):
            assert _answering_servers(tmp_path, "model", heard) == {}
    [record] = caplog.records
    assert url in record.getMessage()
    assert "hunter2" not in record.getMessage()


def test_a_server_of_another_model_is_refused(tmp_path: Path) -> None:
    with answering(b'{"arrays": {}, "model": "another"}\n') as url:
        _write_note(tmp_path / "a.json", {"url": url, "token": "hunter2"})
        with pytest.raises(UsageError):
            _answering_servers(tmp_path, "model", set())
        assert _answering_servers(tmp_path, "another", set()) == {url: "hunter2"}
