"""Assign sequences to ranks and micro-batches: fewest rounds first, then equal cost.

Each micro-batch is a round of collectives, as slow as its costliest rank. Integer arithmetic makes
every rank compute the same.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from burnish.errors import UsageError

Integers = npt.NDArray[np.int64]
"""Whole numbers, shape [N]."""
Costs = npt.NDArray[np.float64]
"""The time that each of N things takes, in any unit, shape [N]."""
Bins = list[list[int]]
"""The indices of the items in each bin."""

_COST_SUM = 2.0**52
"""What all costs are scaled to add up to, at most, as integers."""
_GIVEN, _TAKEN, _SEARCHED = 32, 32, 256
"""Items of the costly bin, and of cheaper ones, among which the best exchange is looked for, and any at all."""
_EXCHANGES_PER_BIN = 2
_CLOSE_ENOUGH = 10_000
"""A bin that costs more than the mean by less than one part in this is left as it is."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Which sequences each rank runs."""

    microbatches: list[list[Integers]]
    """For each rank equally many micro-batches, in the order they are run, each the indices of its sequences, ascending."""
    ranks: Integers
    """[N] the rank of each sequence."""
    imbalance: float
    """The sum over rounds of the costliest micro-batch, over the mean of the ranks' costs: how much longer a step
    takes than if nobody waited. 1 is perfect; with one round it is max / mean over ranks."""


def share_out(
    lengths: Integers,
    costs: Costs,
    ranks: int,
    budget: int,
    *,
    groups: Integers | None = None,
) -> Shares:
    """Assign every sequence to a rank and a micro-batch.

    `lengths` [N] are in tokens; no micro-batch exceeds `budget`. `costs` [N] are evened out.
    Sequences with the same number in `groups` [N] stay in one micro-batch. Cheap rounds come first
    and last, so a pipeline fills and empties quickly.

    Raises `UsageError` for a cost that is not positive, or a sequence or group over the budget.
    """
    group = np.arange(len(lengths))
    if groups is not None:
        _, group = np.unique(groups, return_inverse=True)
    sizes = _summed(lengths, group)
    _check_limit(sizes, budget, group)
    items = Items(_summed(_whole(costs), group), sizes, budget)
    fewest = max(1, -(-int(lengths.sum()) // (budget * ranks)))
    bins = divide(items, fewest * ranks)
    if bins is None:
        tight = _packed(items)
        count = -(-len(tight) // ranks) * ranks
        bins = divide(items, count) if count > fewest * ranks else None
        if bins is None:
            bins = _spread(tight, items, count)
            _Division(bins, items).level()
    return _dealt(bins, items, group, ranks)


def share_evenly(costs: Costs, ranks: int) -> Bins:
    """Give each rank things of about equal total cost. Indices ascend."""
    whole = _whole(costs)
    bins = divide(Items(whole, whole, int(whole.sum())), ranks)
    return [sorted(held) for held in bins or []]


def _whole(costs: Costs) -> Integers:
    """Round costs to integers ≥ 1, whose sums are exact in any order."""
    good = np.isfinite(costs) & (costs > 0)
    if not good.all():
        bad = int(np.flatnonzero(~good)[0])
        raise UsageError("a cost is not a positive number", have=f"{costs[bad]} for sequence {bad}")
    scale = _COST_SUM / (float(costs.max(initial=1.0)) * max(len(costs), 1))
    return np.maximum(np.rint(costs * scale), 1).astype(np.int64)


def _summed(values: Integers, group: Integers) -> Integers:
    """Sum over each group; exact, because totals are below 2^53."""
    return np.bincount(group, weights=values).astype(np.int64)


def _check_limit(sizes: Integers, limit: int, group: Integers) -> None:
    longest = int(np.argmax(sizes))
    if sizes[longest] > limit:
        raise UsageError(
            "sequences that stay together do not fit into a micro-batch",
            have=f"{sizes[longest]} tokens from sequence {int(np.argmax(group == longest))} on",
            want=f"at most {limit}",
            do=f"set batch.tokens_per_device={sizes[longest]} or more",
        )


def _packed(items: Items) -> Bins:
    """Put each item into the fullest bin with room (best fit decreasing).

    Uses at most 11/9 of the fewest possible bins, plus one (Johnson 1974).
    """
    bins: Bins = []
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    sizes = items.sizes
    for item in sorted(range(len(items.costs)), key=lambda item: -sizes[item]):
        place = bisect_left(rooms, (sizes[item], -1))
        if place < len(rooms):
            room, index = rooms.pop(place)
        else:
            room, index = items.limit, len(bins)
            bins.append([])
        bins[index].append(item)
        insort(rooms, (room - sizes[item], index))
    return bins


def _spread(bins: Bins, items: Items, count: int) -> Bins:
    """Add bins up to `count`, each with an item of the costliest bin of two or more."""
    heap = [(-items.cost(held), index) for index, held in enumerate(bins) if len(held) > 1]
    heapq.heapify(heap)
    for _ in range(count - len(bins)):
        moved: list[int] = []
        if heap:
            load, index = heapq.heappop(heap)
            moved = [bins[index].pop()]
            if len(bins[index]) > 1:
                heapq.heappush(heap, (load + items.costs[moved[0]], index))
        bins.append(moved)
    return bins


def _dealt(bins: Bins, items: Items, group: Integers, ranks: int) -> Shares:
    """Group bins of similar cost into rounds; the rank with least so far gets the costliest."""
    loads = np.array([items.cost(held) for held in bins], dtype=np.int64)
    rounds = np.argsort(-loads, kind="stable").reshape(-1, ranks)
    totals = np.zeros(ranks, dtype=np.int64)
    for each in rounds:
        idlest = np.argsort(totals, kind="stable")
        each[idlest] = each.copy()
        totals += loads[each]
    ordered = np.concatenate([rounds[::2][::-1], rounds[1::2]])
    home = np.empty(int(group.max()) + 1, dtype=np.int64)
    home[np.fromiter(chain.from_iterable(bins), np.int64)] = np.repeat(
        np.arange(len(bins)), [*map(len, bins)]
    )
    bin_of = home[group]
    ends = np.bincount(bin_of, minlength=len(bins)).cumsum()
    contents = np.split(np.argsort(bin_of, kind="stable"), ends[:-1])
    shares = [[contents[index] for index in each] for each in ordered.T.tolist()]
    rank_of = np.empty(len(bins), dtype=np.int64)
    rank_of[ordered] = np.arange(ranks)
    imbalance = ranks * float(loads[rounds].max(axis=1).sum() / loads.sum())
    return Shares(shares, rank_of[bin_of], imbalance)


class Items:
    """Hold things to divide in lists, which Python reads quickly. Index -1 stands for no item."""

    def __init__(self, costs: Integers, sizes: Integers, limit: int) -> None:
        """Even out `costs` [N], each at least 1. A bin's `sizes` [N] add up to at most `limit`."""
        self.costs: list[int] = costs.tolist()
        self.sizes: list[int] = [*sizes.tolist(), 0]
        self.limit = limit
        self.falling: list[int] = np.argsort(-costs, kind="stable").tolist()

    def cost(self, held: list[int]) -> int:
        """Return the cost of some items together."""
        return sum(map(self.costs.__getitem__, held))


def divide(items: Items, count: int) -> Bins | None:
    """Divide items into `count` bins of about equal cost within the limit, or return None."""
    bins = _by_falling_cost(items, count)
    if bins is not None:
        _Division(bins, items).level()
    return bins


def _by_falling_cost(items: Items, count: int) -> Bins | None:
    """Give the costliest item to the idlest bin with room (longest processing time; Graham 1969).

    Returns None if an item finds no room, or if full bins make the search long.
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


_Entry = tuple[int, int]
"""Cost and index of an item."""
_NOTHING: _Entry = (0, -1)
"""What a bin offers in return for an item, among others."""


class _Division:
    def __init__(self, bins: Bins, items: Items) -> None:
        self._bins, self._items = bins, items
        self._fills = [sum(map(items.sizes.__getitem__, held)) for held in bins]
        self._ranking = sorted([(items.cost(held), index) for index, held in enumerate(bins)])
        self._mean = -(-sum(cost for cost, _ in self._ranking) // len(bins))
        self._enough = self._mean + self._mean // _CLOSE_ENOUGH

    def level(self) -> None:
        """Improve the costliest bin a bounded number of times; skip one that cannot be improved."""
        if self._ranking[-1][0] <= self._enough:
            return
        costs = self._items.costs
        self._held = [
            [_NOTHING, *sorted([(costs[item], item) for item in held])] for held in self._bins
        ]
        for _ in range(_EXCHANGES_PER_BIN * len(self._bins)):
            if not self._ranking or self._ranking[-1][0] <= self._enough:
                break
            load, high = self._ranking.pop()
            found = self._best(load, high)
            if found is not None:
                self._exchange(load, high, *found)
        for held, (_, *entries) in zip(self._bins, self._held, strict=True):
            held[:] = [item for _, item in entries]

    def _best(self, load: int, high: int) -> tuple[int, _Entry, _Entry] | None:
        """Find the best exchange for bin `high`: the other rank, the item to give, the item taken.

        It leaves the costlier of the two bins cheapest, but no cheaper than the mean.
        """
        best, found, seen = load, None, 0
        sizes, held = self._items.sizes, self._held[high]
        gives = held[:: -1 - (len(held) - 1) // _GIVEN]
        least = self._fills[high] - self._items.limit
        for place, (other, low) in enumerate(self._ranking):
            offers, most = self._held[low], self._items.limit - self._fills[low]
            wanted = min((load - other) // 2, load - self._mean)
            if load - wanted >= best:
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
