"""URLs of files and directories. Nothing is decoded: a space, `%` or `#` is part of a name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from burnish.errors import UsageError
from burnish.extend import SOURCES
from burnish.redaction import redacted

SCHEMES: Mapping[str, str] = {
    "hdfs": "hdfs://NAMENODE:PORT/PATH",
    "s3": "s3://BUCKET/PATH",
    "gs": "gs://BUCKET/PATH",
    "file": "file:///PATH",
    "memory": "memory://PATH",
}
"""The built-in URL schemes of files, each with its form. `burnish.files.hub` handles `hf://`."""

_OWN = r"[^:\n]+:[A-Za-z_]\w*"
_URL = re.compile(rf"(?P<scheme>{_OWN}|[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)


def is_url(text: str) -> bool:
    """Return whether the text is a URL of any scheme."""
    return _URL.match(text) is not None


@dataclass(frozen=True, slots=True)
class Url:
    """A parsed URL."""

    scheme: str
    """One of `SCHEMES`, an entry point's name, or file.py:Class or module:Class of one's own."""
    host: str
    """The bucket, or the name node and its port; "" if there is none."""
    path: str
    """The path below the host without slashes at its ends; "" for the host itself."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a URL, and drop slashes at its end.

        Raises `UsageError` for an unknown scheme, a missing host, credentials, and `.` or `..`.
        """
        match = _URL.match(text)
        if match is None:
            raise _refusal(text, "is not a URL", f"one of {', '.join(SCHEMES)}")
        scheme = match["scheme"] if ":" in match["scheme"] else match["scheme"].lower()
        SOURCES.target(scheme, redacted(text))
        host, _, path = (
            ("", "", match["rest"]) if scheme == "memory" else match["rest"].partition("/")
        )
        path = path.strip("/")
        if "@" in host:
            raise UsageError(
                f"{redacted(text)} contains credentials",
                want="a URL without them: it is written to logs and into the run's directory",
                do="give credentials in the environment or the files where the service's tools look for them",
            )
        if scheme == "file" and host not in ("", "localhost"):
            raise _refusal(text, "names another machine", "file:///PATH, absolute, on this one")
        if scheme in ("s3", "gs") and not host:
            raise _refusal(text, "names no bucket", SCHEMES[scheme])
        if any(part in (".", "..") for part in path.split("/")):
            raise _refusal(text, "has . or .. in it", "a path without them")
        return cls(scheme, "" if scheme == "file" else host, path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The directory above; the host is its own parent."""
        return replace(self, path=self.path.rpartition("/")[0])

    @property
    def key(self) -> str:
        """The absolute path in the client's form."""
        if self.scheme in ("s3", "gs"):
            return f"{self.host}/{self.path}".rstrip("/")
        return f"/{self.path}"

    def below(self, name: str) -> Self:
        """Return the URL of a name below this one; itself for ""."""
        return replace(self, path="/".join(part for part in (self.path, name.strip("/")) if part))

    def __str__(self) -> str:
        if self.scheme == "memory":
            return f"{self.scheme}://{self.path}"
        return f"{self.scheme}://{self.host}/{self.path}".rstrip("/")


def _refusal(text: str, problem: str, want: str) -> UsageError:
    return UsageError(f"{redacted(text)} {problem}", want=want, do="correct the URL")
