"""Saves of `bench.planning`, with the host memory that a save takes outside torch's allocator.

In a run this memory is the engine's arena and, for a save in the background, the copy of the state and the memory of the process
beside the rank. Here one process does both, one after the other: the copy still exists while its blocks are put together.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from burnish.checkpoint.background import Memory, stage, staged_in
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.save import Contents, ModelContents
from burnish.distributed.collectives import from_main
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine, Part


class Saves:
    """Commits steps to a directory that `close` removes."""

    def __init__(self, layout: Layout, *, background: bool) -> None:
        self._background = background
        self._step = 0
        self._held = ExitStack()
        mine = self._held.enter_context(tempfile.TemporaryDirectory())
        self._checkpoints = Checkpoints(Path(from_main(mine, layout)), layout)

    def save(self, engines: Mapping[str, Engine]) -> int:
        """Commit a step of engines by role. Return the bytes of host memory that this took. Collective."""
        arena = Arena(torch.device("cpu"))
        self._step = self._step + 1
        contents = Contents({role: _contents(engine) for role, engine in engines.items()}, {})
        if not self._background:
            self._checkpoints.save(self._step, replace(contents, arena=arena))
            return arena.held
        memory = Memory.make()
        staged = stage(contents, memory)
        size = os.fstat(memory.descriptor).st_size
        copied = staged_in(memory.take(size), staged)
        self._checkpoints.save(self._step, replace(copied, arena=arena))
        memory.close()
        return arena.held + size

    def close(self) -> None:
        """Remove the steps."""
        self._held.close()


def _contents(engine: Engine) -> ModelContents:
    shards = {part: list(engine.shards(part)) for part in (Part.WEIGHTS, Part.TRAINING)}
    return ModelContents(shards[Part.WEIGHTS], shards[Part.TRAINING], {"config.json": b"{}"})
