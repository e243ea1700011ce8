"""A service on loopback that answers as the Hugging Face Hub does: repositories, trees, ranges of files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

REVISION = "0" * 39 + "1"


class HubServer(ThreadingHTTPServer):
    """Repositories by "models/OWNER/NAME", each with its files by path."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, dict[str, bytes]], gated: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.gated = gated
        self.asked: list[tuple[str, str]] = []
        self.failures = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0]).strip("/")
        self.server.asked.append((path, self.headers.get("Range", "")))
        if self.server.failures:
            self.server.failures -= 1
            self._answer(503, b"", {})
            return
        api = path.startswith("api/")
        parts = path.removeprefix("api/").split("/")
        if not api:
            parts = parts if parts[0] == "datasets" else ["models", *parts]
        key, rest = "/".join(parts[:3]), parts[3:]
        files = self.server.repositories.get(key)
        if key == self.server.gated and not api:
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif files is None:
            self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif rest and rest[1] not in ("main", REVISION):
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif not api:
            self._file(files.get("/".join(rest[2:])))
        elif rest and rest[0] == "tree":
            self._tree(files, "/".join(rest[2:]))
        else:
            info = {"id": key.partition("/")[2], "sha": REVISION, "siblings": [], "tags": []}
            self._answer(200, json.dumps(info).encode(), {})

    do_HEAD = do_GET

    def _tree(self, files: Mapping[str, bytes], below: str) -> None:
        prefix, deep = f"{below}/" if below else "", "recursive=true" in self.path.lower()
        found = {}
        for name, data in files.items():
            if name.startswith(prefix):
                head, slash, _ = name.removeprefix(prefix).partition("/")
                if slash:
                    folder = prefix + head
                    found[folder] = {"type": "directory", "path": folder, "size": 0, "oid": "0"}
                if deep or not slash:
                    oid = hashlib.sha1(data).hexdigest()
                    found[name] = {"type": "file", "path": name, "size": len(data), "oid": oid}
        if found or not below:
            self._answer(200, json.dumps(list(found.values())).encode(), {})
        else:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _file(self, data: bytes | None) -> None:
        asked = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if data is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif not asked[1]:
            self._answer(200, data, {})
        elif int(asked[0]) >= len(data):
            self._answer(416, b"", {})
        else:
            start, stop = int(asked[0]), min(int(asked[2]) + 1, len(data))
            span = f"bytes {start}-{stop - 1}/{len(data)}"
            self._answer(206, data[start:stop], {"Content-Range": span})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def running_hub(
    repositories: Mapping[str, dict[str, bytes]], gated: str = ""
) -> Iterator[HubServer]:
    """A service that runs inside the block."""
    with HubServer(repositories, gated) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
