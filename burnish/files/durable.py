"""Operations on whole files and directories that survive a crash at any point."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePath

from burnish.errors import BurnishError, few
from burnish.files.storage import Bytes, Closing, LocalFile, LocalStorage, Source

# Syncs at one time. File systems merge concurrent syncs.
_SYNCS = 8


def write_durably(storage: LocalStorage, path: Path, data: Bytes) -> None:
    """Create or replace a file: whole or absent after a crash, and safe from a power loss on return."""
    with replacing(storage, path) as file:
        file.pwrite(data, 0)


@contextmanager
def replacing(
    storage: LocalStorage, path: Path, size: int = 0, suffix: str = ""
) -> Iterator[LocalFile]:
    """Yield a new file of a temporary name with this suffix. After the block it durably replaces `path`, unless the block raises."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{suffix}")
    try:
        with storage.create(temporary, size) as file:
            yield file
            file.sync()
        storage.rename(temporary, path)
    except BaseException:
        if storage.kind(temporary) is not None:
            storage.remove(temporary)
        raise
    storage.sync_dir(path.parent)


class Syncs(Closing):
    """Run syncs beside the caller, several at a time. Leaving the block waits for them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_SYNCS, "burnish-sync")
        self._begun: list[Future[None]] = []

    def begin(self, sync: Callable[[], None]) -> None:
        """Begin a sync."""
        self._begun.append(self._pool.submit(sync))

    def write_new(
        self, storage: LocalStorage, files: Mapping[Path, Bytes], dirs: Iterable[Path] = ()
    ) -> None:
        """Write new files, and begin syncing them and `dirs`."""
        for path, data in files.items():
            file = storage.create(path, len(data))
            file.pwrite(data, 0)
            self.begin(partial(_sync_and_close, file))
        for directory in dirs:
            self.begin(partial(storage.sync_dir, directory))

    def finish(self) -> None:
        """Wait for all, and raise the first failure."""
        for sync in self._begun:
            sync.result()

    def close(self) -> None:
        """Wait for all."""
        self._pool.shutdown()


def _sync_and_close(file: LocalFile) -> None:
    with file:
        file.sync()


def make_dirs_durably(storage: LocalStorage, path: Path, *, above: int) -> None:
    """Make a directory; make its name and the `above` - 1 directories over it, if accessible, survive a power loss."""
    storage.make_dirs(path)
    for parent in path.absolute().parents[:above]:
        try:
            storage.sync_dir(parent)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP):
                raise


def read_whole(storage: Source, path: PurePath, limit: int) -> bytes:
    """Return a small file's content. Raises `ValueError` above `limit` bytes."""
    with storage.open(path) as file:
        size = file.size()
        if size > limit:
            raise ValueError(f"{path} has {size} bytes, more than the {limit} it may have")
        content = bytearray(size)
        file.pread_into(content, 0)
    return bytes(content)


def move_aside(storage: LocalStorage, path: Path, directory: Path) -> Path:
    """Rename something into `directory` durably; return its new path. A taken name gets a number."""
    storage.make_dirs(directory)
    taken_names = {entry.name for entry in storage.entries(directory)}
    name = path.name
    number = 1
    while name in taken_names:
        number += 1
        name = f"{path.name}.{number}"
    storage.rename(path, directory / name)
    storage.sync_dir(directory)
    storage.sync_dir(path.parent)
    return directory / name


def discard(storage: LocalStorage, path: Path, trash: Path) -> None:
    """Rename something into `trash`, then remove it, so that nobody sees it half removed."""
    storage.remove(move_aside(storage, path, trash))


@contextmanager
def naming_failures(
    what: str, do: str = "see that the disk has room, is writable and in order"
) -> Iterator[None]:
    """Turn `OSError` in the block into a `BurnishError`."""
    try:
        yield
    except OSError as error:
        raise BurnishError(what, have=error, do=do) from error


class Removals:
    """Collect the failures of removals inside `trying`."""

    def __init__(self, root: PurePath) -> None:
        self._root = root
        self._failed: list[str] = []

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Record an `OSError` in the block, and continue."""
        try:
            yield
        except OSError as error:
            self._failed.append(str(error))

    def error(self) -> BurnishError | None:
        """Return an error that names the failures, if any."""
        if not self._failed:
            return None
        return BurnishError(
            f"{self._root} holds unneeded files that could not be removed",
            have=few(self._failed),
            want="these files removed, because they take up the disk",
            do="see that this user may remove them and that nobody has them open; the next start "
            "and burnish ckpt gc try again",
        )
