"""Files of models and data sets of the Hugging Face Hub.

The cache is huggingface_hub's (`HF_HOME`). Missing files are downloaded (`HF_ENDPOINT`, `HF_TOKEN`), unless `HF_HUB_OFFLINE`
is set.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Self, TypeVar

from burnish.errors import BurnishError, CorruptError, MissingError, UsageError, few, neighbours
from burnish.files.hub import COMMIT, FORMS, ID, HubPlace
from burnish.files.remote import RetryPolicy, reason, retry

T = TypeVar("T")

_SMALL = ("README.md", "config.json", "adapter_config.json")
"""Files that are downloaded first, with the repository's list of files."""
_POLICY = RetryPolicy(tries=4, seconds=20, silence=1e6)
"""huggingface_hub itself retries downloads and has deadlines. But it requests a list of files only once."""

log = logging.getLogger("burnish")


@dataclass(frozen=True, slots=True)
class HubFiles:
    """The files of a repository at a commit."""

    place: HubPlace
    """With a commit as its revision."""

    @classmethod
    def of(cls, place: HubPlace) -> Self:
        """Return the files at the commit of the place's revision."""
        if place.commit:
            return cls(place)
        from huggingface_hub import HfApi, errors

        query = {"repo_id": place.repo, "repo_type": place.kind, "revision": place.revision or None}
        try:
            commit = HfApi().resolve_revision(**query, local_files_only=True)  # type: ignore[arg-type]
        except errors.RevisionResolutionError:
            commit = _answer(place, lambda: HfApi().resolve_revision(**query))  # type: ignore[arg-type]
        return cls(replace(place, revision=commit.resolved))

    def __str__(self) -> str:
        return str(self.place)

    def files(self) -> dict[str, int]:
        """Return the repository's files with sizes; offline, those in the cache."""
        from huggingface_hub import errors, get_cached_repo_tree

        root = self._snapshot(_SMALL, shown=False)
        try:
            tree = get_cached_repo_tree(
                self.place.repo, repo_type=self.place.kind, revision=root.name
            )
        except errors.CachedRepoTreeNotFoundError:
            cached = [path for path in sorted(root.rglob("*")) if path.is_file()]
            return {path.relative_to(root).as_posix(): path.stat().st_size for path in cached}
        return {file.path: file.size for file in tree}

    def names(self) -> list[str]:
        """Return the names of files directly in the directory."""
        folder = PurePosixPath(self.place.path)
        paths = map(PurePosixPath, self.files())
        return [path.name for path in paths if path.parent == folder]

    def fetch(self, names: Sequence[str], *, shown: bool = False) -> Path:
        """Download those of `names` that the cache lacks; return the repository's directory there.

        Raises `CorruptError` if a file differs from the hub's hash.
        """
        root = self._snapshot(_SMALL, shown=False)
        missing = [name for name in names if not (root / name).is_file()]
        if missing:
            if shown:
                log.info("downloading %s: %s", self, few(missing))
            self._snapshot([glob.escape(name) for name in missing], shown=shown)
            for name in missing:
                _check_hash(root / name, self.place)
        return root

    def file(self, name: str) -> Path:
        """Return a file of the repository. Raises `MissingError`."""
        name = "/".join(part for part in (self.place.path, name) if part)
        if name not in (listed := self.files()):
            have = few(list(listed)) or "no file"
            raise MissingError(f"{self} has no file {name}", have=have, do="correct the name")
        return self.fetch([name]) / name

    def read_into(self, name: str, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from byte `offset` of a file, in the cache or else on the hub."""
        from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache

        http: Any = import_module("huggingface_hub.utils")
        query = {"repo_type": self.place.kind, "revision": self.place.revision}
        size = len(buffer)
        cached_path = try_to_load_from_cache(self.place.repo, name, **query)
        headers = http.build_hf_headers() | {"range": f"bytes={offset}-{offset + size - 1}"}
        url = hf_hub_url(self.place.repo, name, **query)

        def ask() -> bytes:
            if isinstance(cached_path, str):
                with open(cached_path, "rb") as file:
                    return os.pread(file.fileno(), size, offset)
            patience = constants.HF_HUB_DOWNLOAD_TIMEOUT
            answer = http.http_backoff("GET", url, headers=headers, timeout=patience)
            http.hf_raise_for_status(answer)
            return bytes(answer.content)

        data = _answer(self.place, ask)
        if len(data) != size:
            raise CorruptError(
                f"the hub did not send the requested bytes of {name} of {self}",
                have=f"{len(data)} bytes",
                want=f"{size} from byte {offset}",
                do="see that nothing between here and the hub changes requests",
            )
        buffer[:] = data

    def _snapshot(self, patterns: Sequence[str], *, shown: bool) -> Path:
        from huggingface_hub import constants, snapshot_download

        directory = _answer(
            self.place,
            lambda: snapshot_download(
                self.place.repo,
                repo_type=self.place.kind,
                revision=self.place.revision,
                allow_patterns=list(patterns),
                local_files_only=constants.HF_HUB_OFFLINE,  # else versions before 2.4 request a list
            ),
            shown=shown,
        )
        return Path(directory)


def _answer(place: HubPlace, call: Callable[[], T], *, shown: bool = False) -> T:
    """Call the hub, again if the failure may pass."""
    from huggingface_hub import errors

    try:
        with _quiet(bars=shown and sys.stderr.isatty()):
            return retry(
                lambda pulse: call(), lambda error, failures: _is_transient(error), _POLICY
            )
    except (OSError, _transport(), errors.RevisionResolutionError) as error:
        raise _explanation(place, error) from error


def push(
    folder: Path,
    repo: str,
    message: str,
    *,
    private: bool,
    branch: str | None = None,
    shown: bool = True,
) -> str:
    """Upload a directory to a model's repository or branch, created if needed; return the commit's URL.

    Raises `UsageError` for an invalid id, and without permission to write.
    """
    from huggingface_hub import HfApi, errors

    match = ID.fullmatch(repo)
    if match is None or "/" not in repo or match["revision"] or match["part"]:
        raise UsageError(f"{repo!r} names no repository", want="OWNER/NAME", do="correct the name")
    api = HfApi()
    try:
        with _quiet(bars=shown and sys.stderr.isatty()):
            api.create_repo(repo, private=private, exist_ok=True)
            if branch is not None:
                api.create_branch(repo, branch=branch, exist_ok=True)
            sent = api.upload_folder(
                repo_id=repo, folder_path=folder, commit_message=message, revision=branch
            )
    except errors.OfflineModeIsEnabled as error:
        raise _offline(repo) from error
    except (OSError, _transport()) as error:
        if _status(error) in (401, 403):
            raise _forbidden(repo, error) from error
        raise BurnishError(
            f"{folder} could not be sent to {repo}", have=reason(error), do="start again"
        ) from error
    return str(sent.commit_url)


def require_writable(repo: str) -> None:
    """Raise `UsageError` if the token may not write to a repository, or a new one. Warn if the hub does not answer."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        raise _offline(repo)
    api = HfApi()
    try:
        with _quiet(bars=False):
            try:
                api.auth_check(repo, write=True)
            except errors.RepositoryNotFoundError:  # it will be made
                api.whoami()
    except (OSError, _transport()) as error:
        if _status(error) in (401, 403):
            raise _forbidden(repo, error) from error
        log.warning("whether %s may be written to is not known: %s", repo, reason(error))


def _offline(repo: str) -> UsageError:
    problem = f"nothing can be sent to {repo}"
    return UsageError(problem, have="HF_HUB_OFFLINE", do="unset HF_HUB_OFFLINE")


def _forbidden(repo: str, error: BaseException) -> UsageError:
    from huggingface_hub import constants

    status = _status(error)
    return UsageError(
        f"writing to {repo} is not allowed",
        have=f"{status} from {constants.ENDPOINT}" if status else reason(error),
        want=f"a token that may write to repositories of {repo.partition('/')[0]}",
        do="run hf auth login, or set HF_TOKEN",
    )


def _check_hash(path: Path, place: HubPlace) -> None:
    """Compare a file's hash with its blob's name: sha256, or git's sha1."""
    blob = path.resolve()
    size = blob.stat().st_size
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        digest = hashlib.sha256()
    elif COMMIT.fullmatch(blob.name):
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    else:
        return  # a cache without links does not name files by their hash
    with blob.open("rb") as file:
        hashlib.file_digest(file, lambda: digest)
    if digest.hexdigest() != blob.name:
        blob.unlink()
        path.unlink(missing_ok=True)
        raise CorruptError(
            f"{path.name} of {place} arrived with another hash than the hub's",
            have=digest.hexdigest(),
            want=blob.name,
            do="start again; the file was removed from the cache",
        )


def _status(error: BaseException) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _transport() -> type[Exception]:
    from huggingface_hub import errors

    return errors.HfHubHTTPError.__mro__[1]


def _is_transient(error: BaseException | None) -> bool:
    """Return whether the error, or one of its causes, may pass."""
    from huggingface_hub import errors

    if error is None:
        return False
    is_answer = isinstance(error, errors.HfHubHTTPError)
    is_lost = isinstance(error, _transport()) and not is_answer
    is_busy = _status(error) >= 500 or _status(error) == 429
    return is_lost or is_busy or _is_transient(error.__cause__)


@contextmanager
def _quiet(*, bars: bool) -> Iterator[None]:
    from huggingface_hub.utils import logging as lines
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    level = lines.get_verbosity()
    hide = not bars and not are_progress_bars_disabled()
    lines.set_verbosity(logging.ERROR)
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        lines.set_verbosity(level)
        if hide:
            enable_progress_bars()


def _explanation(place: HubPlace, error: Exception) -> BurnishError:
    from huggingface_hub import constants, errors

    is_data = place.kind == "dataset"
    what, page = ("data set", f"datasets/{place.repo}") if is_data else ("model", place.repo)
    page = f"{constants.ENDPOINT}/{page}"
    no_such_path = "" if place.is_url else f"there is no file or directory {place}, and "
    local_names = "" if place.is_url else f"; {neighbours(Path(str(place)))}"
    want = f"a path on this machine, or {FORMS[place.kind]}"
    if isinstance(error, errors.GatedRepoError):
        return UsageError(
            f"{place} is only for those who have accepted its terms",
            have=reason(error),
            want="the token of an account that has accepted them",
            do=f"accept the terms at {page}, then hf auth login or set HF_TOKEN",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return MissingError(
            f"{no_such_path}the hub has no {what} {place.repo}",
            have=f"{_status(error)} from {constants.ENDPOINT}{local_names}",
            want=want,
            do="correct the name; for a private one, hf auth login or set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return MissingError(
            f"the {what} {place.repo} has no revision {place.revision or 'main'}",
            want="a branch, a tag or a commit",
            do=f"see {page}",
        )
    if constants.HF_HUB_OFFLINE:
        return MissingError(
            f"{no_such_path}the cache lacks files of the {what} {place}",
            have=f"HF_HUB_OFFLINE, and the cache {constants.HF_HUB_CACHE}{local_names}",
            want=want,
            do=f"run hf download {place.repo}{' --type dataset' if is_data else ''} where there is a network",
        )
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError)):
        return MissingError(
            f"{no_such_path}the cache lacks files of the {what} {place}, and {constants.ENDPOINT} does not answer",
            have=f"{reason(error.__cause__ or error)}{local_names}",
            want=want,
            do="see that the hub can be reached from here, then start again",
        )
    return BurnishError(
        f"{place} could not be downloaded",
        have=reason(error),
        do="start again: the cache keeps the files that are complete",
    )
