"""Intersect and subtract n-dimensional boxes, in global coordinates. "Flat" is C order over the whole tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangular part of a tensor: an offset and a size per dim; () for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in an array of the tensor's shape."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def shift(self, by: tuple[int, ...]) -> Box:
        """Move the box by an offset per dim."""
        return Box(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.sizes)

    def relative_to(self, other: Box) -> Box:
        """Return this box in the coordinates of another."""
        return self.shift(tuple(-o for o in other.offsets))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether the box lies inside a tensor."""
        return len(self.sizes) == len(shape) == len(self.offsets) and all(
            o >= 0 and s >= 0 and o + s <= d
            for o, s, d in zip(self.offsets, self.sizes, shape, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box of common elements, or None."""
    starts = []
    sizes = []
    for ao, asz, bo, bsz in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        start = max(ao, bo)
        size = min(ao + asz, bo + bsz) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    return Box(tuple(starts), tuple(sizes))


def subtract(a: Box, b: Box) -> list[Box]:
    """Return the elements of `a` outside `b`, as at most 2 disjoint boxes per dim."""
    common = intersect(a, b)
    if common is None:
        return [a] if a.elements else []
    rest: list[Box] = []
    offsets = list(a.offsets)
    sizes = list(a.sizes)
    for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        before = start - offsets[dim]
        after = offsets[dim] + sizes[dim] - (start + size)
        for first, extent in ((offsets[dim], before), (start + size, after)):
            if extent:
                part_offsets = list(offsets)
                part_sizes = list(sizes)
                part_offsets[dim], part_sizes[dim] = first, extent
                rest.append(Box(tuple(part_offsets), tuple(part_sizes)))
        offsets[dim], sizes[dim] = start, size
    return rest


def flat_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Split a flat range into contiguous boxes, in order, at most 2 per dim. Raises `ValueError` outside the tensor."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"flat range {start}:{stop} outside a tensor of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return _in_row(first, flat_range(shape[1:], head, tail))
    boxes: list[Box] = []
    if head:
        boxes += _in_row(first, flat_range(shape[1:], head, inner))
        first += 1
    if first < last:
        boxes.append(Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    if tail:
        boxes += _in_row(last, flat_range(shape[1:], 0, tail))
    return boxes


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]


def flat_runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Yield a box's maximal contiguous runs in C order: (flat start, count). Raises `ValueError` outside the tensor."""
    if not box.fits(shape):
        raise ValueError(f"{box} does not lie inside a tensor of shape {shape}")
    if box.elements == 0:
        return
    cut = len(shape) - 1  # becomes the innermost dim that the box does not span, or 0
    while cut > 0 and box.sizes[cut] == shape[cut]:
        cut -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    count = math.prod(box.sizes[max(cut, 0) :])
    outer = [range(0, box.sizes[dim] * strides[dim], strides[dim]) for dim in range(max(cut, 0))]
    for steps in itertools.product(*outer):
        yield first + sum(steps), count
