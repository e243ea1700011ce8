"""A plan carried out group by group, so that what is in memory between ranks and files stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from burnish.parallel.layout import Layout
from burnish.parallel.transfer import Exchange, Move, waves

GROUP_BLOCKS = 8
"""Blocks that a rank has in memory at one time."""
_WAVE_BYTES = 32 << 20


class Relay:
    """The moves of a plan, divided into groups that are run one after the other on all ranks."""

    def __init__(
        self,
        moves: Iterable[Move],
        group_of: Callable[[Move], int],
        layout: Layout,
        device: torch.device,
    ) -> None:
        self._groups: dict[int, list[Move]] = {}
        for move in moves:
            self._groups.setdefault(group_of(move), []).append(move)
        self._rank = layout.rank
        self._exchange = Exchange(layout, device)

    def run(
        self, group: int, read: Callable[[Move], Tensor], write: Callable[[Move, Tensor], None]
    ) -> None:
        """Carry out a group: `read` gives what this rank has, `write` takes what it wants. Collective."""
        moves = self._groups.pop(group, [])
        with torch.no_grad():
            for move in moves:
                if move.source == move.target == self._rank:
                    write(move, read(move))
            for wave in waves(moves, _WAVE_BYTES):
                self._exchange.run(wave, read, write)
