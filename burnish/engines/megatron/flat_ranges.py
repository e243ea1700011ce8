"""Flat ranges of parameters as boxes of checkpoint tensors.

Megatron's distributed optimizer lays parameters end to end and gives each rank an equal run. A rank's part of a parameter is a run
of elements in C order. It is decomposed into boxes of checkpoint tensors, each contiguous in the run, so every piece is a view. A
run of a matrix is at most three boxes: the end of a row, whole rows, the beginning of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

from burnish.boxes.box import Box, flat_range, flat_runs
from burnish.models.names import Region


def boxes_in_range(
    region: Region, shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[int, Box]]:
    """Yield the boxes of a region in the flat range `start:stop` of its parameter of this `shape`.

    Each comes with the offset of its elements in the range; they are contiguous, in C order.
    """
    passed = 0  # elements of the region before the run
    for first, count in flat_runs(shape, region.box):
        begin, end = max(start, first), min(stop, first + count)
        if begin < end:
            done = begin - start
            inside = passed - first
            for box in flat_range(region.box.sizes, begin + inside, end + inside):
                yield done, _in_tensor(region, box)
                done += box.elements
        passed += count


def _in_tensor(region: Region, box: Box) -> Box:
    """A box in coordinates of the region, in those of its checkpoint tensor."""
    kept = Box(
        tuple(box.offsets[dim] for dim in region.dims), tuple(box.sizes[dim] for dim in region.dims)
    )
    return kept.shift(region.start) if region.start else kept
