"""A service on loopback that answers as the Hugging Face Hub does: repositories, revisions, trees, files, LFS, commits."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

Files = dict[str, bytes]
TOKEN = "hf_good"
# Files that are stored by LFS, behind a redirect.
_LARGE = (".safetensors", ".parquet")


class HubServer(ThreadingHTTPServer):
    """Repositories by "models/OWNER/NAME", each with the files of its branch main by path.

    A change of them is a new commit. Commits that were asked for once are kept.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Files]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = dict(repositories)
        self.branches: dict[tuple[str, str], Files] = {}
        """Files of further branches."""
        self.commits: dict[tuple[str, str], Files] = {}
        self.blobs: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}
        """Where "models/NAME" is now."""
        self.gated = ""
        """A repository whose files are refused."""
        self.private = ""
        """A repository that only `TOKEN` sees."""
        self.read_only = ""
        """A repository that nobody may write to."""
        self.visible: dict[str, str] = {}
        """Of repositories that were made here: private or public."""
        self.messages: list[str] = []
        """Of the commits that were sent."""
        self.failures = 0
        """How many requests fail with 503."""
        self.cuts = 0
        """How many files are cut in the middle."""
        self.wrong: dict[str, bytes] = {}
        """Other contents of files than the tree says, by path."""
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, key: str, revision: str = "main") -> str | None:
        """The commit of a revision; None if there is none of that name."""
        if (key, revision) in self.commits:
            return revision
        main = self.repositories.get(key)
        files = main if revision == "main" else self.branches.get((key, revision))
        if files is None:
            return None
        listed = sorted((name, _sha256(data)) for name, data in files.items())
        commit = hashlib.sha1(json.dumps(listed).encode()).hexdigest()
        self.commits[key, commit] = dict(files)
        return commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path == "api/agent-harnesses":  # is asked by huggingface_hub where an agent runs it
            return self._answer(404)
        self.server.asked.append((self.command, path))
        if self.server.failures:
            self.server.failures -= 1
            return self._answer(503)
        if path.startswith("blobs/"):
            _, digest, name = path.split("/", 2)
            return self._send(name, self.server.blobs[digest])
        api = path.startswith("api/")
        parts = path.removeprefix("api/").split("/")
        if not api:
            parts = parts if parts[0] == "datasets" else ["models", *parts]
        if new := self.server.moved.get("/".join(parts[:2])):
            root = f"/api/{new}" if api else f"/{new.removeprefix('models/')}"
            return self._answer(307, b"", {"Location": "/".join([root, *parts[2:]])})
        key, rest = "/".join(parts[:3]), parts[3:]
        if path == "api/whoami-v2" or rest[:1] == ["auth-check"]:
            return self._permission(key if rest else "")
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if key not in self.server.repositories or (key == self.server.private and not known):
            return self._refuse(401, "RepoNotFound")
        if key == self.server.gated and not api:
            return self._refuse(403, "GatedRepo")
        revision, below = unquote(rest[1]) if rest else "main", unquote("/".join(rest[2:]))
        commit = self.server.commit(key, revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        files = self.server.commits[key, commit]
        if not api:
            return self._file(below, files.get(below), commit)
        if rest and rest[0] == "tree":
            return self._json([_entry(name, data) for name, data in sorted(files.items())])
        return self._json({"id": key.partition("/")[2], "sha": commit, "siblings": [], "tags": []})

    def _permission(self, key: str) -> None:
        """Whether the token may write to a repository, or is one at all."""
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "")
        if key and key not in self.server.repositories:
            return self._refuse(404, "RepoNotFound")
        if key and key == self.server.read_only:
            return self._answer(403)
        return self._json({"name": "me", "orgs": []})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, body = self.path.partition("?")[0].strip("/"), self._body()
        self.server.asked.append((self.command, path))
        if path == "api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401)
        if path == "api/repos/create":
            made = json.loads(body)
            key = f"models/{made['organization']}/{made['name']}"
            self.server.visible[key] = made.get("visibility", "public")
            status = 409 if key in self.server.repositories else 200
            self.server.repositories.setdefault(key, {})
            return self._json({"url": f"{self.server.url}/{key.partition('/')[2]}"}, status)
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                href = f"{self.server.url}/lfs/{each['oid']}"
                each["actions"] = {"upload": {"href": href}}
            return self._json({"transfer": "basic", "objects": objects})
        key, verb, *below = "/".join(path.split("/")[1:4]), *path.split("/")[4:]
        if verb == "branch":
            self.server.branches.setdefault((key, below[0]), {})
            return self._answer(200)
        main = self.server.repositories[key]
        files = self.server.branches.get((key, below[0]), main) if below else main
        if verb == "preupload":
            named = json.loads(body)["files"]
            for each in named:
                large = each["path"].endswith(_LARGE)
                each |= {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            return self._json({"files": named})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                data = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                data = self.server.blobs[value["oid"]]
            else:
                self.server.messages.append(value["summary"])
                continue
            files[value["path"]] = data
        commit, repo = self.server.commit(key), key.partition("/")[2]
        address = f"{self.server.url}/{repo}/commit/{commit}"
        return self._json({"commitUrl": address, "commitOid": commit})

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rpartition("/")[2]] = self._body()
        self._answer(200)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _file(self, name: str, data: bytes | None, commit: str) -> None:
        if data is None:
            return self._refuse(404, "EntryNotFound")
        entry, headers = _entry(name, data), {"X-Repo-Commit": commit}
        if "lfs" not in entry:
            return self._send(name, data, headers | {"ETag": f'"{entry["oid"]}"'})
        digest = entry["lfs"]["oid"]
        self.server.blobs[digest] = data
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        # Another host, as the hub's: a relative address is followed with the headers of the hub.
        where = f"http://localhost:{self.server.server_address[1]}/blobs/{digest}/{name}"
        return self._answer(302, b"", headers | {"Location": where})

    def _send(self, name: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        headers = dict(headers or {})
        if self.command == "HEAD":
            return self._answer(200, data, headers)
        data = self.server.wrong.get(name, data)
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, size = int(first), len(data)
        if last:
            data, headers["Content-Range"] = data[start : int(last) + 1], f"bytes */{size}"
            return self._answer(206, data, headers)
        if start:
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        if self.server.cuts:
            self.server.cuts -= 1
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            self.wfile.write(data[start : start + (len(data) - start) // 2])
            self.close_connection = True
            return None
        return self._answer(206 if start else 200, data[start:], headers)

    def _json(self, value: object, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"", {"X-Error-Code": code})

    def _answer(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def _entry(path: str, data: bytes) -> dict[str, object]:
    """One file as a tree lists it."""
    oid = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    entry = {"type": "file", "path": path, "size": len(data), "oid": oid}
    if path.endswith(_LARGE):
        entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 100}
    return entry


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def hub_variables(**variables: str) -> Iterator[None]:
    """Set HF_ENDPOINT, HF_HOME and their like for huggingface_hub, which reads them when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        importlib.reload(constants)
        yield
    importlib.reload(constants)


@contextmanager
def running_hub(repositories: Mapping[str, Files]) -> Iterator[HubServer]:
    """A service that runs inside the block."""
    with HubServer(repositories) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
