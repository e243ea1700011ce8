"""Names and places of tensors in files and blocks. Places depend only on names, dtypes and shapes.

A model's tensors come in sets: weights ("model"), the bits that bf16 lacks ("residual"), and one per optimizer slot
("exp_avg"). Sets of roles other than `MAIN` begin with the role ("critic/model"). A key is set/weight.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from burnish.boxes.box import Box
from burnish.boxes.pieces import (
    Pieces,
    PieceTable,
    TensorIndex,
    gather_pieces,
    gather_some,
    gather_tensors,
)
from burnish.boxes.plan import Coverage, Group, Moves, schedule
from burnish.boxes.shards import TensorSpec
from burnish.boxes.table import BoxIndex, BoxTable, Columns, Ints, flat_ranges, strides
from burnish.boxes.tensor_reader import TORCH_DTYPES, copy, dtype_name, in_chunks
from burnish.checkpoint.manifest import BLOCK_BYTES, MAX_BLOCK_BYTES, MIN_BLOCK_BYTES
from burnish.distributed.collectives import agree, gather_within
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.safetensors import (
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    ALIGN,
    DTYPE_BITS,
    TensorEntry,
    build_header,
)
from burnish.files.strict_json import encode_json

MAIN = ""
"""The role of the run's own model, whose directories are `model/` and `training/`."""
MODEL = "model"
RESIDUAL = "residual"
TRAINING = "training"
"""The set of weights, and its directory; the set of residuals; the directory of all sets except the weights."""

MAX_FILE_BYTES = 4 << 30
"""A set of tensors is divided into files of about this size; a larger tensor has its own file."""
MOST_BLOCKS = 1 << 19
"""A step of more blocks gets larger blocks, because the manifest, which all ranks read, has a hash for each."""
# Most bytes of a span, unless one block is larger.
_SPAN_BYTES = 4 << 20
# Most bytes of the spans that a rank assembles at once. It writes the group before at the same time.
_GROUP_BYTES = 16 << 20
_WAVE_BYTES = 16 << 20
# At least this many ranks share the planning of a save, in a run that has as many.
_PLANNERS = 128
# Blocks of a typical tensor. Ranks cut tensors by rows, and of many small blocks few hold rows of two ranks.
_BLOCKS_PER_TENSOR = 64
# Least blocks of an aligned file.
_BLOCKS_TO_ALIGN = 32
_FILE = re.compile(
    r"((?:[a-z][a-z0-9_]*/)?)(?:(model)|training)/(.+?)(?:-[0-9]{5}-of-[0-9]{5})?\.safetensors"
)
_ROLE = re.compile(r"[a-z][a-z0-9_]*")


def prefix_of(role: str) -> str:
    """Return the prefix of a role's sets. Raises `ValueError`."""
    if role == MAIN:
        return ""
    if not _ROLE.fullmatch(role) or role in (MODEL, RESIDUAL, TRAINING):
        raise ValueError(f"{role!r} cannot be the name of a role")
    return f"{role}/"


def key_parts(key: str, roles: Iterable[str]) -> tuple[str, str]:
    """Split a key into set and weight."""
    prefix = next((f"{role}/" for role in roles if role and key.startswith(f"{role}/")), "")
    kind, _, name = key.removeprefix(prefix).partition("/")
    return prefix + kind, name


def path_of(tensor_set: str) -> str:
    """Return the path of a set's files without number and suffix."""
    role, slash, kind = tensor_set.rpartition("/")
    return f"{role}{slash}{MODEL if kind == MODEL else TRAINING}/{kind}"


def set_of(path: str) -> str | None:
    """Return the set of a tensor file; None for other files."""
    match = _FILE.fullmatch(path)
    return None if match is None else match[1] + (match[2] or match[3])


def roles_in(paths: Iterable[str]) -> list[str]:
    """Return the roles with weights, `MAIN` first."""
    sets = {tensor_set for path in paths if (tensor_set := set_of(path)) is not None}
    return sorted(
        s.removesuffix(MODEL).removesuffix("/") for s in sets if s.split("/")[-1] == MODEL
    )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk."""

    tensor_set: str
    """The tensor's set, which names the files: "model", "residual", "exp_avg", "critic/model", ..."""
    name: str
    """Canonical name of the weight; for optimizer state, of the weight that it belongs to."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return Box((0,) * len(self.shape), self.shape).elements * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A safetensors file."""

    path: str
    """Below the step, with forward slashes."""
    tensor_set: str
    header: bytes
    """The header without its padding. The padding of many files would take a gigabyte."""
    header_bytes: int
    """Length of the header with its padding."""
    entries: tuple[TensorEntry, ...]
    size: int

    def header_within(self, start: int, stop: int) -> bytes:
        """Return the header's part of a byte range."""
        return self.header[start:stop].ljust(min(stop, self.header_bytes) - start)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks of a file with one writer, in bytes."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable(Columns):
    """Spans as columns, in the order of files and bytes."""

    file: Ints
    start: Ints
    stop: Ints

    @classmethod
    def blocks(cls, sizes: Sequence[int], block_bytes: int) -> SpanTable:
        """Return the blocks of files of these sizes."""
        size = np.array(sizes, np.int64)
        count = -(-size // block_bytes)
        file = np.repeat(np.arange(len(size)), count)
        start = (np.arange(len(file)) - (np.cumsum(count) - count)[file]) * block_bytes
        return cls(file, start, np.minimum(start + block_bytes, size[file]))

    def __getitem__(self, row: int) -> Span:
        return Span(int(self.file[row]), int(self.start[row]), int(self.stop[row]))

    def joined(self, owner: Ints, most_bytes: int) -> tuple[SpanTable, Ints]:
        """Join neighbours of one file and owner within each `most_bytes`; return spans and owners."""
        key = np.stack([self.file, self.start // most_bytes, owner])
        first = np.flatnonzero((np.diff(key, prepend=-1) != 0).any(axis=0))
        last = np.append(first[1:], len(owner)) - 1 if len(first) else first
        return SpanTable(self.file[first], self.start[first], self.stop[last]), owner[first]


def plan_files(
    tensors: Iterable[StoredTensor], max_file_bytes: int = MAX_FILE_BYTES, align: int = ALIGN
) -> tuple[list[PlannedFile], dict[str, bytes]]:
    """Return safetensors files with Hugging Face's or PEFT's names, and their index files by path.

    In a file, tensors of a multiple of `align` bytes come first, then of half of it, and so on. So ranks' rows begin where blocks do.
    """
    sets: dict[str, list[StoredTensor]] = {}
    for tensor in sorted(tensors, key=lambda t: (path_of(t.tensor_set), t.name)):
        sets.setdefault(tensor.tensor_set, []).append(tensor)
    files: list[PlannedFile] = []
    indices: dict[str, bytes] = {}
    for tensor_set, members in sets.items():
        path = path_of(tensor_set)
        directory, _, stem = path.rpartition("/")
        shares = _shares(members, max_file_bytes)
        if stem == MODEL and all(tensor.name.startswith(ADAPTER_PREFIX) for tensor in members):
            stem = ADAPTER_WEIGHTS
            shares = [members]
        weight_map: dict[str, str] = {}
        for number, share in enumerate(shares, start=1):
            numbered = f"{stem}-{number:05d}-of-{len(shares):05d}" if len(shares) > 1 else stem
            files.append(_file(f"{directory}/{numbered}.safetensors", tensor_set, share, align))
            weight_map |= {tensor.name: f"{numbered}.safetensors" for tensor in share}
        if len(shares) > 1:
            total = sum(tensor.size for tensor in members)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            indices[f"{path}.safetensors.index.json"] = encode_json(index)
    return files, indices


def block_bytes_for(sizes: Iterable[int], most: int = MOST_BLOCKS) -> int:
    """Return the block size for tensors of these sizes, a power of two.

    The tensor with the middle byte gets 64 blocks, of `MIN_BLOCK_BYTES` to `BLOCK_BYTES`. Blocks grow if there are over `most`.
    """
    ascending = sorted(sizes)
    upto = np.cumsum([0, *ascending], dtype=np.int64)
    total = int(upto[-1])
    typical = ascending[np.searchsorted(upto[1:], total / 2)] if ascending else 0
    size = BLOCK_BYTES
    while size > MIN_BLOCK_BYTES and size * _BLOCKS_PER_TENSOR > typical:
        size //= 2
    while total > most * size and size < MAX_BLOCK_BYTES:
        size *= 2
    return size


def _shares(members: list[StoredTensor], max_file_bytes: int) -> list[list[StoredTensor]]:
    shares: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in members:
        if shares[-1] and filled + tensor.size > max_file_bytes:
            shares.append([])
            filled = 0
        shares[-1].append(tensor)
        filled += tensor.size
    return shares


def _file(path: str, tensor_set: str, members: list[StoredTensor], align: int) -> PlannedFile:
    ordered = sorted(members, key=lambda t: (-min(t.size & -t.size, align), t.name))
    if sum(tensor.size for tensor in members) < _BLOCKS_TO_ALIGN * align:
        align = ALIGN  # a header padded to a whole block would be much of the file
    header, entries = build_header(
        [(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered], {"format": "pt"}, align
    )
    placed = tuple(entries.values())
    end = placed[-1].end if placed else len(header)
    return PlannedFile(path, tensor_set, header.rstrip(b" "), len(header), placed, end)


Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]

# This many holders of most of a block are tried as its writer before any other rank.
_FAVOURITES = 8


@dataclass(frozen=True, slots=True)
class PartPlace:
    """The place of a part."""

    slot: int
    """Index of the span among those that the rank assembles at once."""
    start: int
    """First byte, counted from the start of the span."""
    box: Box
    """Which elements of its tensor, in global coordinates."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Boxes of tensors, each contiguous in one span, in order."""

    tensors: TensorIndex
    pieces: Pieces
    """The boxes; `index` is the row and `rank` is 0."""
    span: Ints
    """Index among the spans."""
    start: Ints
    """First byte, counted from the start of the span."""

    @classmethod
    def of(cls, files: Sequence[PlannedFile], spans: SpanTable, tensors: TensorIndex) -> Parts:
        """Return the parts of the tensors in `tensors`."""
        rows: list[tuple[int, int, int]] = []
        described: list[TensorSpec] = []
        for index, file in enumerate(files):
            for entry in file.entries:
                key = f"{file.tensor_set}/{entry.name}"
                if key in tensors:
                    rows.append((index, entry.begin, entry.end))
                    described.append(TensorSpec(key, entry.shape, TORCH_DTYPES[entry.dtype]))
        entries = SpanTable(*np.array(rows, np.int64).reshape(-1, 3).T)
        tensor, dtype = tensors.add(described, "on disk")
        # One row for each overlap of a span with a tensor's bytes.
        span, tensor_row, overlap = BoxIndex(_byte_ranges(entries)).meeting(_byte_ranges(spans))
        begin = entries.start[tensor_row]
        itemsize = tensors.itemsizes()[dtype[tensor_row]]
        first = (overlap.offsets[:, 0] - begin) // itemsize
        last = first + overlap.sizes[:, 0] // itemsize
        shapes = tensors.shape_table()[tensor[tensor_row]]
        # A range of elements is one box or several: a part of a first row, whole rows, a part of a last row.
        row, offsets, sizes = flat_ranges(shapes, first, last)
        tensor_row = tensor_row[row]
        span = span[row]
        element = (offsets * strides(shapes)[row]).sum(axis=1)
        start = begin[row] + element * itemsize[row] - spans.start[span]
        order = np.lexsort((start, span))
        boxes = BoxTable(tensor[tensor_row], offsets, sizes).take(order)
        numbers = np.arange(len(order))
        pieces = Pieces(boxes, np.zeros_like(numbers), numbers, dtype[tensor_row][order])
        return cls(tensors, pieces, span[order], start[order])

    def places(self, slots: Ints) -> dict[int, PartPlace]:
        """Return the places of parts whose span has a slot; -1 means none."""
        boxes = self.pieces.boxes
        places = {}
        for part in np.flatnonzero(slots[self.span] >= 0).tolist():
            box = boxes.box(part, len(self.tensors.shapes[boxes.tensor[part]]))
            places[part] = PartPlace(int(slots[self.span[part]]), int(self.start[part]), box)
        return places


def _byte_ranges(spans: SpanTable) -> BoxTable:
    return BoxTable(spans.file, spans.start[:, None], (spans.stop - spans.start)[:, None])


def block_writers(block: Ints, rank: Ints, size: Ints, blocks: int, world: int) -> Ints:
    """Return each block's writer: the rank with most of its bytes, while all get equally many. A row is a rank's part of a block."""
    pair, row = np.unique(block * world + rank, return_inverse=True)
    total = np.bincount(row, size).astype(np.int64) if len(pair) else np.zeros(0, np.int64)
    block, rank = np.divmod(pair, world)
    # The largest holders of a block first. Equal ones take turns: all ranks hold a replicated tensor whole.
    order = np.lexsort(((rank - block) % world, -total, block))
    begins = np.searchsorted(block[order], np.arange(blocks + 1)).tolist()
    holders = rank[order].tolist()
    quota = -(-blocks // world)
    load = [0] * world
    next_free = 0
    writers = []
    for number in range(blocks):
        first = begins[number]
        last = min(begins[number + 1], first + _FAVOURITES)
        favourites = (holder for holder in holders[first:last] if load[holder] < quota)
        writer = next(favourites, -1)
        while writer < 0:
            writer = next_free if load[next_free] < quota else -1
            next_free += writer < 0
        load[writer] += 1
        writers.append(writer)
    return np.array(writers, np.int64)


def groups_of(
    writer: Ints, size: Ints, place: Ints, travels: Bools, group_bytes: int
) -> tuple[Ints, Ints]:
    """Divide writers' spans into groups of about `group_bytes`; return each span's group and slot there.

    Sorts spans with other ranks' bytes (`travels`) first, then by `place`. So the last groups need no messages.
    """
    order = np.lexsort((place, ~travels, writer))
    writer = writer[order]
    size = size[order]
    begin = np.cumsum(size) - size
    number = (begin - begin[np.searchsorted(writer, writer)]) // group_bytes
    key = writer * (number.max(initial=0) + 1) + number
    group = np.empty_like(number)
    group[order] = number
    slot = np.empty_like(number)
    slot[order] = np.arange(len(key)) - np.searchsorted(key, key)
    return group, slot


@dataclass(frozen=True, slots=True, eq=False)
class WriteShare:
    """A rank's part in writing a section."""

    spans: Sequence[Sequence[Span]]
    """The spans that the rank writes, by group. It assembles one group at a time."""
    places: Mapping[int, PartPlace]
    """The place of a move's elements in its group's spans, by `Move.want`."""
    moves: Sequence[Group]
    """The rank's moves in each group. All ranks have equally many groups."""
    digest: str
    """Digest of the section's plan for all ranks."""

    @classmethod
    def joined(cls, shares: Sequence[Self]) -> Self:
        """Join shares of several sections, and renumber their parts."""
        spans = list[Sequence[Span]]()
        places = dict[int, PartPlace]()
        moves = list[Group]()
        for share in shares:
            base = 1 + max(places, default=-1)
            spans += share.spans
            places |= {want + base: place for want, place in share.places.items()}
            moves += [group.shifted(base) for group in share.moves] if base else share.moves
        return cls(spans, places, moves, " ".join(share.digest for share in shares))


@dataclass(frozen=True, slots=True)
class PlannedSection:
    """Blocks that are planned separately, for writers whose rank is `turn` modulo `turns`."""

    blocks: slice
    turn: int = 0
    turns: int = 1

    def writers(self, coverage: Coverage, block: Ints, blocks: int, world: int) -> Ints:
        """Return the writer of each of the section's `blocks`; `block` has the block of each wanted piece."""
        part, holder = coverage.holders()
        rank = coverage.holder_pieces.rank[holder]
        if self.turns > 1:
            may_write = rank % self.turns == self.turn
            part = part[may_write]
            rank = rank[may_write]
        itemsize = coverage.tensors.itemsizes()[coverage.wanted.dtype[coverage.want]]
        size = (coverage.boxes.elements * itemsize)[part]
        block = block[coverage.want[part]]
        writer = block_writers(block, rank // self.turns, size, blocks, world // self.turns)
        return self.turn + self.turns * writer


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A step's tensor files and blocks, without their writers."""

    files: Sequence[PlannedFile]
    indices: Mapping[str, bytes]
    """The index files, by path."""
    block_bytes: int
    blocks: SpanTable

    @classmethod
    def of(cls, tensors: Iterable[Sequence[TensorSpec]], roles: Iterable[str]) -> Self:
        """Lay out ranks' tensors, named by key. Raises `BurnishError` if ranks disagree about a tensor."""
        stored = _stored(tensors, roles)
        block_bytes = block_bytes_for(tensor.size for tensor in stored)
        files, indices = plan_files(stored, align=min(block_bytes, BLOCK_BYTES))
        blocks = SpanTable.blocks([file.size for file in files], block_bytes)
        return cls(files, indices, block_bytes, blocks)

    def blocks_in(self, file: PlannedFile) -> int:
        """Return the number of a file's blocks."""
        return -(-file.size // self.block_bytes)

    def sections(self, world: int, most: int) -> list[PlannedSection]:
        """Divide the blocks into at most `most` sections; all ranks write equally many."""
        count = len(self.blocks.file)
        size = max(1, -(-count // (most * world))) * world
        turns = max(1, most // max(1, -(-count // size)))
        turns = next(each for each in range(turns, 0, -1) if world % each == 0)
        sections = list[PlannedSection]()
        for start in range(0, count, size):
            edges = np.linspace(start, min(start + size, count), turns + 1).astype(int).tolist()
            rows = [slice(*edge_pair) for edge_pair in pairwise(edges)]
            sections += [PlannedSection(row, turn, turns) for turn, row in enumerate(rows)]
        return sections

    def tensors_in(self, section: PlannedSection) -> set[str]:
        """Return the keys of a section's tensors."""
        blocks = self.blocks.take(section.blocks)
        keys = set[str]()
        for number in np.unique(blocks.file).tolist():
            file = self.files[number]
            in_file = blocks.file == number
            start = int(blocks.start[in_file].min())
            stop = int(blocks.stop[in_file].max())
            entries = (e for e in file.entries if e.begin < stop and start < e.end)
            keys |= {f"{file.tensor_set}/{entry.name}" for entry in entries}
        return keys

    def shares(
        self,
        have: Sequence[PieceTable],
        section: PlannedSection,
        world: int,
        ranks: Sequence[int],
    ) -> list[WriteShare]:
        """Plan a section of a save by `world` ranks; return the shares of `ranks`. Raises `MissingError` for an incomplete tensor."""
        tensors = TensorIndex()
        [held_pieces] = tensors.merge(have)
        blocks = self.blocks.take(section.blocks)
        parts = Parts.of(self.files, blocks, tensors)
        coverage = Coverage.of(held_pieces, parts.pieces, tensors)
        writer = section.writers(coverage, parts.span, len(blocks.file), world)
        spans, writer = blocks.joined(writer, _SPAN_BYTES)
        # A rank assembles whole spans, so the tensors are cut again, where spans begin and not where blocks do.
        parts = Parts.of(self.files, spans, tensors)
        moves = coverage.of_others(parts.pieces).moves(writer[parts.span])
        group, slot = self._groups(spans, writer, parts, moves)
        groups = int(group.max(initial=-1)) + 1
        scheduled = schedule(moves, ranks, _WAVE_BYTES, group[parts.span[moves.want]], groups)
        digest = moves.digest()
        shares = []
        for rank, rank_moves in zip(ranks, scheduled, strict=True):
            is_own = writer == rank
            by_slot = np.argsort(slot[is_own], kind="stable")
            rank_spans: list[list[Span]] = [[] for _ in range(groups)]
            for number in np.flatnonzero(is_own)[by_slot].tolist():
                rank_spans[group[number]].append(spans[number])
            places = parts.places(np.where(is_own, slot, -1))
            shares.append(WriteShare(rank_spans, places, rank_moves, digest))
        return shares

    def _groups(
        self, spans: SpanTable, writer: Ints, parts: Parts, moves: Moves
    ) -> tuple[Ints, Ints]:
        """Return the group of each span, and its slot among the group's spans."""
        travels = np.zeros(len(writer), bool)
        travels[parts.span[moves.want[moves.source != moves.target]]] = True
        # Go through all sets at the same pace, so that one is converted while others are written.
        sets = [file.tensor_set for file in self.files]
        in_set = np.array([index - sets.index(name) for index, name in enumerate(sets)], np.int64)
        place = in_set[spans.file] * MAX_FILE_BYTES + spans.start
        # A group ends with the span that fills it, so it may be longer by almost one span.
        most = max(_SPAN_BYTES, self.block_bytes)
        group_bytes = max(most, _GROUP_BYTES - most)
        return groups_of(writer, spans.stop - spans.start, place, travels, group_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """A step's tensor files, and this rank's share."""

    outline: Outline
    share: WriteShare

    @classmethod
    def of(cls, have: Sequence[PieceTable], roles: Iterable[str], layout: Layout) -> Self:
        """Plan from all ranks' pieces, named by key. Raises as `Outline.of` and `Outline.shares`."""
        outline = Outline.of((table.tensors for table in have), roles)
        section = PlannedSection(slice(None))
        [share] = outline.shares(have, section, layout.world, [layout.rank])
        return cls(outline, share)

    @classmethod
    def together(cls, pieces: PieceTable, roles: Iterable[str], layout: Layout) -> Self:
        """Plan from this rank's pieces. Collective. Raises as `of` does. In large runs, neighbouring ranks plan a section each."""
        if not layout.groups:
            return cls.of(gather_pieces(pieces, layout), roles, layout)
        tensors = gather_tensors(pieces, layout)
        with agree(layout):
            outline = Outline.of(tensors, roles)
        dims, size = _planners(layout)
        sections = outline.sections(layout.world, size)
        number = layout.rank % size
        is_planner = number < len(sections)
        # A rank without a section takes part in the collectives, with an empty one.
        section = sections[number] if is_planner else PlannedSection(slice(0))
        have = gather_some(pieces, tensors, outline.tensors_in(section), layout, dims)
        planned: list[bytes] | None = None
        with agree(layout):
            if is_planner:
                first = layout.rank - number
                ranks = range(first, first + size)
                shares = outline.shares(have, section, layout.world, ranks)
                # As bytes, so that each rank unpickles only its own share.
                planned = [pickle.dumps(share) for share in shares]
        gathered = gather_within(planned, layout.groups[:dims])
        own = [pickle.loads(sent[number]) for sent in gathered if sent]  # noqa: S301 - from this run
        return cls(outline, WriteShare.joined(own))


def _planners(layout: Layout) -> tuple[int, int]:
    """Return how many dims of the rank grid share the planning, and how many ranks these are."""
    size = 1
    for dims, group in enumerate(layout.groups, start=1):
        size *= dist.get_world_size(group)
        if size >= _PLANNERS:
            return dims, size
    return len(layout.groups), size


def _stored(by_rank: Iterable[Sequence[TensorSpec]], roles: Iterable[str]) -> list[StoredTensor]:
    stored_tensors: dict[str, StoredTensor] = {}
    for tensors, _ in groupby(by_rank):  # usually all ranks have the same tensors
        for key, shape, dtype in tensors:
            tensor_set, name = key_parts(key, roles)
            stored = StoredTensor(tensor_set, name, dtype_name(dtype, name), shape)
            if stored_tensors.setdefault(key, stored) != stored:
                raise BurnishError(
                    f"ranks disagree about tensor {key}",
                    have=f"{stored_tensors[key].dtype} {list(stored_tensors[key].shape)}",
                    want=f"{stored.dtype} {list(shape)}",
                    do="start all ranks with one configuration and one model",
                )
    return list(stored_tensors.values())


def rounded(x: Tensor, into: Tensor) -> None:
    """Write B, fp32 x rounded to bf16."""
    for bits, upper in in_chunks(x.detach().view(torch.int32), into.view(torch.int16)):
        upper.copy_(torch.add(bits, 0x8000).bitwise_right_shift_(16))


def residual(x: Tensor, into: Tensor) -> None:
    """Write R, the lower half of x's bits, as int16."""
    copy(x.detach().view(torch.int32), into)


def add_residual(rest: Tensor, x: Tensor) -> None:
    """Restore fp32 x from B in place, by adding R to its bits."""
    for lower, bits in in_chunks(rest.to(x.device), x.detach().view(torch.int32)):
        bits.add_(lower)
