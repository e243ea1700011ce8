"""A viewer that is really asked over HTTP, in a thread of the test's process."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn

from burnish.view.answers import Answers
from burnish.view.server import make_app


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Viewer:
    port: int
    answers: Answers

    def ask(self, path: str, method: str = "GET", headers: Mapping[str, str] = {}) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, headers=dict(headers))
        reply = connection.getresponse()
        found = Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        connection.close()
        return found

    def get(self, path: str, status: int = 200, **values: Any) -> Any:
        """The answer to a path below /api/."""
        reply = self.ask(f"/api/{path}?{urlencode(values, doseq=True)}")
        assert reply.status == status, reply.body
        return reply.json

    def pages(self, **values: Any) -> Iterator[dict[str, Any]]:
        """Every page of rollouts."""
        cursor = ""
        while cursor is not None:
            page = self.get("rollouts", cursor=cursor, **values)
            yield page
            cursor = page["next"]


@contextmanager
def viewer(root: Path, token: str | None = None, url: str | None = None) -> Iterator[Viewer]:
    answers = Answers(root, url)
    config = uvicorn.Config(
        make_app(answers, token),
        port=0,
        log_level="critical",
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=0,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Viewer(server.servers[0].sockets[0].getsockname()[1], answers)
    finally:
        server.should_exit = True
        thread.join()
        answers.close()
