"""What a kind of remote storage has to offer, behind which the kinds differ.

Writes appear whole under their name or not at all. Every method raises whatever its library raises;
`verdict` says what that means. Left out: trying again, and errors for people (`burnish.files.remote`).
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from burnish.files.patience import Pulse
from burnish.files.storage import Bytes

Verdict = Literal["missing", "denied", "wrong", "transient"]
"""What a fault means: there is no such thing; not for this user; will never work; may work next time."""

_VERDICTS: dict[int, Verdict] = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
}
_WRONG = frozenset({
    errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOSYS,
    errno.ENOTEMPTY, errno.EDQUOT, errno.ELOOP, errno.EREMCHG,
})  # fmt: skip
_UNFINISHED = ".part"
_BY_KIND: tuple[tuple[type[OSError], Verdict], ...] = (
    (FileNotFoundError, "missing"),
    (NotADirectoryError, "missing"),
    (PermissionError, "denied"),
    (IsADirectoryError, "wrong"),
    (FileExistsError, "wrong"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """A file that is there."""

    path: str
    """Its path, as its backend writes it."""
    size: int
    """Bytes."""
    version: str
    """Another text whenever the content is another: an ETag, or the time of its last change."""


class Backend(Protocol):
    """One service or file system. Paths are absolute, its own way of writing them, and without a slash at the end."""

    faults: tuple[type[Exception], ...]
    """What its calls raise when they cannot do what they should; anything else is a mistake in a program."""

    def verdict(self, error: Exception) -> Verdict:
        """What one of `faults` means."""

    def files(self, path: str, *, deep: bool) -> Iterator[Found]:
        """The files of a directory, and if `deep` those further below it; none where there is no such directory."""

    def names(self, path: str) -> Iterator[str]:
        """Names of files and directories directly in a directory; none where there is no such directory."""

    def info(self, path: str) -> Found:
        """A file; what `verdict` calls missing where there is none."""

    def read(self, path: str, offset: int, size: int) -> bytes:
        """So many bytes of a file, fewer at its end."""

    def put(self, path: str, data: Bytes) -> None:
        """Make or replace a file."""

    def put_file(self, path: str, source: Path, pulse: Pulse) -> None:
        """Make or replace a file with the content of one on this machine, in bounded memory."""

    def remove(self, path: str) -> None:
        """Remove a file; nothing where there is none."""

    def remove_below(self, path: str, pulse: Pulse) -> None:
        """Remove a directory with all in it; nothing where there is none."""


def unfinished(name: str) -> str:
    """A name for a file that is being written, never the same twice, where a whole one would be seen half there."""
    return f".{name}.{uuid.uuid4().hex}{_UNFINISHED}"


def is_unfinished(name: str) -> bool:
    """Whether that is a name made by `unfinished`. Such a file is never listed; one that a kill left goes with its directory."""
    return name.startswith(".") and name.endswith(_UNFINISHED)


def verdict_of(error: OSError) -> Verdict:
    """What the system's errors, and those made like them, mean."""
    for kind, verdict in _BY_KIND:
        if isinstance(error, kind):
            return verdict
    if error.errno in _WRONG:
        return "wrong"
    return _VERDICTS.get(error.errno or 0, "transient")
