"""Check that the bytes on disk are those that were committed. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from burnish.checkpoint.steps import header_problem, open_step, small_files, verify_files
from burnish.errors import CorruptError
from burnish.files.safetensors import SUFFIX
from burnish.files.storage import LOCAL, Source


def verify(
    path: PurePath, storage: Source = LOCAL, *, fast: bool = False
) -> Iterator[CorruptError]:
    """Read a step, of tensor files only headers if `fast`; yield an error for each damaged block and impossible header.

    Raises `CorruptError` if COMMIT, manifest, state or the list of files is damaged.
    """
    step = open_step(path, storage)
    yield from verify_files(step, small_files(step) if fast else step.manifest.files, storage)
    if fast:
        for name in step.manifest.files:
            if name.endswith(SUFFIX):
                yield from header_problem(step, name, storage)
