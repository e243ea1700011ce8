"""Compute the bytes that a rank holds beside the state while it saves: groups of spans, and messages (`burnish.checkpoint.save`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from burnish.plan.model import FP32, PlannedModel, Weight

# Bytes of an element in a step's files: weight, residual, two moments.
_WIDTHS = (2, 2, FP32, FP32)
_MIB = 1 << 20
# Least and most bytes of a block, and blocks of a typical tensor.
_BLOCK = (_MIB // 16, 4 * _MIB)
_BLOCKS_PER_TENSOR = 64
# A group ends with the span that reaches so many bytes. A span has at most so many.
_GROUP = 12 * _MIB
_SPAN = 4 * _MIB
# Least bytes of a region of host memory.
_REGION = 4 * _MIB


class _Tensors(NamedTuple):
    """Tensors that are alike: one of each layer of a kind."""

    weight: Weight
    layers: int


def save_buffers(models: Sequence[PlannedModel], world: int, replicas: int, tensor: int) -> float:
    """Return the bytes of two groups, which take turns, and of messages in one process out of `world`."""
    by_model = [list(_trained(model)) for model in models]
    tensors = [each for some in by_model for each in some]
    elements = [sum(weight.elements * count for weight, count in some) for some in by_model]
    block = _block_bytes(tensors)
    if world == 1:  # all spans are long, but those at the ends of files
        last = max(width * size % _SPAN for size in elements for width in _WIDTHS)
    elif replicas > 1:  # which take turns, block by block
        last = block
    else:  # a rank writes the rows that it has
        last = min(_SPAN, FP32 * max(weight.elements for weight, _ in tensors) // world)
    group = min(sum(_WIDTHS) * sum(elements) / world, _GROUP + last)
    ranks = world // replicas
    received = sum(count * _from_others(weight, block, ranks, tensor) for weight, count in tensors)
    # What others have of its blocks, and it of theirs.
    messages = 2 * min(received / world, (1 - 1 / ranks) * group)
    return _regions((group, group, messages))


def _trained(model: PlannedModel) -> Iterator[_Tensors]:
    for kind, count in model.shape.counts.items():
        yield from (_Tensors(weight, count) for weight in model.trained[kind])
    yield from (_Tensors(weight, 1) for weight in model.trained_root)


def _block_bytes(tensors: Sequence[_Tensors]) -> int:
    """Return the bytes of a block: a 64th of the tensor with the middle byte (`block_bytes_for`)."""
    sizes = [
        (width * weight.elements / (weight.experts or 1), count * (weight.experts or 1))
        for weight, count in tensors
        for width in _WIDTHS
    ]
    left = sum(size * count for size, count in sizes) / 2
    typical = 0.0
    for typical, count in sorted(sizes):
        left -= typical * count
        if left <= 0:
            break
    least, most = _BLOCK
    return int(min(most, max(least, 2 ** math.floor(math.log2(typical / _BLOCKS_PER_TENSOR)))))


def _from_others(weight: Weight, block: int, ranks: int, tensor: int) -> float:
    """Return the bytes of a tensor that the writers of its blocks get from others.

    Rows begin where blocks do, if a rank's are as long. The columns that tensor parallelism cuts have parts in all blocks.
    """
    columns = tensor if weight.shared and weight.is_cut_by_columns else 1
    sizes = [width * weight.elements for width in _WIDTHS]
    return sum(size * (1 - 1 / (ranks if size / ranks < block else columns)) for size in sizes)


def _regions(sizes: Iterable[float]) -> float:
    """Return the bytes of the regions that an `Arena` takes for tensors of these sizes."""
    total = 0.0
    room = 0.0
    for size in sizes:
        if size > room:
            room = max(size, total / 4, _REGION)
            total += room
        room -= size
    return total
