"""Read rows of `data.train` during training, from files that need not fit on a disk.

The files of an epoch lie end to end, in an order drawn from the seed, and are cut into windows of equally many bytes. A row, or a
row group of Parquet, belongs to the window in which it begins. So any window can be read alone. Its rows are shuffled. A place is
`window << 32 | row`, with windows counted over all epochs.

So a place is the whole state, and taking it up again reads one window. `IterableDataset` of datasets cannot: its shuffle buffer is
lost on resuming, it reads a file again from its beginning, and a broken line ends it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import PurePosixPath
from typing import Any, cast

import pyarrow.parquet
import xxhash
from fsspec.spec import AbstractBufferedFile

from burnish.data.columns import READERS, Row
from burnish.data.loader import PERIOD, Loader, State, order, pattern, unfit
from burnish.data.sources import LOOKED_AT, Rows, kind_of, matching_files, parsed
from burnish.data.splits import folder_files, split_files
from burnish.data.tasks import Item, Mixture, RowDataset
from burnish.distributed.collectives import agree, from_main
from burnish.distributed.layout import Layout
from burnish.errors import UsageError, of_setting, refusing
from burnish.files.cache import cache_root
from burnish.files.hub import HubPlace
from burnish.files.hub_files import HubFiles
from burnish.files.once import made_once
from burnish.files.remote import Remote, begun
from burnish.files.urls import Url, is_url
from burnish.records import Example
from burnish.records.seeds import derive_seed

_Window = list[tuple["StreamedFile", int, Any]]
"""Rows in order: file, byte of the line or number of the row, and the line or (table, row in the table)."""

_PIECE = 16 << 20
_TAIL = 1 << 16
_ROW = (1 << 32) - 1
_MOST_BROKEN = 100
"""A run stops after this many consecutive rows that cannot be read."""
_MOST_WARNINGS = 3
_SHARED = "streams"
_DAY = 86_400.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamedFile:
    """A file of rows."""

    source: Remote | HubFiles
    name: str
    """Path below the source."""
    size: int
    version: str
    start: int = 0
    """Bytes of all shards before it, in the given order."""

    def __str__(self) -> str:
        return f"{self.source}/{self.name}".removeprefix("file://")

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes. Each piece is retried by itself."""
        data = memoryview(bytearray(end - begin))
        for at in range(0, len(data), _PIECE):
            self.source.read_into(self.name, data[at : at + _PIECE], begin + at)
        return bytes(data)


@dataclass(frozen=True, slots=True, eq=False)
class StreamedRows(Rows):
    """The rows of shards, by place. At most two windows are in memory."""

    is_streamed: bool = True
    shards: tuple[StreamedFile, ...] = ()
    window_bytes: int = 0
    seed: int = 0
    shuffle: bool = True
    shared: str = ""
    """Name of the cache files in which one process of a machine stores windows for the others; "" for none."""
    _fetching: dict[int, Future[list[bytes]]] = field(default_factory=dict)
    _pieces: dict[StreamedFile, bytes] = field(default_factory=dict)
    """The files of a source with a single window, which every epoch needs."""
    _read: dict[int, _Window] = field(default_factory=dict)
    _columns: Row = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        """Return the bytes of an epoch; rows are not counted."""
        return self.shards[-1].start + self.shards[-1].size

    @property
    def windows(self) -> int:
        """Windows per epoch."""
        return -(-len(self) // self.window_bytes)

    def __getitem__(self, index: int) -> Row:
        shard, number, content = self.window(index >> 32)[index & _ROW]
        if isinstance(content, bytes):
            row: Row = parsed(content, f"{shard}, the line at byte", number)
        else:
            table, at = content
            with refusing(f"row {number} of {shard} cannot be read", do="correct or remove it"):
                row = table.slice(at, 1).to_pylist()[0]
        return self._columns | row

    @property
    def columns(self) -> list[str]:
        """Columns of the first rows."""
        if not self._columns:
            self._columns.update(dict.fromkeys(name for row in self.beginning for name in row))
        return list(self._columns)

    @property
    def beginning(self) -> Iterator[Row]:
        """See `Rows.beginning`."""
        return map(self.__getitem__, range(min(LOOKED_AT, len(self.window(0)))))

    def where(self, index: int) -> str:
        """See `Rows.where`."""
        shard, number, content = self.window(index >> 32)[index & _ROW]
        return f"the {'line at byte' if isinstance(content, bytes) else 'row'} {number} of {shard}"

    def number(self, index: int) -> int:
        """Return where a row begins in all files, end to end as given."""
        shard, number, _ = self.window(index >> 32)[index & _ROW]
        return shard.start + number

    def window(self, number: int, *, ahead: bool = False) -> _Window:
        """Return a window's rows in the order of drawing. `ahead`: begin to fetch the next window.

        Raises `BurnishError` for an unreadable window.
        """
        with self._lock:
            if number not in self._read:
                fetching = self._fetching.pop(number, None)
                if fetching is None or (fetching.done() and fetching.exception()):
                    fetching = begun(partial(self._fetch, number))
                self._fetching.clear()
                self._read.clear()
                self._read[number] = self._rows_in(number, fetching.result())
            if ahead and number + 1 not in self._fetching:
                self._fetching[number + 1] = begun(partial(self._fetch, number + 1))
            return self._read[number]

    def _parts(self, number: int) -> Iterator[tuple[StreamedFile, int, int]]:
        """Yield a window's files, and which bytes of each it has."""
        epoch, window = divmod(number, self.windows)
        shards = list(self.shards)
        if self.shuffle:
            shards = [shards[index] for index in order(self.seed, epoch, len(shards))]
        begin = window * self.window_bytes
        start = 0  # of the shard, among all shards in this epoch's order
        for shard in shards:
            first = max(begin - start, 0)
            last = min(begin + self.window_bytes - start, shard.size)
            if first < last:
                yield shard, first, last
            start += shard.size

    def _fetch(self, number: int) -> list[bytes]:
        """Fetch a window without Arrow: the process may end during this thread."""
        parts = list(self._parts(number))
        if self._pieces:
            return [self._pieces[file] for file, _, _ in parts]

        def fetch() -> bytes:
            return b"".join(file.read(first, last) for file, first, last in parts)

        data = made_once(f"{_SHARED}/{self.shared}-{number}", fetch) if self.shared else fetch()
        if self.shared:
            _remove_from_cache(f"{self.shared}-", range(number - 1, number + 2))
        ends = accumulate((last - first for _, first, last in parts), initial=0)
        pieces = [data[begin:end] for begin, end in pairwise(ends)]
        if self.windows == 1:
            self._pieces.update(zip((file for file, _, _ in parts), pieces, strict=True))
        return pieces

    def _rows_in(self, number: int, fetched: Sequence[bytes]) -> _Window:
        rows: _Window = []
        for (shard, first, _), data in zip(self._parts(number), fetched, strict=True):
            read = _lines if READERS[PurePosixPath(shard.name).suffix] == "json" else _groups
            rows += [(shard, *row) for row in read(shard, first, data)]
        if not self.shuffle:
            return rows
        epoch, window = divmod(number, self.windows)
        shuffled = order(derive_seed(self.seed, "window", epoch), window, len(rows))
        return [rows[index] for index in shuffled]


def open_rows(
    paths: Sequence[str],
    setting: str,
    window_bytes: int,
    *,
    seed: int,
    shuffle: bool,
    layout: Layout | None = None,
) -> StreamedRows:
    """List the local or remote files at `paths`, and read the first window. Collective.

    Raises `BurnishError` if no row begins in it.
    """
    layout = layout or Layout()
    shards: list[StreamedFile] = []
    with agree(layout):
        if layout.is_main:
            shards = [shard for path in paths for shard in _shards(path, setting) if shard.size]
            for shard in shards:
                if kind_of([PurePosixPath(shard.name)], setting) not in ("json", "parquet"):
                    raise UsageError(
                        f"{setting}: no part of {shard} can be read alone",
                        want="JSON Lines or Parquet for data.streaming",
                        do="convert it, or set data.streaming=0, which reads Arrow files without copying them",
                    )
    shards = from_main(shards, layout)
    starts = accumulate((shard.size for shard in shards), initial=0)
    shards = [replace(shard, start=at) for shard, at in zip(shards, starts, strict=False)]
    listed = [(shard.name, shard.size, shard.version) for shard in shards]
    is_far = any(not str(shard.source).startswith("file://") for shard in shards)
    files = tuple(map(str, shards))
    key = xxhash.xxh3_64_hexdigest(repr((files, listed, window_bytes, seed, shuffle)).encode())
    rows = StreamedRows(
        table=None,
        files=files,
        keys=(),
        digest=xxhash.xxh3_128_hexdigest(repr(listed).encode()),
        shards=tuple(shards),
        window_bytes=window_bytes,
        seed=seed,
        shuffle=shuffle,
        shared=key if is_far and layout.local_world > 1 else "",
    )
    with agree(layout):
        if not shards or not rows.window(0):
            raise UsageError(
                f"{setting}: no row begins in the first {window_bytes:,} bytes of {', '.join(paths)}",
                have=f"{len(shards)} files that are not empty",
                want="rows that are shorter than a window",
                do=f"raise data.streaming, or correct {setting}",
            )
    return rows


class Stream(Mixture[Item]):
    """Samples of streamed rows, drawn by weight. An index is `place * sources + source`.

    `samples[0]` is the first usable one.
    """

    def __init__(self, parts: Sequence[RowDataset[Any]]) -> None:
        """Raises `UsageError` for a broken row among the first ones."""
        super().__init__(parts)
        self._rows = tuple(cast("StreamedRows", part.rows) for part in parts)
        self._items_ahead: dict[int, Item] = {}
        self._warned: dict[str, set[str]] = {}
        self._broken = 0
        for number, part in enumerate(self.parts):
            for row in range(min(LOOKED_AT, len(self._rows[number].window(0)))):
                part.make([row])
            self.at(number, 0)

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    def items(self, indices: Sequence[int]) -> list[Item]:
        """See `ItemSequence.items`."""
        items: list[Item] = []
        for index in indices:
            item = self._items_ahead.pop(index, None)
            if item is None:
                place, number = divmod(index, len(self.parts))
                _, item = self.at(number, place)
            items.append(item)
        return items

    def at(self, number: int, place: int, *, ahead: bool = False) -> tuple[int, Item]:
        """Return place and item of a source's first usable row, from a place on.

        Raises `UsageError` if a whole epoch has none.
        """
        part = self.parts[number]
        rows = self._rows[number]
        first_window = place >> 32
        first_row = place & _ROW
        for window in range(first_window, first_window + rows.windows + 1):
            for row in range(first_row, len(rows.window(window, ahead=ahead))):
                item = self._usable(part, window << 32 | row)
                if item is not None:
                    return window << 32 | row, item
            first_row = 0
        raise UsageError(
            f"no row of {', '.join(part.rows.files[:2])} can be used",
            want="rows with something to train on that are not over the limit",
            do="raise data.max_length or data.max_prompt_length, or correct the data",
        )

    def keep(self, index: int, item: Item) -> None:
        """Keep an item for the next `items` with this index."""
        self._items_ahead[index] = item

    def _usable(self, part: RowDataset[Item], place: int) -> Item | None:
        try:
            item: Any = part.make([place])[0]
        except UsageError as error:
            self._broken += 1
            if self._broken >= _MOST_BROKEN:
                raise
            self._warn("a row that cannot be read is left out: %s", str(error))
            return None
        self._broken = 0
        samples = item if isinstance(item, tuple) else (item,)
        if part.limit is not None and max(len(each.token_ids) for each in samples) > part.limit:
            self._warn("%s is over the limit and left out", part.rows.where(place))
            return None
        is_empty = any(isinstance(each, Example) and not each.loss_mask.any() for each in samples)
        has_equal = len({each.token_ids.tobytes() for each in samples}) < len(samples)
        return None if is_empty or has_equal else item

    def _warn(self, message: str, about: str) -> None:
        warned = self._warned.setdefault(message, set())
        if len(warned) < _MOST_WARNINGS and about not in warned:
            warned.add(about)
            logger.warning(message, about)


class StreamLoader(Loader):
    """Yield indices into a `Stream`: each source in its own order, as often as its weight says."""

    def __init__(self, stream: Stream[Any], weights: Sequence[float]) -> None:
        """Without weights there is one source."""
        super().__init__(len(stream), seed=0, shuffle=False)
        self._stream = stream
        self._pattern, _ = pattern(weights or [1.0])
        self._places = (0,) * len(stream.parts)

    @property
    def state(self) -> State:
        """See `Loader.state`."""
        return (self.cursor, *self._places)

    @state.setter
    def state(self, state: State) -> None:
        numbers = (0,) * (len(self._places) + 1) if state == 0 else state
        if isinstance(numbers, int) or len(numbers) != len(self._places) + 1:
            raise unfit(state)
        self.cursor, *places = map(int, numbers)
        self._places = tuple(places)

    def take(self, count: int) -> list[int]:
        """Return the next `count` indices, and read their samples."""
        indices: list[int] = []
        places = list(self._places)
        for cursor in range(self.cursor, self.cursor + count):
            number = int(self._pattern[cursor % PERIOD])
            place, item = self._stream.at(number, places[number], ahead=True)
            index = place * len(places) + number
            self._stream.keep(index, item)
            indices.append(index)
            places[number] = place + 1
        # Only now, so that an error leaves the loader where it was.
        self.cursor += count
        self._places = tuple(places)
        return indices


def _shards(path: str, setting: str) -> Iterator[StreamedFile]:
    if hub := HubPlace.of(path, "dataset"):
        files = HubFiles.of(hub)
        for name, size in split_files(files, setting).items():
            yield StreamedFile(files, name, size, files.place.revision)
        return
    if is_url(path):
        with of_setting(setting):
            selected, notice = folder_files(path, setting)
        if notice:
            logger.warning(notice)
        for file in selected.files:
            yield StreamedFile(selected.remote, file.name, file.size, file.version)
        return
    for local in matching_files(path, setting):
        remote = Remote(Url("file", "", str(local.parent).strip("/")))
        if (status := remote.stat(local.name)) is not None:
            yield StreamedFile(remote, local.name, status.size, status.version)


def _lines(shard: StreamedFile, begin: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in `data`, a shard's bytes from `begin`, each with its position."""
    if begin == 0 and data[:64].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        raise UsageError(
            f"{shard} is one list, whose parts cannot be read alone",
            want="one JSON object on every line",
            do="convert it to JSON Lines, or set data.streaming=0",
        )
    first = 0
    end = begin + len(data)
    pieces = [data]
    # A line belongs to the window in which it begins, so the end of an earlier one is left out.
    if begin and shard.read(begin - 1, begin) != b"\n":
        first = data.find(b"\n") + 1 or len(data)
    # The last line may go on behind the window.
    size = _TAIL
    while first < len(data) and end < shard.size and not pieces[-1].endswith(b"\n"):
        piece = shard.read(end, min(end + size, shard.size))
        pieces.append(piece[: piece.find(b"\n") + 1 or None])
        end += len(piece)
        size *= 2
    pieces[0] = data[first:]
    at = begin + first
    for line in b"".join(pieces).split(b"\n"):
        if line.strip():
            yield at, line
        at += len(line) + 1


def _groups(shard: StreamedFile, begin: int, data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the rows of the row groups that begin in `data`, each with its number."""
    with (
        refusing(
            f"{shard} cannot be read as Parquet",
            want="a complete Parquet file",
            do="write it again, or correct its suffix",
        ),
        pyarrow.parquet.ParquetFile(_Bytes(shard, begin, data)) as file,
    ):
        number = 0
        for group_index in range(file.num_row_groups):
            group = file.metadata.row_group(group_index)
            columns = [group.column(index) for index in range(group.num_columns)]
            starts = [column.data_page_offset for column in columns]
            starts += [column.dictionary_page_offset or starts[0] for column in columns]
            if begin <= min(starts, default=0) < begin + len(data):
                table = file.read_row_group(group_index)
                yield from ((number + at, (table, at)) for at in range(len(table)))
            number += group.num_rows


class _Bytes(AbstractBufferedFile):  # type: ignore[misc]
    """A shard as a file for Arrow; `data` is not fetched again."""

    def __init__(self, shard: StreamedFile, begin: int, data: bytes) -> None:
        super().__init__(None, shard.name, cache_type="none", size=shard.size)
        self._shard = shard
        self._begin = begin
        self._data = data

    def _fetch_range(self, start: int, end: int) -> bytes:
        first = self._begin
        last = self._begin + len(self._data)
        end = min(end, self._shard.size)
        before = self._shard.read(start, min(end, first)) if start < first else b""
        within = self._data[max(start - first, 0) : max(end - first, 0)]
        after = self._shard.read(max(start, last), end) if end > last else b""
        return before + within + after


def _remove_from_cache(name: str, needed: range) -> None:
    """Remove a stream's windows except the `needed` ones, and all windows older than a day."""
    for path in (cache_root() / _SHARED).glob("*"):
        number = path.name.removeprefix(name).removesuffix(".lock")
        is_mine = path.name.startswith(name) and number.isdigit() and int(number) not in needed
        with suppress(OSError):
            if is_mine or time.time() - path.stat().st_mtime > _DAY:
                path.unlink()
