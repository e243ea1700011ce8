"""Check that the bytes on disk are those that were committed. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from burnish.checkpoint.steps import header_problem, open_step, read_file, verify_files
from burnish.errors import CorruptError
from burnish.files.safetensors import SUFFIX
from burnish.files.storage import LocalStorage, Source


def verify(path: PurePath, storage: Source | None = None) -> Iterator[CorruptError]:
    """Read all of the step at `path`; yield an error for each damaged block, naming file and tensors.

    A committed header that describes the impossible is an error too. Raises `CorruptError` if COMMIT, manifest, state or the list of
    files is damaged.
    """
    storage = storage or LocalStorage()
    step = open_step(path, storage)
    yield from verify_files(step, step.manifest.files, storage)


def verify_quickly(path: PurePath, storage: Source | None = None) -> Iterator[CorruptError]:
    """Check everything but tensors: COMMIT, manifest, names, sizes, small files and headers. Yields and raises as `verify` does."""
    storage = storage or LocalStorage()
    step = open_step(path, storage)
    for name in step.manifest.files:
        if name.endswith(SUFFIX):
            yield from header_problem(step, name, storage)
        else:
            try:
                read_file(step, name, storage)
            except CorruptError as error:
                yield error
