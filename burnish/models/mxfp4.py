"""Read weights in MXFP4 (OCP Microscaling Formats, version 1.0), in which gpt-oss is published.

Each 32 numbers of 4 bits share a power of 2. A weight `name` [E, in, out] lies in `name_blocks` [E, out, in / 32, 16], two numbers a
byte, and `name_scales` [E, out, in / 32], exponents plus 127.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from burnish.boxes.box import Box, whole
from burnish.boxes.shards import Shard
from burnish.boxes.tensor_reader import TensorInfo, TensorReader

BLOCKS = "_blocks"
SCALES = "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def plain_shape(tensors: Mapping[str, TensorInfo], name: str) -> tuple[int, ...] | None:
    """Return the shape of a weight that is stored in MXFP4; None if it is not."""
    blocks = tensors.get(name + BLOCKS)
    scales = tensors.get(name + SCALES)
    if blocks is None or scales is None or (*scales.shape, 16) != blocks.shape:
        return None
    is_packed = blocks.dtype == scales.dtype == torch.uint8 and len(blocks.shape) == 4
    experts, out, groups, _ = blocks.shape if is_packed else (0, 0, 0, 0)
    return (experts, 32 * groups, out) if is_packed else None


def fill(shard: Shard, name: str, reader: TensorReader) -> None:
    """Fill a part of a weight. Holds one expert in fp32."""
    first, *rest = (
        slice(o, o + s) for o, s in zip(shard.box.offsets, shard.box.sizes, strict=True)
    )
    for into, expert in zip(shard.tensor, range(first.start, first.stop), strict=True):
        parts = []
        for suffix in (BLOCKS, SCALES):
            sizes = reader.tensors[name + suffix].shape[1:]
            part = torch.empty((1, *sizes), dtype=torch.uint8)
            reader.read(name + suffix, Box((expert, *whole(sizes).offsets), (1, *sizes)), part)
            parts.append(part[0])
        into.copy_(dequantized(*parts).t()[tuple(rest)])


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 numbers [out, in] of blocks [out, in / 32, 16] and scales [out, in / 32]."""
    numbers = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
    places = torch.stack((blocks & 15, blocks >> 4), dim=-1).int()
    return torch.ldexp(numbers[places], scales.int()[..., None, None] - 127).flatten(1)
