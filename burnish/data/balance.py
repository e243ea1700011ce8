"""Sharing out sequences: who runs which, in as few micro-batches as the token budget allows.

Every rank runs the same number of micro-batches, and the ranks go through them together, because
each is a round of collectives; a round takes as long as its costliest micro-batch. So the fewest
rounds come first, then equal costs. All is integer arithmetic on the host: every rank computes the
same answer from the same lengths. Left out: tensors (`burnish.data.batching`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from burnish.errors import UsageError

Integers = npt.NDArray[np.int64]
"""Whole numbers, shape [N]."""

Costs = npt.NDArray[np.float64]
"""The time that each of N things takes, in any unit, shape [N]."""

_COST_SUM = 2.0**52
"""What all costs are scaled to add up to, at most, as integers."""
_EXCHANGES = 400
_EXCHANGES_PER_BIN = 4
_PARTNERS = 3
_CANDIDATES = 128
_CLOSE_ENOUGH = 1000  # a difference of one part in this is not worth an exchange


def transformer_cost(length: int) -> float:
    """Work of a causal transformer on one sequence, in the work of its linear layers on one token.

    A layer of hidden size h does 24h² operations a token in its matrices and 2hs² a sequence in
    attention (causal, so half of 4hs²), together s + s²/(12h); h is taken as 2048.
    """
    return length + length * length / (12 * 2048)


def share_out(lengths: Integers, costs: Costs, ranks: int, budget: int) -> list[list[Integers]]:
    """Assign every sequence to a rank and a micro-batch.

    `lengths` [N] are in tokens, each at most `budget`, which no micro-batch exceeds; `costs` [N] are
    what is evened out. Returns, for
    each rank, equally many micro-batches in the order they are run, costliest first, each the
    indices of its sequences, ascending. A micro-batch is empty only where there are fewer sequences
    than micro-batches.
    """
    works = _whole(costs)
    fewest = max(1, -(-int(lengths.sum()) // (budget * ranks)))
    bins = _even(lengths, works, fewest * ranks, budget)
    if bins is None:
        tight = _tight(lengths, budget)
        count = -(-len(tight) // ranks) * ranks
        again = _even(lengths, works, count, budget) if count > fewest * ranks else None
        bins = again or _spread(tight, works, count)
    _Leveller(bins, lengths, works, budget).run()
    return _deal(bins, works, ranks)


def _whole(costs: Costs) -> Integers:
    """Costs as integers, at least 1, so that sums are exact in any order."""
    good = np.isfinite(costs) & (costs > 0)
    if not good.all():
        bad = int(np.flatnonzero(~good)[0])
        raise UsageError("a cost is not a positive number", have=f"{costs[bad]} for sequence {bad}")
    scale = _COST_SUM / (float(costs.max(initial=1.0)) * max(len(costs), 1))
    return np.maximum(np.rint(costs * scale), 1).astype(np.int64)


def _even(lengths: Integers, costs: Integers, count: int, budget: int) -> list[list[int]] | None:
    """Longest processing time first (Graham 1969): the costliest sequence to the idlest bin with room.

    None when a sequence finds no room, or when finding it takes long because all bins are full.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    heap = [(0, index) for index in range(count)]
    patience = len(lengths) + count
    tokens, works = lengths.tolist(), costs.tolist()
    for item in np.argsort(-costs, kind="stable").tolist():
        full: list[tuple[int, int]] = []
        while heap and room[heap[0][1]] < tokens[item]:
            full.append(heapq.heappop(heap))
        patience -= len(full)
        if not heap or patience < 0:
            return None
        load, index = heap[0]
        bins[index].append(item)
        room[index] -= tokens[item]
        heapq.heapreplace(heap, (load + works[item], index))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _tight(lengths: Integers, budget: int) -> list[list[int]]:
    """Best fit decreasing: each sequence to the fullest bin that has room, or to a further bin.

    Uses at most 11/9 of the fewest possible bins, and one (Johnson 1974).
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    tokens = lengths.tolist()
    for item in np.argsort(-lengths, kind="stable").tolist():
        place = bisect_left(rooms, (tokens[item], -1))
        if place < len(rooms):
            room, index = rooms.pop(place)
        else:
            room, index = budget, len(bins)
            bins.append([])
        bins[index].append(item)
        insort(rooms, (room - tokens[item], index))
    return bins


def _spread(bins: list[list[int]], costs: Integers, count: int) -> list[list[int]]:
    """Add bins up to `count`, and give each one sequence of the costliest bin that has two."""
    loads = [int(costs[items].sum()) for items in bins]
    heap = [(-load, index) for index, load in enumerate(loads) if len(bins[index]) > 1]
    heapq.heapify(heap)
    for _ in range(count - len(bins)):
        moved: list[int] = []
        if heap:
            load, index = heapq.heappop(heap)
            moved = [bins[index].pop()]
            if len(bins[index]) > 1:
                heapq.heappush(heap, (load + int(costs[moved[0]]), index))
        bins.append(moved)
    return bins


class _Leveller:
    """Evens out costs by moving one sequence, or exchanging two, between a costly bin and a cheap one."""

    def __init__(
        self, bins: list[list[int]], lengths: Integers, costs: Integers, budget: int
    ) -> None:
        self._bins, self._lengths, self._costs, self._budget = bins, lengths, costs, budget
        self._loads = np.array([costs[items].sum() for items in bins], dtype=np.int64)
        self._fills = np.array([lengths[items].sum() for items in bins], dtype=np.int64)

    def run(self) -> None:
        """Improve the costliest bin that can be improved, a bounded number of times."""
        settled = np.zeros(len(self._bins), dtype=np.bool_)
        for _ in range(min(_EXCHANGES, _EXCHANGES_PER_BIN * len(self._bins))):
            if settled.all():
                return
            high = int(np.argmax(np.where(settled, -1, self._loads)))
            partners = np.argsort(self._loads, kind="stable")[:_PARTNERS].tolist()
            if not any(self._exchange(high, low) for low in partners if low != high):
                settled[high] = True

    def _exchange(self, high: int, low: int) -> bool:
        """Make the best move or exchange from `high` to `low`; False if none brings them closer."""
        gap = int(self._loads[high] - self._loads[low])
        if gap * _CLOSE_ENOUGH <= self._loads[high]:
            return False
        mine, theirs = self._candidates(high), self._candidates(low)
        # A last column of zeros stands for receiving nothing in return.
        work = self._costs[mine][:, None] - np.append(self._costs[theirs], 0)
        size = self._lengths[mine][:, None] - np.append(self._lengths[theirs], 0)
        fits = (self._fills[low] + size <= self._budget) & (
            self._fills[high] - size <= self._budget
        )
        useful = fits & (work > 0) & (work < gap)
        if not useful.any():
            return False
        distance = np.where(useful, np.abs(2 * work - gap), np.iinfo(np.int64).max)
        given, taken = np.unravel_index(int(np.argmin(distance)), distance.shape)
        self._apply(high, low, mine[given], theirs[taken] if taken < len(theirs) else None)
        return True

    def _candidates(self, index: int) -> list[int]:
        items = self._bins[index]
        step = -(-len(items) // _CANDIDATES)
        return items[:: max(step, 1)]

    def _apply(self, high: int, low: int, given: int, taken: int | None) -> None:
        for source, target, item in ((high, low, given), (low, high, taken)):
            if item is None:
                continue
            self._bins[source].remove(item)
            self._bins[target].append(item)
            for totals, values in ((self._loads, self._costs), (self._fills, self._lengths)):
                totals[source] -= values[item]
                totals[target] += values[item]


def _deal(bins: list[list[int]], costs: Integers, ranks: int) -> list[list[Integers]]:
    """Bins of like cost into one round; in it the costliest to the rank with least so far."""
    contents = [np.sort(np.array(items, dtype=np.int64)) for items in bins]
    loads = [int(costs[items].sum()) for items in contents]
    ranking = sorted(range(len(bins)), key=lambda index: -loads[index])
    dealt: list[list[Integers]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(bins), ranks):
        idlest = sorted(range(ranks), key=totals.__getitem__)
        for rank, index in zip(idlest, ranking[start : start + ranks], strict=True):
            dealt[rank].append(contents[index])
            totals[rank] += loads[index]
    return dealt
