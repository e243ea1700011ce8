"""Requests to an endpoint with OpenAI's API: its key, what is tried again, and what its refusals mean."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from burnish.errors import BurnishError, UsageError
from burnish.files.strict_json import clipped
from burnish.rollout.connections import connection_to

KEY = "OPENAI_API_KEY"
"""The environment variable that holds the key."""
_RETRIES = 6
# Seconds between attempts. They double each time, unless the endpoint names a time.
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 30.0
# After these statuses, as after 500 and above, another attempt may succeed.
_BUSY = frozenset({408, 409, 425, 429})
# Most bytes of an answer. A completion of a million tokens has 4 MB.
_MOST_BYTES = 64 << 20


class _TransientError(Exception):
    """A failure after which a retry may succeed: the reason, and the seconds to wait if they are known."""


class CompletionsApi:
    """An endpoint. Threads may share it, each with a connection of its own."""

    def __init__(self, url: str, timeout: float, *, at: str, named: str, bounded: str = "") -> None:
        """`at` and `named`: the settings of its URL and of the model, for errors. `bounded`: what lowers its load.

        Raises `UsageError` for a key that cannot be one.
        """
        self._place = urlsplit(url.rstrip("/"))
        self._timeout = timeout
        self._at = at
        self._named = named
        self._bounded = bounded
        key = os.environ.get(KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UsageError(
                f"the environment variable {KEY} is not a key",
                have="control characters, or letters beyond ASCII",
                do=f"set {KEY} to the endpoint's key alone",
            )
        self._key = key
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    @property
    def url(self) -> str:
        """Return where it is."""
        return self._place.geturl()

    def connection(self) -> HTTPConnection:
        """Return a connection, not yet open."""
        return connection_to(self._place, self._timeout)

    def post(
        self,
        connection: HTTPConnection,
        path: str,
        body: Mapping[str, Any],
        stop: threading.Event,
    ) -> bytes | None:
        """Return the answer to a request, or None after `stop`.

        Raises `BurnishError` if the endpoint refuses it or keeps failing.
        """
        wait = _FIRST_WAIT
        reason = ""
        for _ in range(_RETRIES):
            try:
                return self._tried(connection, f"{self._place.path}/{path}", json.dumps(body))
            except _TransientError as error:
                reason, asked = error.args
                if stop.wait(min(asked or wait, _LONGEST_WAIT)):
                    return None
                wait *= 2
        raise BurnishError(
            f"the endpoint {self.url} failed {_RETRIES} times in a row",
            have=reason,
            want="an answer",
            do=f"check that it runs; {self._bounded}rollout.timeout_seconds bounds how long one may take",
        )

    def _tried(self, connection: HTTPConnection, path: str, body: str) -> bytes:
        try:
            connection.request("POST", path, body, self._headers)
            response = connection.getresponse()
            content = response.read(_MOST_BYTES)
        except (OSError, HTTPException) as error:
            connection.close()
            raise _TransientError(f"{type(error).__name__}: {error}", None) from error
        if response.status != 200:
            wait = response.headers.get("Retry-After")
            raise self._refusal(response.status, response.reason, content, wait)
        return content

    def _refusal(self, status: int, reason: str, content: bytes, wait: str | None) -> Exception:
        quoted = self.quote(f"{status} {reason}: ".encode() + content)
        if status in _BUSY or status >= 500:
            seconds = (wait or "").strip()
            return _TransientError(quoted, float(seconds) if seconds.isdecimal() else None)
        remedies = {
            401: f"set the environment variable {KEY} to a key of this endpoint",
            403: f"set the environment variable {KEY} to a key that may use this model",
            404: f"correct {self._at}, which often ends in /v1, or {self._named}",
        }
        return BurnishError(
            f"the endpoint {self.url} refuses a request",
            have=quoted,
            want="status 200",
            do=remedies.get(status, "correct the setting that the endpoint names"),
        )

    def quote(self, content: bytes) -> str:
        """Return the beginning of what the endpoint says, without the key, which it may repeat."""
        text = content.decode(errors="replace")
        return clipped(text.replace(self._key, "***") if self._key else text)
