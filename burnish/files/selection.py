"""Which files behind a URL are meant: one, those of a directory, or those that fit a pattern.

The rules are those of paths on this machine: a name that is there is itself even where it has `*` in
it, `*` and `?` stay within a directory, `**` crosses them, and neither finds hidden files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from burnish.errors import MissingError, few
from burnish.files.remote import Remote, RemoteFile

_DO = "correct the URL, or put it there"
_WILD = re.compile(r"[*?[]")


@dataclass(frozen=True, slots=True)
class Selection:
    """Files below one URL, as they are at the moment."""

    remote: Remote
    """What their names are relative to."""
    files: tuple[RemoteFile, ...]
    """At least one, by name."""


def select(remote: Remote, wanted: Callable[[str], bool]) -> Selection:
    """The file at a URL, or the files directly in its directory that `wanted` says yes to, or that fit it as a pattern.

    Raises `MissingError` where that is nothing.
    """
    only = _only(remote)
    if only is not None:
        return only
    here = remote.files(deep=False)
    if files := tuple(file for file in here if wanted(file.name)):
        return Selection(remote, files)
    if _WILD.search(remote.url.path) and not here:
        return _select_pattern(remote)
    raise _nothing(remote, here, "a file, a directory of such, or a pattern that matches")


def select_directory(
    remote: Remote, wanted: Callable[[str], bool], *, deep: bool = False
) -> Selection:
    """The files directly in a directory, and if `deep` those further below it, that `wanted` says yes to.

    Raises `MissingError` where there are none.
    """
    here = remote.files(deep=deep)
    if files := tuple(file for file in here if wanted(file.name)):
        return Selection(remote, files)
    raise _nothing(remote, here, "a directory with files")


def select_file(remote: Remote) -> Selection:
    """The file at a URL. Raises `MissingError` where there is none."""
    only = _only(remote)
    if only is None:
        raise _nothing(remote, remote.files(deep=False), "a file")
    return only


def _only(remote: Remote) -> Selection | None:
    found = remote.stat() if remote.url.path else None
    if found is None:
        return None
    file = RemoteFile(remote.url.name, found.size, found.version)
    return Selection(remote.parent(), (file,))


def _nothing(remote: Remote, here: Sequence[RemoteFile], want: str) -> MissingError:
    names = [file.name for file in here]
    return MissingError(
        f"there is nothing to read at {remote}", have=few(names) or "no file", want=want, do=_DO
    )


def _select_pattern(remote: Remote) -> Selection:
    parts = remote.url.path.split("/")
    plain = next(index for index, part in enumerate(parts) if _WILD.search(part))
    pattern = parts[plain:]
    above = remote
    for _ in pattern:
        above = above.parent()
    found = above.files(deep=len(pattern) > 1 or pattern == ["**"])
    files = tuple(file for file in found if _fits(file.name.split("/"), pattern))
    if not files:
        raise MissingError(
            f"nothing fits the pattern {remote.url}",
            have=f"below {above}: {few([file.name for file in found]) or 'no file'}",
            want="a pattern that matches a file",
            do=_DO,
        )
    return Selection(above, files)


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path fit those of a pattern, as `glob.glob(..., recursive=True)` has it."""
    if not pattern:
        return not parts
    if not parts:
        return False
    hidden = parts[0].startswith(".")
    if pattern[0] == "**":
        here = len(pattern) > 1 and _fits(parts, pattern[1:])
        last = len(pattern) == len(parts) == 1
        return here or (not hidden and (last or _fits(parts[1:], pattern)))
    if hidden and not pattern[0].startswith("."):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])
