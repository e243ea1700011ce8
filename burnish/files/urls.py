"""URLs of files and directories: which kinds there are, what they are made of, and how they are shown.

A URL is taken as it is written: nothing in it is decoded, so a space, `%` or `#` is part of a name.
Left out: whatever is behind a URL (`burnish.files.remote`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from burnish.errors import UsageError

SCHEMES: Mapping[str, str] = {
    "hdfs": "hdfs://NAMENODE:PORT/PATH",
    "s3": "s3://BUCKET/PATH",
    "gs": "gs://BUCKET/PATH",
    "file": "file:///PATH",
    "memory": "memory://PATH",
}
"""The kinds of URL that are understood, and how each is written."""

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_SECRETS = (
    (re.compile(r"(://)[^/\s@]+@"), r"\1***@"),
    (
        re.compile(r"(?i)((?:signature|credential|security-token|access_token|secret)=)[^&\s]+"),
        r"\1***",
    ),
    (re.compile(r"(?i)(authorization:?\s+(?:\w+\s+)?)\S+"), r"\1***"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), "***"),
)


def is_url(text: str) -> bool:
    """Whether this is a URL of any kind, and not a path on this machine."""
    return _URL.match(text) is not None


def redacted(text: str) -> str:
    """The text with whatever looks like a credential in it replaced by `***`."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


@dataclass(frozen=True, slots=True)
class Url:
    """Where something lies, taken apart."""

    scheme: str
    """One of `SCHEMES`."""
    host: str
    """The bucket, or the name node and its port; "" where there is none."""
    path: str
    """Below the host, without a slash at either end; "" for the host itself."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take a URL apart; slashes at its end are dropped.

        Raises `UsageError` for another scheme, a missing host, credentials, and `.` or `..` in the path.
        """
        found = _URL.match(text)
        scheme = found["scheme"].lower() if found else ""
        if found is None or scheme not in SCHEMES:
            raise _refusal(text, "is no URL that is understood", f"one of {', '.join(SCHEMES)}")
        host, _, path = found["rest"].partition("/")
        if scheme == "memory":
            host, path = "", found["rest"]
        path = path.strip("/")
        if "@" in host:
            raise UsageError(
                f"{redacted(text)} has credentials in it",
                want="a URL without: it is written to logs and into the run's directory",
                do="give them in the environment or the files where that service looks for them",
            )
        if scheme == "file" and host not in ("", "localhost"):
            raise _refusal(text, "names another machine", "file:///PATH, absolute, on this one")
        if scheme in ("s3", "gs") and not host:
            raise _refusal(text, "names no bucket", SCHEMES[scheme])
        if any(part in (".", "..") for part in path.split("/")):
            raise _refusal(text, "has . or .. in it", "a path without")
        return cls(scheme, "" if scheme == "file" else host, path)

    @property
    def name(self) -> str:
        """The last part of the path; "" for the host itself."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The directory that this lies in; the host itself for the host."""
        return replace(self, path=self.path.rpartition("/")[0])

    def below(self, name: str) -> Self:
        """What lies under this; itself for ""."""
        return replace(self, path="/".join(part for part in (self.path, name.strip("/")) if part))

    def __str__(self) -> str:
        if self.scheme == "memory":
            return f"memory://{self.path}"
        return f"{self.scheme}://{self.host}/{self.path}".rstrip("/")


def _refusal(text: str, problem: str, want: str) -> UsageError:
    return UsageError(f"{redacted(text)} {problem}", want=want, do="correct the URL")
