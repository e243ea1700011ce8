"""Endpoints with OpenAI's API on this machine."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, Any] | str | None]
"""Status and body; None hangs up, and a negative status is the seconds to wait for before another attempt."""


class Endpoint:
    """An endpoint on this machine. It records requests, answers sums, or what `script` says of a request and its number."""

    def __init__(self, script: Callable[[dict[str, Any], int], Answer | None]) -> None:
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.script, self.lock, self.at_once, self.most = script, threading.Lock(), 0, 0
        self.met: Counter[tuple[str, int]] = Counter()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint.lock:
                    endpoint.asked.append((self.path, self.headers["Authorization"], body))
                    endpoint.at_once += 1
                    endpoint.most = max(endpoint.most, endpoint.at_once)
                    name = (text_of(body), body.get("seed", 0))
                    endpoint.met[name] += 1
                    number = endpoint.met[name]
                status, said = endpoint.script(body, number) or (200, answer(body))
                with endpoint.lock:
                    endpoint.at_once -= 1
                if said is None:
                    self.close_connection = True
                    return
                content = (said if isinstance(said, str) else json.dumps(said)).encode()
                self.send_response(abs(status))
                if status < 0:
                    self.send_header("Retry-After", "0")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


def text_of(body: dict[str, Any]) -> str:
    """The prompt of a request, whether text, messages or token ids."""
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def answer(body: dict[str, Any], text: str | None = None, reason: str = "stop") -> dict[str, Any]:
    """An answer as OpenAI's API has it: the sum, if `text` does not say otherwise."""
    first, second = text_of(body).rstrip("=").split("+")
    text = str(int(first) + int(second)) if text is None else text
    said = {"message": {"role": "assistant", "content": text}} if "messages" in body else {}
    return {"choices": [{"index": 0, "finish_reason": reason, "text": text, **said}]}


@contextmanager
def serving(script: Callable[[dict[str, Any], int], Answer | None]) -> Iterator[Endpoint]:
    endpoint = Endpoint(script)
    thread = threading.Thread(target=endpoint.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.http.shutdown()
        endpoint.http.server_close()
        thread.join()
