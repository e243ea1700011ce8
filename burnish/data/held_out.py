"""Hold a share of the training rows out for validation, the same ones whatever the order of the rows and the run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import xxhash

from burnish.config.shares import part_of
from burnish.data.sources import Rows
from burnish.errors import UsageError, few

_SPAN = 1024
"""Rows that are read together."""


def split_off(rows: Rows, share: str) -> tuple[Rows, Rows]:
    """Return the rows to train on, and the share, such as "5%", that is held out.

    A row is held out if the hash of its content is among the smallest ones. So equal rows are on one side, and neither the seed nor
    the order of the rows counts. Raises `UsageError` if nothing is left.
    """
    hashes = _hashes(rows)
    count = part_of(share, len(hashes))
    is_held_out = hashes <= np.partition(hashes, count - 1)[count - 1]
    if is_held_out.all():
        raise UsageError(
            "data.validation would hold out all rows",
            have=f"{len(rows)} rows of {few(rows.files)}, {len(np.unique(hashes))} of them different",
            want=f"more rows than the {count} of {share}",
            do="lower data.validation, or name a file of its own",
        )
    rest = replace(rows.chosen(np.flatnonzero(~is_held_out)), has_share=True)
    return rest, rows.chosen(np.flatnonzero(is_held_out))


def _hashes(rows: Rows) -> npt.NDArray[np.uint64]:
    """Return a hash of each row's content."""
    starts = range(0, len(rows), _SPAN)
    contents = (row for start in starts for row in rows.contents(start, start + _SPAN))
    hashes = (xxhash.xxh3_64_intdigest(each.encode()) for each in contents)
    return np.fromiter(hashes, np.uint64, len(rows))
