"""Several data sets of the same rows, which an update needs together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import xxhash

from burnish.data.tasks import ItemSequence, RowDataset
from burnish.errors import UsageError

logger = logging.getLogger(__name__)


class AlignedRows(ItemSequence[tuple[Any, ...]]):
    """Several data sets of the same rows, such as a prompt with each of two answers.

    Item i is the tuple of their items of the i-th row that all of them keep.
    """

    def __init__(self, parts: Sequence[RowDataset[Any]]) -> None:
        self.parts = tuple(parts)
        rows_of_parts = [set(part.kept_rows.tolist()) for part in parts]
        self._rows = sorted(set.intersection(*rows_of_parts))
        if not self._rows:
            raise UsageError(
                "no row can be used as a whole",
                have=f"{', '.join(str(len(part)) for part in parts)} rows that have one of its parts",
                want="at least one row with all of its parts",
                do="correct the data",
            )
        if dropped := len(set.union(*rows_of_parts)) - len(self._rows):
            logger.warning("dropped %d rows: a part of each was dropped", dropped)
        digests = [*(part.digest for part in parts), *map(str, self._rows)]
        self.digest = xxhash.xxh3_128_hexdigest(" ".join(digests).encode())
        self.first_row = parts[0].first_row

    def __len__(self) -> int:
        return len(self._rows)

    def items(self, indices: Sequence[int]) -> list[tuple[Any, ...]]:
        """See `ItemSequence.items`."""
        rows = [self._rows[index] for index in indices]
        return list(zip(*(part.make(rows) for part in self.parts), strict=True))
