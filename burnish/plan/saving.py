"""Bytes that one process needs to save a step, beside what is saved.

As `burnish.checkpoint.writer` has it: whole blocks are put together a few at a time while as many are written, and ranks
send each other what the writer of a block does not have. Left out: files of so many terabytes that their blocks are larger.
"""

from __future__ import annotations

from burnish.plan.share import PlannedLayout

_BLOCK = 4 << 20
"""Bytes of a block."""
_GROUP = 16 << 20
"""Bytes of blocks that are put together at one time, and that are sent and received meanwhile."""
_STORED = (2, 2, 4, 4)
"""Bytes of a weight in each of a step's files: of the model, of what that lacks of fp32, of AdamW's moments."""


def buffers(elements: int, layout: PlannedLayout) -> float:
    """Bytes for so many trained elements, of which all processes write as many; at most where the optimizer keeps less."""
    world = layout.world
    blocks = sum(-(-width * elements // _BLOCK) for width in _STORED)
    written = 2.0 * min(_GROUP, -(-blocks // world) * _BLOCK)
    others = 1 - layout.replicas / world
    if not others:
        return written
    sent = 2 * others * min(_GROUP, sum(_STORED) * elements / world)
    return written + max(_BLOCK, sent)  # the arena takes a block's size at least
