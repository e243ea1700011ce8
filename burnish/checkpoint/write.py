"""The blocks of a step's tensor files, from the ranks' memory to the disk.

A rank has the blocks that it writes in one buffer, a group at a time: their elements arrive from
wherever they are held, each block is hashed where it lies and written to its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from burnish.checkpoint.blocks import Block, Part, PlannedFile, blocks_of, parts_of, shares_of
from burnish.checkpoint.manifest import BLOCK_BYTES, block_hash
from burnish.checkpoint.relay import GROUP_BLOCKS, Relay
from burnish.files.durable import naming_failures
from burnish.files.storage import File, Storage
from burnish.parallel.collectives import agree
from burnish.parallel.layout import Layout
from burnish.parallel.shards import Piece
from burnish.parallel.transfer import Move, plan

BlockHashes = dict[tuple[int, int], str]
"""By index of the file and index of the block in it."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A piece that a rank wants because it lies in a block that the rank writes."""

    piece: Piece
    block: int
    part: Part


class BlockWriter:
    """Writes this rank's share of the blocks of `files`, which lie in `directory` at their final size.

    `have` gives every rank's pieces by the keys under which the tensors are stored; all ranks give
    the same. Raises `MissingError` for a tensor that nobody has all of.
    """

    def __init__(
        self,
        directory: Path,
        files: Sequence[PlannedFile],
        have: Sequence[Sequence[Piece]],
        layout: Layout,
        device: torch.device,
    ) -> None:
        self._directory = directory
        self._files = files
        self._layout = layout
        blocks = [b for i, file in enumerate(files) for b in blocks_of(i, file.size, BLOCK_BYTES)]
        shares = shares_of(blocks, layout.world)
        wanted = [_wanted(files, share) for share in shares]
        moves = plan(have, [[w.piece for w in theirs] for theirs in wanted])
        self._share = shares[layout.rank]
        self._wanted = wanted[layout.rank]
        self._groups = -(-max(map(len, shares)) // GROUP_BLOCKS)
        self._relay = Relay(
            moves,
            lambda move: wanted[move.target][move.want].block // GROUP_BLOCKS,
            layout,
            device,
        )

    def write(self, read: Callable[[Move], Tensor], storage: Storage, what: str) -> BlockHashes:
        """Write and sync all blocks; the hashes of this rank's. Collective, errors included.

        `read` gives the elements of a move that this rank has, already in the stored dtype; `what`
        starts the message when the disk fails.
        """
        buffer = torch.empty(min(len(self._share), GROUP_BLOCKS) * BLOCK_BYTES, dtype=torch.uint8)
        hashes: BlockHashes = {}
        with ExitStack() as opened:
            files: dict[int, File] = {}
            with agree(self._layout), naming_failures(what):
                for index in sorted({block.file for block in self._share}):
                    path = self._directory / self._files[index].path
                    files[index] = opened.enter_context(storage.open(path, write=True))
            for group in range(self._groups):
                first = group * GROUP_BLOCKS
                blocks = self._share[first : first + GROUP_BLOCKS]
                self._relay.run(group, read, lambda move, part: self._place(buffer, move, part))
                with agree(self._layout), naming_failures(what):
                    hashes |= self._flush(buffer, blocks, files)
            with agree(self._layout), naming_failures(what):
                for file in files.values():
                    file.sync()
        return hashes

    def _place(self, buffer: Tensor, move: Move, elements: Tensor) -> None:
        """Put elements that arrived where they belong in the buffer."""
        wanted = self._wanted[move.want]
        part = wanted.part
        start = wanted.block % GROUP_BLOCKS * BLOCK_BYTES + part.start
        raw = buffer[start : start + part.box.elements * part.dtype.itemsize]
        there = raw.view(part.dtype).view(part.box.sizes)
        there[move.box.relative_to(part.box).slices].copy_(elements)

    def _flush(
        self, buffer: Tensor, blocks: Sequence[Block], files: dict[int, File]
    ) -> BlockHashes:
        memory = memoryview(buffer.numpy().data).cast("B")
        hashes: BlockHashes = {}
        for slot, block in enumerate(blocks):
            start = slot * BLOCK_BYTES
            data = memory[start : start + block.stop - block.start]
            header = self._files[block.file].header[block.start : block.stop]
            data[: len(header)] = header
            hashes[block.file, block.number] = block_hash(data)
            files[block.file].pwrite(data, block.start)
        return hashes


def _wanted(files: Sequence[PlannedFile], share: Sequence[Block]) -> list[_Wanted]:
    return [
        _Wanted(Piece(part.key, part.shape, part.box, part.dtype), index, part)
        for index, block in enumerate(share)
        for part in parts_of(files[block.file], block)
    ]
