"""Names of models and data sets of the Hugging Face Hub: ids and `hf://` URLs.

`OWNER/NAME[@REVISION]` names a repository; `data` also accepts `:SUBSET/SPLIT`. A text that names an existing path is a path.
`burnish.files.hub_files` asks the hub for their files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from burnish.errors import UsageError
from burnish.files.urls import is_url
from burnish.redaction import redacted

Kind = Literal["model", "dataset"]

FORMS = {
    "model": "OWNER/NAME or OWNER/NAME@REVISION",
    "dataset": "OWNER/NAME, OWNER/NAME:SUBSET/SPLIT or OWNER/NAME@REVISION:SUBSET/SPLIT",
}
"""Forms of an id."""

_NAME = r"[A-Za-z0-9][\w.-]*"
_OLD_NAME = r"[A-Za-z0-9][\w-]*"
ID = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME}|{_OLD_NAME})(?:@(?P<revision>[^:@]+))?(?::(?P<part>[^:]+))?"
)
_URL = re.compile(
    rf"hf://(?P<data>datasets/)?(?:models/)?(?P<repo>{_NAME}/{_NAME})"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/:@]+|[^/:@]+))?(?:/(?P<path>[^:]*))?(?::(?P<part>[^:]+))?"
)
_FILES = frozenset({".json", ".jsonl", ".parquet", ".csv", ".txt", ".yaml", ".py"})
"""A missing path with such a suffix is a file, not an id."""
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A commit's hash."""


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A repository of the hub, or a part of one."""

    kind: Kind
    repo: str
    """OWNER/NAME, or NAME."""
    revision: str = ""
    """A branch, a tag or a commit; "" for main."""
    part: str = ""
    """SUBSET/SPLIT of a data set, or one of the two; "" for the default ones."""
    path: str = ""
    """A file, a directory or a pattern in the repository; "" for its root."""
    is_url: bool = False
    """Whether it was given as a URL."""

    @classmethod
    def of(cls, text: object, kind: Kind) -> HubPlace | None:
        """Return the place that a setting names; None for a local path and for other URLs.

        Raises `UsageError` for an `hf://` URL without a repository, or of another kind.
        """
        if not isinstance(text, str):
            return None
        if text.startswith("hf://"):
            url_match = _URL.fullmatch(text)
            url_kind: Kind = "dataset" if url_match and url_match["data"] else "model"
            if url_match is None or (kind == "model" and url_kind == "dataset"):
                raise UsageError(
                    f"{redacted(text)} names no {kind} of the hub",
                    want=f"hf://{'datasets/' if kind == 'dataset' else ''}OWNER/NAME, with @REVISION and /PATH if wanted",
                    do="correct the URL",
                )
            path = (url_match["path"] or "").strip("/")
            revision = url_match["revision"] or ""
            part = url_match["part"] or ""
            return cls(url_kind, url_match["repo"], revision, part, path, is_url=True)
        match = None if is_url(text) else ID.fullmatch(text)
        if match is None or PurePosixPath(match["repo"]).suffix in _FILES or Path(text).exists():
            return None
        if match["part"] and (kind == "model" or local_part(text)[1]):
            return None
        return cls(kind, match["repo"], match["revision"] or "", match["part"] or "")

    def __str__(self) -> str:
        scheme = f"hf://{'datasets/' if self.kind == 'dataset' else ''}" if self.is_url else ""
        revision = f"@{self.revision}" if self.revision else ""
        path = self.path and f"/{self.path}"
        part = self.part and f":{self.part}"
        return f"{scheme}{self.repo}{revision}{path}{part}"

    @property
    def commit(self) -> str | None:
        """The commit that it names; None if its revision may move."""
        return self.revision if COMMIT.fullmatch(self.revision) else None


def local_part(text: str) -> tuple[Path, str]:
    """Return the local path that an entry of `data` names, and SUBSET/SPLIT after a folder, if any."""
    path, (folder, _, part) = Path(text).expanduser(), text.rpartition(":")
    if folder and not path.exists() and Path(folder).expanduser().is_dir():
        return Path(folder).expanduser(), part
    return path, ""


def is_elsewhere(value: object, kind: Kind = "model") -> bool:
    """Return whether a setting names a URL, or an id of the hub."""
    return isinstance(value, str) and (is_url(value) or HubPlace.of(value, kind) is not None)
