"""Divide items into bins of equal cost under a limit of size: multiway number partitioning.

Two quick methods each make a division. Exchanges between a costly bin and cheaper ones then improve
the better one. Differencing alone, as others use it, knows no limit and divides a long tail badly.
All arithmetic is on integers, so every rank computes the same.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
"""Whole numbers, shape [N]."""

Bins = list[list[int]]
"""The indices of the items in each bin."""

_LAYERS = 32
"""With more items per bin than this, differencing is no better than the other methods, and slower."""
_GIVEN, _TAKEN, _SEARCHED = 32, 32, 256
"""Items of the costly bin, and of cheaper ones, among which the best exchange is looked for, and any at all."""
_EXCHANGES_PER_BIN = 2
_CLOSE_ENOUGH = 10_000
"""A bin that costs more than the mean by less than one part in this is left as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """What is divided."""

    costs: Integers
    """[N], what is evened out, each at least 1."""
    sizes: Integers
    """[N], what is limited."""
    limit: int
    """Most that the sizes in one bin may add up to."""


def divide(items: Items, count: int, *, equal_counts: bool = False) -> Bins | None:
    """Divide items into `count` bins of about equal cost within the limit, or return None.

    With `equal_counts` no bin has two items more than another.
    """
    if count == 1:
        return [list(range(len(items.costs)))] if int(items.sizes.sum()) <= items.limit else None
    lists = _Lists(items)
    few = len(items.costs) <= _LAYERS * count
    found: list[Bins | None] = [_by_differences(lists, count)] if few else []
    if not equal_counts:
        found.append(_by_falling_cost(lists, count))
    elif not few:
        found.append(_by_layers(lists, count))
    divisions = [_Division(bins, lists, equal_counts) for bins in found if bins is not None]
    fitting = [division for division in divisions if division.fits()]
    if not fitting:
        return None
    best = min(fitting, key=_Division.costliest)
    best.level()
    return best.bins


def level(bins: Bins, items: Items) -> None:
    """Even out the costs of bins in place, within the limit, a bounded number of times."""
    _Division(bins, _Lists(items), False).level()


class _Lists:
    """`Items` as Python lists, whose elements are quick to read. Index -1 stands for no item."""

    def __init__(self, items: Items) -> None:
        self.costs: list[int] = items.costs.tolist()
        self.sizes: list[int] = [*items.sizes.tolist(), 0]
        self.limit = items.limit
        self.falling: list[int] = np.argsort(-items.costs, kind="stable").tolist()


def _by_falling_cost(items: _Lists, count: int) -> Bins | None:
    """Give the costliest item to the idlest bin with room: longest processing time first (Graham 1969).

    Returns None if an item finds no room, or if the search takes long because all bins are full.
    """
    bins: Bins = [[] for _ in range(count)]
    room = [items.limit] * count
    heap = [(0, index) for index in range(count)]
    patience = len(items.costs) + count
    for item in items.falling:
        full: list[tuple[int, int]] = []
        while heap and room[heap[0][1]] < items.sizes[item]:
            full.append(heapq.heappop(heap))
        patience -= len(full)
        if not heap or patience < 0:
            return None
        load, index = heap[0]
        bins[index].append(item)
        room[index] -= items.sizes[item]
        heapq.heapreplace(heap, (load + items.costs[item], index))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _by_layers(items: _Lists, count: int) -> Bins:
    """Do the same with equal counts: deal out `count` items at a time. Ignores the limit."""
    bins: Bins = [[] for _ in range(count)]
    loads = [0] * count
    for start in range(0, len(items.falling), count):
        idlest = sorted(range(count), key=loads.__getitem__)
        layer = items.falling[start : start + count]
        for item, index in zip(layer, idlest, strict=False):
            bins[index].append(item)
            loads[index] += items.costs[item]
    return bins


def _by_differences(items: _Lists, count: int) -> Bins:
    """Balanced differencing (Karmarkar & Karp 1982; Michiels, Korst & Aarts 2003 for more than two bins).

    Items enter in layers of `count`, so bins get equally many (or one more). The two divisions with the
    largest differences are merged, heavy bins with light ones, until one is left. Ignores the limit.
    """
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, max(1, len(items.falling)), count):
        layer = [(items.costs[item], [item]) for item in items.falling[start : start + count]]
        layer += [(0, [])] * (count - len(layer))
        heap.append((layer[-1][0] - layer[0][0], start, layer))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, start, first = heapq.heappop(heap)
        second = reversed(heap[0][2])
        both = [(a + b, x + y) for (a, x), (b, y) in zip(first, second, strict=True)]
        both.sort(key=itemgetter(0), reverse=True)
        heapq.heapreplace(heap, (both[-1][0] - both[0][0], start, both))
    return [held for _, held in heap[0][2]]


_Entry = tuple[int, int]
"""Cost and index of an item."""
_NOTHING: _Entry = (0, -1)
"""What a bin offers in return for an item where counts may change."""


class _Division:
    """Items in bins, improved by moving one item or exchanging two."""

    def __init__(self, bins: Bins, items: _Lists, keep_counts: bool) -> None:
        self.bins, self._items = bins, items
        self._keep_counts = keep_counts
        self._spare = [] if keep_counts else [_NOTHING]
        costs, sizes = items.costs.__getitem__, items.sizes.__getitem__
        self._fills = [sum(map(sizes, held)) for held in bins]
        self._ranking = sorted([(sum(map(costs, held)), index) for index, held in enumerate(bins)])
        self._mean = -(-sum(map(itemgetter(0), self._ranking)) // len(bins))
        self._enough = self._mean + self._mean // _CLOSE_ENOUGH

    def fits(self) -> bool:
        """Whether all bins are within the limit."""
        return max(self._fills) <= self._items.limit

    def costliest(self) -> int:
        """The cost of the costliest bin."""
        return self._ranking[-1][0]

    def level(self) -> None:
        """Improve the costliest bin repeatedly, a bounded number of times.

        A bin that cannot be improved is passed over. With equal counts bins run at the same time, so that
        ends the search.
        """
        if self.costliest() <= self._enough:
            return
        costs = self._items.costs
        self._held = [
            self._spare + sorted([(costs[item], item) for item in held]) for held in self.bins
        ]
        for _ in range(_EXCHANGES_PER_BIN * len(self.bins)):
            if not self._ranking or self.costliest() <= self._enough:
                break
            load, high = self._ranking.pop()
            found = self._best(load, high)
            if found is not None:
                self._exchange(load, high, *found)
            elif self._keep_counts:
                break
        for held, entries in zip(self.bins, self._held, strict=True):
            held[:] = [item for _, item in entries[len(self._spare) :]]

    def _best(self, load: int, high: int) -> tuple[int, _Entry, _Entry] | None:
        """Find the best exchange for bin `high`: the other bin's rank, the item to give, the item to take.

        The best exchange leaves the costlier of the two bins cheapest, but no cheaper than the mean.
        """
        best, found, seen = load, None, 0
        sizes, held = self._items.sizes, self._held[high]
        gives = held[:: -1 - (len(held) - 1) // _GIVEN]
        least = self._fills[high] - self._items.limit
        for place, (other, low) in enumerate(self._ranking):
            offers, most = self._held[low], self._items.limit - self._fills[low]
            wanted = min((load - other) // 2, load - self._mean)
            if load - wanted >= best or not offers:
                break
            lowest = load + offers[0][0]
            for given in gives:
                cost, item = given
                if lowest - cost >= best:
                    break
                nearest = bisect_left(offers, (cost - wanted, -1))
                for taken in offers[nearest - 1 if nearest else 0 : nearest + 1]:
                    change = cost - taken[0]
                    if load - change >= best or other + change >= best:
                        continue
                    if least <= sizes[item] - sizes[taken[1]] <= most:
                        best = max(load - change, other + change, self._mean)
                        found = place, given, taken
                        if best <= self._enough:
                            return found
            seen += len(offers)
            if seen >= (_TAKEN if found else _SEARCHED):
                break
        return found

    def _exchange(self, load: int, high: int, place: int, given: _Entry, taken: _Entry) -> None:
        other, low = self._ranking.pop(place)
        change = given[0] - taken[0]
        insort(self._ranking, (load - change, high))
        insort(self._ranking, (other + change, low))
        self._move(given, high, low)
        if taken != _NOTHING:
            self._move(taken, low, high)

    def _move(self, entry: _Entry, source: int, target: int) -> None:
        held = self._held[source]
        del held[bisect_left(held, entry)]
        insort(self._held[target], entry)
        size = self._items.sizes[entry[1]]
        self._fills[source] -= size
        self._fills[target] += size
