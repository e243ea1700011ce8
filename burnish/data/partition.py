"""Dividing things into bins of equal cost under a limit of size: multiway number partitioning.

A first division by two quick methods, of which the better one is kept, then exchanges between a costly bin and
cheaper ones. The differencing method alone, which others use, knows no limit and leaves a long tail
badly divided; each method alone loses where the other is strong. All is integer arithmetic on the host: every
rank computes the same. Left out: exact search, and what the things are (`burnish.data.balance`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
"""Whole numbers, shape [N]."""

Bins = list[list[int]]
"""The indices of the items in each bin."""

_LAYERS = 16
"""With more items per bin than this, differencing is no better than falling cost, and slower."""
_GIVEN, _TAKEN = 32, 64
"""Items of the costly bin, and of cheaper ones, that are looked at for an exchange."""
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
    """The items in `count` bins of about equal cost, within the limit; None where no such division was found.

    With `equal_counts` no bin has two items more than another.
    """
    if count == 1:
        return [list(range(len(items.costs)))] if int(items.sizes.sum()) <= items.limit else None
    found = [] if equal_counts else [_by_falling_cost(items, count)]
    if equal_counts or len(items.costs) <= _LAYERS * count:
        found.append(_by_differences(items, count))
    fitting = [bins for bins in found if bins is not None]
    if not fitting:
        return None
    best = min(fitting, key=lambda bins: max(int(items.costs[held].sum()) for held in bins))
    level(best, items, keep_counts=equal_counts)
    return best


def level(bins: Bins, items: Items, *, keep_counts: bool = False) -> None:
    """Even out the costs of bins that are within the limit, in place and a bounded number of times.

    `keep_counts`: exchange items only one for one.
    """
    _Leveller(bins, items, keep_counts).run()


def _by_falling_cost(items: Items, count: int) -> Bins | None:
    """Longest processing time first (Graham 1969): the costliest item to the idlest bin with room.

    None when an item finds no room, or when finding it takes long because all bins are full.
    """
    bins: Bins = [[] for _ in range(count)]
    room = [items.limit] * count
    heap = [(0, index) for index in range(count)]
    patience = len(items.sizes) + count
    sizes, costs = items.sizes.tolist(), items.costs.tolist()
    for item in np.argsort(-items.costs, kind="stable").tolist():
        full: list[tuple[int, int]] = []
        while heap and room[heap[0][1]] < sizes[item]:
            full.append(heapq.heappop(heap))
        patience -= len(full)
        if not heap or patience < 0:
            return None
        load, index = heap[0]
        bins[index].append(item)
        room[index] -= sizes[item]
        heapq.heapreplace(heap, (load + costs[item], index))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


@dataclass(frozen=True, slots=True, eq=False)
class _Division:
    """Some items in `count` bins, the costliest first."""

    loads: Integers
    """[count], falling."""
    layer: Integers | None
    """[at most count], one item for each of the first bins; None for two divisions put together."""
    parts: tuple[_Division, ...] = ()
    """The two, of which the second's bins were added in reverse order."""
    order: Integers | None = None
    """[count], which sum of the two's bins each bin is."""


def _by_differences(items: Items, count: int) -> Bins | None:
    """Balanced differencing (Karmarkar & Karp 1982; Michiels, Korst & Aarts 2003 for more than two bins).

    Items enter in layers of `count` of like cost, so that all bins get equally many (or one more).
    The two divisions with the largest differences are put together, heavy bins on light ones,
    until one is left. None when it exceeds the limit.
    """
    order = np.argsort(-items.costs, kind="stable")
    heap = []
    for number, start in enumerate(range(0, len(order), count)):
        layer = order[start : start + count]
        loads = np.zeros(count, dtype=np.int64)
        loads[: len(layer)] = items.costs[layer]
        heap.append((int(loads[-1] - loads[0]), number, _Division(loads, layer)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        loads = first.loads + second.loads[::-1]
        falling = np.argsort(-loads, kind="stable")
        merged = _Division(loads[falling], None, (first, second), falling)
        heapq.heappush(heap, (int(loads.min() - loads.max()), number, merged))
    bins = _contents(heap[0][2], count) if heap else [[] for _ in range(count)]
    fits = all(int(items.sizes[held].sum()) <= items.limit for held in bins)
    return bins if fits else None


def _contents(division: _Division, count: int) -> Bins:
    """The items in each bin of a division."""
    bins: Bins = [[] for _ in range(count)]
    left = [(division, np.arange(count))]
    while left:
        part, place = left.pop()
        if part.layer is not None:
            for item, index in zip(part.layer.tolist(), place.tolist(), strict=False):
                bins[index].append(item)
            continue
        before = np.empty_like(place)
        before[part.order] = place
        first, second = part.parts
        left += [(first, before), (second, before[::-1])]
    return bins


class _Leveller:
    """Evens out costs by moving one item, or exchanging two, between a costly bin and a cheaper one."""

    def __init__(self, bins: Bins, items: Items, keep_counts: bool) -> None:
        self._bins, self._items, self._keep_counts = bins, items, keep_counts
        self._loads = np.array([items.costs[held].sum() for held in bins], dtype=np.int64)
        self._fills = np.array([items.sizes[held].sum() for held in bins], dtype=np.int64)
        self._mean = -(-int(self._loads.sum()) // len(bins))

    def run(self) -> None:
        """Improve the costliest bin that can be improved, a bounded number of times."""
        enough = self._mean + self._mean // _CLOSE_ENOUGH
        stuck = np.zeros(len(self._bins), dtype=np.bool_)
        for _ in range(_EXCHANGES_PER_BIN * len(self._bins)):
            improvable = (self._loads > enough) & ~stuck
            if not improvable.any():
                return
            high = int(np.argmax(np.where(improvable, self._loads, -1)))
            stuck[high] = not self._improve(high)

    def _improve(self, high: int) -> bool:
        """Make the best move or exchange between `high` and a cheaper bin; False if none helps.

        The best leaves the costlier of the two cheapest, the mean being as good as anything below it,
        and among equals moves the least.
        """
        items, given = self._items, self._bins[high][:: self._step(high, _GIVEN)]
        taken, owner = self._offers(high)
        nothing = taken < 0
        costs, sizes = (np.where(nothing, 0, of[taken]) for of in (items.costs, items.sizes))
        change, growth = (
            items.costs[given][:, None] - costs,
            items.sizes[given][:, None] - sizes,
        )
        mine, theirs = self._loads[high] - change, self._loads[owner] + change
        fits = (self._fills[owner] + growth <= items.limit) & (
            self._fills[high] - growth <= items.limit
        )
        after = np.where(fits, np.maximum(np.maximum(mine, theirs), self._mean), self._loads[high])
        best = after.min(initial=self._loads[high])
        if best >= self._loads[high]:
            return False
        equals = np.flatnonzero(after == best)
        row, column = np.unravel_index(equals[np.argmin(change.flat[equals])], after.shape)
        self._move(given[row], high, int(owner[column]))
        if not nothing[column]:
            self._move(int(taken[column]), int(owner[column]), high)
        return True

    def _offers(self, high: int) -> tuple[Integers, Integers]:
        """What cheaper bins, the cheapest first, can give in return, and which bin gives it; -1 stands for nothing."""
        taken: list[int] = []
        owner: list[int] = []
        for low in np.argsort(self._loads, kind="stable").tolist():
            if self._loads[low] >= self._loads[high] or len(taken) >= _TAKEN:
                break
            offers = self._bins[low][:: self._step(low, _TAKEN)]
            offers = offers if self._keep_counts else [*offers, -1]
            taken += offers
            owner += [low] * len(offers)
        return np.array(taken, dtype=np.int64), np.array(owner, dtype=np.int64)

    def _step(self, index: int, most: int) -> int:
        return max(1, -(-len(self._bins[index]) // most))

    def _move(self, item: int, source: int, target: int) -> None:
        self._bins[source].remove(item)
        self._bins[target].append(item)
        for totals, values in ((self._loads, self._items.costs), (self._fills, self._items.sizes)):
            totals[source] -= values[item]
            totals[target] += values[item]
