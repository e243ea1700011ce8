"""Flat ranges of parameters as boxes of checkpoint tensors.

Megatron's distributed optimizer lays all parameters end to end and gives each data-parallel rank an
equal run of that, regardless of where parameters begin. What a rank has of a parameter is so a run of
its elements in C order. Here such a run is decomposed, through whatever the parameter fuses, into
boxes of checkpoint tensors, each of which is contiguous in the run: nothing is gathered, and every
piece is a view. A run of one tensor is at most three boxes of a matrix: the end of a row, whole
rows, the beginning of a row. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

from burnish.boxes.box import Box, flat_range, flat_runs
from burnish.models.names import Region


def boxes_in_range(
    region: Region, shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[int, Box]]:
    """The elements of a region that lie in the flat range `start:stop` of its parameter.

    `shape` is the parameter's. Yields where in the *range* a box's elements begin, and the box in the
    checkpoint tensor's coordinates; its elements follow each other in C order.
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
