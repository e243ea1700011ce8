"""The blocks of a step's tensor files, from the disk to the ranks' memory: `burnish.checkpoint.writer` the other way round.

Each block is read by one rank, of those that want the most of it, and checked; its elements go to
whoever wants them. Where all that a part of a block is wanted for is to lie in one tensor as it
lies in the file, it is read to where it belongs. While a few blocks are given away, the next are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from burnish.boxes.pieces import PieceTable, TensorIndex
from burnish.boxes.plan import Move, Moves
from burnish.boxes.rounds import Group, schedule
from burnish.boxes.table import intersections
from burnish.boxes.transfer import Exchange
from burnish.checkpoint.layout import Block, Parts, Place, PlannedFile, blocks_of, owners, slots_of
from burnish.checkpoint.steps import Committed
from burnish.checkpoint.verify import read_block_into
from burnish.checkpoint.writer import BlockMemory, buffers
from burnish.distributed.collectives import agree
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.files.durable import naming_failures
from burnish.files.storage import ReadableFile, Source

_GROUP_BYTES = 4 << 20
# Blocks given away at one time; as many are being read meanwhile. One block at least.
_WAVE_BYTES = 4 << 20
_READERS = 2


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """Which blocks this rank reads, and where their elements go."""

    share: Sequence[Block]
    """The blocks that this rank reads."""
    group_blocks: int
    """How many of them at one time."""
    places: dict[int, Place]
    """Where in them a move's elements lie, by `Move.have`."""
    groups: Sequence[Group]
    """The moves from each few blocks of all ranks."""
    only: frozenset[int]
    """The parts, by `Move.have`, that a single move takes."""

    @classmethod
    def of(
        cls,
        files: Sequence[PlannedFile],
        block_bytes: Sequence[int],
        want: Sequence[PieceTable],
        layout: Layout,
    ) -> ReadPlan:
        """Plan for what ranks want of tensors in `files`, named by key; `block_bytes` has the size of each file's blocks."""
        tensors = TensorIndex()
        [wanted] = tensors.merge(want)
        blocks = [
            block
            for index, (file, size) in enumerate(zip(files, block_bytes, strict=True))
            for block in blocks_of(index, file.size, size)
        ]
        parts = Parts.of(files, blocks, tensors)
        piece, part, boxes = intersections(wanted.boxes, parts.pieces.boxes)
        dtype = parts.pieces.dtype[part]
        needed, block = np.unique(parts.block[part], return_inverse=True)
        size = boxes.elements * tensors.itemsizes()[dtype]
        owner = owners(block, wanted.rank[piece], size, len(needed), layout.world)
        moves = Moves(
            tensors,
            owner[block],
            part,
            wanted.rank[piece],
            wanted.index[piece],
            boxes,
            dtype,
        )
        group_blocks = max(1, _GROUP_BYTES // max(block_bytes, default=1))
        slots = slots_of(owner)
        groups = -(-int(slots.max(initial=-1) + 1) // group_blocks)
        own_slots = np.full(len(blocks), -1)
        mine = np.flatnonzero(owner == layout.rank)
        own_slots[needed[mine]] = slots[mine]
        return cls(
            [blocks[number] for number in needed[mine].tolist()],
            group_blocks,
            parts.places(own_slots),
            schedule(moves, layout.rank, _WAVE_BYTES, slots[block] // group_blocks, groups),
            frozenset(np.flatnonzero(np.bincount(part) == 1).tolist()),
        )


class BlockReader:
    """Reads this rank's blocks of a step's files, to memory carved from `arena`, and passes on what is in them."""

    def __init__(
        self,
        step: Committed,
        files: Sequence[PlannedFile],
        plan: ReadPlan,
        layout: Layout,
        arena: Arena,
    ) -> None:
        self._step = step
        self._files = files
        self._plan = plan
        self._layout = layout
        self._arena = arena

    def read(
        self,
        storage: Source,
        place: Callable[[Move], Tensor | None],
        write: Callable[[Move, Tensor], None],
    ) -> None:
        """Give every rank what it wants. Collective, errors included.

        `place` may give the memory in which a move's elements are wanted as they are in the file; for
        all others `write` takes them, valid until it returns, from any thread. Raises `DamagedBlock`
        naming file and tensors for a block that is not what was written.
        """
        what = f"{self._step.path} cannot be read"
        exchange = Exchange(self._layout, torch.device("cpu"), self._arena)
        sizes = [block.stop - block.start for block in self._plan.share]
        room = min(len(sizes), self._plan.group_blocks) * (max(sizes, default=0) + 64)
        with ExitStack() as opened:
            files: dict[int, ReadableFile] = {}
            with agree(self._layout), naming_failures(what):
                memory = [self._arena.take(room) for _ in range(2)]
                for index in sorted({block.file for block in self._plan.share}):
                    file = storage.open(self._step.path / self._files[index].path)
                    files[index] = opened.enter_context(file)
            readers = max(_READERS, storage.reads_at_once)
            pool = opened.enter_context(ThreadPoolExecutor(readers, "burnish-read"))
            asked = [self._ask(number, memory[number], place) for number in range(2)]
            coming = [self._begin(pool, files, few, write) for few in asked]
            failed: list[BaseException] = []
            for number, moves in enumerate(self._plan.groups):
                few, reads = asked.pop(0), coming.pop(0)
                failed += filter(None, [each.exception() for each in reads])
                for wave in moves.waves:
                    exchange.run(wave, few.give, write)
                asked.append(self._ask(number + 2, memory[number % 2], place))
                coming.append([] if failed else self._begin(pool, files, asked[-1], write))
            # Asked once: whoever failed has read no more, but kept up the exchanges that others wait for.
            with agree(self._layout), naming_failures(what):
                if failed:
                    raise failed[0]

    def _ask(self, number: int, memory: Tensor, place: Callable[[Move], Tensor | None]) -> _Few:
        """A few blocks that are to be read; none where there are no more."""
        plan = self._plan
        first = number * plan.group_blocks
        share = plan.share[first : first + plan.group_blocks]
        blocks = buffers([block.stop - block.start for block in share], memory)
        few = _Few(first, share, blocks, plan.places, [[] for _ in share])
        for move in plan.groups[number].own if share else ():
            where = plan.places[move.have]
            is_all = move.have in plan.only and move.box == where.box
            there = place(move) if is_all else None
            if there is None:
                few.own[where.slot - first].append(move)
            else:
                blocks[where.slot - first].put(where.start, there)
        return few

    def _begin(
        self,
        pool: ThreadPoolExecutor,
        files: dict[int, ReadableFile],
        few: _Few,
        write: Callable[[Move, Tensor], None],
    ) -> list[Future[None]]:
        """Have blocks read and checked, and what this rank wants of them written."""

        def read(block: Block, memory: BlockMemory, own: list[Move]) -> None:
            name = self._files[block.file].path
            read_block_into(files[block.file], self._step, name, block.number, memory.pieces())
            with torch.no_grad():
                for move in own:
                    write(move, few.elements(move))

        return [
            pool.submit(read, *each) for each in zip(few.share, few.blocks, few.own, strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Few:
    """A few blocks in memory."""

    first: int
    """Slot of the first."""
    share: Sequence[Block]
    blocks: list[BlockMemory]
    places: dict[int, Place]
    """The plan's."""
    own: list[list[Move]]
    """By block, what goes to this rank itself and is not read to where it belongs."""

    def elements(self, move: Move) -> Tensor:
        """The elements of a move, where they were read to."""
        where = self.places[move.have]
        block = self.blocks[where.slot - self.first]
        part = block.part(where.start, where.box.sizes, move.dtype)
        return part[move.box.relative_to(where.box).slices]

    def give(self, move: Move, into: Tensor) -> None:
        """Write the elements of a move to a message."""
        into.copy_(self.elements(move))
