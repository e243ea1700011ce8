"""Assign sequences to ranks and micro-batches: fewest rounds first, then equal cost.

Each micro-batch is a round of collectives, as slow as its costliest rank. Integer arithmetic makes
every rank compute the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from burnish.errors import UsageError

Integers = npt.NDArray[np.int64]
"""Whole numbers, shape [N]."""
Costs = npt.NDArray[np.float64]
"""The time that each of N things takes, in any unit, shape [N]."""

_COST_SUM = 2.0**44
"""Costs are scaled to integers that add up to at most this. Times the number of bins, it fits into 63 bits."""
_CLOSE_ENOUGH = 1_000
"""A bin is not improved if its cost exceeds the mean by less than one part in this many."""
_MANY = 10_000
"""From this many numbers on, they are ordered by radix."""
_EFFORTS = ((2, 1), (4, 4), (64, 16))
"""For each pass of exchanges: how far apart in order two items may be, and with how many idle bins a costly bin is compared."""
_COMPARED = 1 << 22
_MISSES = 8
"""Most pairs of items that a pass compares, and most turns of it without an exchange."""
_PATIENCE = 1_000
"""Most turns of `_by_falling_cost` that end early because bins are full."""
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Shares:
    """Which sequences each rank runs."""

    ranks: Integers
    """[N] the rank of each sequence."""
    places: Integers
    """[N] the number of each sequence's micro-batch, in the order in which its rank runs them."""
    rounds: int
    """Number of micro-batches of each rank."""
    imbalance: float
    """The sum over rounds of the costliest micro-batch, over the mean of the ranks' costs: how much longer a step
    takes than if nobody waited. 1 is perfect; with one round it is max / mean over ranks."""

    def microbatches(self, rank: int) -> list[Integers]:
        """Return the ascending sequence indices of each of a rank's micro-batches."""
        sequences = np.flatnonzero(self.ranks == rank)
        return [sequences[self.places[sequences] == number] for number in range(self.rounds)]


def share_out(
    lengths: Integers,
    costs: Costs,
    ranks: int,
    budget: int,
    *,
    groups: Integers | None = None,
) -> Shares:
    """Assign every sequence to a rank and a micro-batch.

    No micro-batch exceeds `budget` tokens. Sequences with the same number in `groups` [N], from 0 without
    gaps, stay in one micro-batch. Cheap rounds come first and last, so a pipeline fills quickly.

    Raises `UsageError` for a cost that is not positive, or a sequence or group over the budget.
    """
    group = np.arange(len(lengths)) if groups is None else groups
    sizes = _summed(lengths, group)
    _check_limit(sizes, budget, group)
    whole = _summed(_whole(costs), group)
    falling = _order(whole.max(initial=0) - whole)  # so that the order of sequences does not matter
    whole = whole[falling]
    sizes = sizes[falling]
    group = inverse(falling)[group]
    count = max(1, -(-int(lengths.sum()) // (budget * ranks))) * ranks
    division = divide(whole, sizes, budget, count)
    if division is None:
        tight = _packed(sizes, budget)
        fewest = count
        count = -(-(int(tight.max()) + 1) // ranks) * ranks
        division = divide(whole, sizes, budget, count) if count > fewest else None
        if division is None:
            division = _Division(_spread(tight, whole, count), whole, sizes, budget, count)
            division.level()
    return _group_into_rounds(division.bins[group], division.loads, ranks)


def share_evenly(costs: Costs, ranks: int) -> Integers:
    """Return the rank of each thing, for equal total costs."""
    return share_out(np.ones_like(costs, np.int64), costs, ranks, max(len(costs), 1)).ranks


def by_share(shares: Integers, count: int) -> Integers:
    """Order things stably by shares, all below `count`."""
    # numpy sorts 16 bits by radix.
    return np.argsort(shares.astype(np.uint16 if count < 1 << 16 else np.int64), kind="stable")


def inverse(order: Integers) -> Integers:
    """Return each thing's place in an order."""
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


def _whole(costs: Costs) -> Costs:
    """Round costs to integers ≥ 1, whose sums are exact."""
    if not (costs.min(initial=1.0) > 0 and costs.max(initial=1.0) < np.inf):  # also for NaN
        bad = int(np.flatnonzero(~(np.isfinite(costs) & (costs > 0)))[0])
        raise UsageError("a cost is not a positive number", have=f"{costs[bad]} for sequence {bad}")
    shares = costs / (costs.max(initial=0.0) or 1.0)  # 1 if there are no costs
    shares *= _COST_SUM / max(len(costs), 1)
    return np.maximum(np.rint(shares, out=shares), 1, out=shares)


def _summed(values: Integers | Costs, group: Integers, count: int = 0) -> Integers:
    """Sum over each group; exact, because totals are below 2^53."""
    return np.bincount(group, weights=values, minlength=count).astype(np.int64)


def _order(values: Integers) -> Integers:
    """Order numbers ≥ 0 stably; of many, only the highest 16 bits."""
    if len(values) >= _MANY:
        values = (values >> max(int(values.max()).bit_length() - 16, 0)).astype(np.uint16)
    return np.argsort(values, kind="stable")


def _check_limit(sizes: Integers, limit: int, group: Integers) -> None:
    if sizes.max(initial=0) > limit:
        longest = int(np.argmax(sizes))
        raise UsageError(
            "sequences that stay together do not fit into a micro-batch",
            have=f"{sizes[longest]} tokens from sequence {int(np.argmax(group == longest))} on",
            want=f"at most {limit}",
            do=f"set batch.tokens_per_device={sizes[longest]} or more",
        )


def _packed(sizes: Integers, limit: int) -> Integers:
    """Put each item into the fullest bin with room (best fit decreasing).

    Uses at most 11/9 of the fewest possible bins, plus one (Johnson 1974).
    """
    bins = np.zeros_like(sizes)
    count = 0
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    falling = np.argsort(-sizes, kind="stable")
    for item, size in zip(falling.tolist(), sizes[falling].tolist(), strict=True):
        place = bisect_left(rooms, (size, -1))
        if place < len(rooms):
            room, index = rooms.pop(place)
        else:
            room = limit
            index = count
            count += 1
        bins[item] = index
        insort(rooms, (room - size, index))
    return bins


def _spread(bins: Integers, costs: Integers, count: int) -> Integers:
    """Move a costly item into each empty bin."""
    _, first = np.unique(bins, return_index=True)
    others = np.setdiff1d(np.arange(len(bins)), first)
    moved = others[np.argsort(-costs[others], kind="stable")][: count - len(first)]
    bins[moved] = len(first) + np.arange(len(moved))
    return bins


def _group_into_rounds(bins: Integers, loads: Integers, ranks: int) -> Shares:
    """Group bins of similar cost into rounds; the cheapest rank so far gets the costliest bin."""
    rounds = _order(loads.max() - loads).reshape(-1, ranks)
    totals = np.zeros(ranks, dtype=np.int64)
    for members in rounds:
        idlest = np.argsort(totals, kind="stable")
        members[idlest] = members.copy()
        totals += loads[members]
    ordered = np.concatenate([rounds[::2][::-1], rounds[1::2]])
    round_of, rank_of = np.divmod(inverse(ordered.ravel()), ranks)
    imbalance = ranks * float(loads[rounds].max(axis=1).sum() / max(loads.sum(), 1))
    return Shares(rank_of[bins], round_of[bins], len(ordered), imbalance)


def divide(costs: Integers, sizes: Integers, limit: int, count: int) -> _Division | None:
    """Divide items of falling cost into bins of about equal cost, or return None."""
    bins = _by_falling_cost(costs, sizes, limit, count)
    if bins is None:  # if bins are nearly full, they may still fit by falling size
        longest = _order(sizes.max(initial=0) - sizes)
        by_size = _by_falling_cost(sizes[longest], sizes[longest], limit, count)
        if by_size is None:
            return None
        bins = by_size[inverse(longest)]
    division = _Division(bins, costs, sizes, limit, count)
    division.level()
    return division


def _by_falling_cost(costs: Integers, sizes: Integers, limit: int, count: int) -> Integers | None:
    """Give the costliest item to the idlest bin with room (longest processing time; Graham 1969).

    Each turn gives many bins one item each, until one of these, or a full bin, is next. Returns None if an item
    fits nowhere, or full bins end too many turns.
    """
    bins = np.zeros_like(costs)
    loads = np.zeros(count, np.int64)
    rooms = np.full(count, limit)
    start = 0
    patience = _PATIENCE
    while start < len(costs):
        has_room = rooms >= sizes[start]
        if not has_room.any() or not patience:
            return None
        near = loads <= loads[has_room].min() + costs[start]
        full = rooms[near & ~has_room].max(initial=0)
        idlest = np.flatnonzero(near & has_room)
        idlest = idlest[_order(loads[idlest])][: len(costs) - start]
        items = slice(start, start + len(idlest))
        before = loads[idlest]
        after = before + costs[items]
        room = rooms[idlest] - sizes[items]
        idler = np.minimum.accumulate(after)[:-1] < before[1:]
        other = (room < 0) | (sizes[items] <= full)
        stops = np.flatnonzero(idler | other[1:])
        end = int(stops[0]) + 1 if len(stops) else len(idlest)
        chosen = idlest[:end]
        start = start + end
        bins[start - end : start] = chosen
        loads[chosen] = after[:end]
        rooms[chosen] = room[:end]
        patience -= bool(other[end : end + 1].any())
    return bins


class _Division:
    def __init__(
        self, bins: Integers, costs: Integers, sizes: Integers, limit: int, count: int
    ) -> None:
        self._limit = limit
        self._count = count
        self._longest = int(sizes.max(initial=0))
        self.loads = _summed(costs, bins, count)
        self._fills = _summed(sizes, bins, count)
        # The last entry of each stands for no item.
        self.bins, self._costs, self._sizes = (np.append(each, 0) for each in (bins, costs, sizes))
        mean = -(-int(costs.sum()) // count)
        self._enough = max(mean + mean // _CLOSE_ENOUGH, int(costs.max(initial=0)))

    def level(self) -> None:
        """Exchange items until that helps no more, or limits are reached."""
        if (self.loads <= self._enough).all():
            return
        items = self._items_by_bin()
        for apart, partners in _EFFORTS:
            turn = 0
            missed = 0
            left = _COMPARED
            while missed < _MISSES and left > 0 and (self.loads > self._enough).any():
                pairs, exchanged = self._exchange(items, apart, partners, turn)
                missed = 0 if exchanged else missed + 1
                turn = turn + 1
                left -= max(pairs * len(items) * min(apart, len(items)) * 2, 1)

    def _items_by_bin(self) -> Integers:
        """Return the items of each bin [places, bins], not all of a very large bin."""
        bins = self.bins[:-1]
        ordered = by_share(bins, self._count)
        sizes = np.bincount(bins, minlength=self._count)
        # 2^17: a cost and a place fit into 63 bits.
        most = min(int(sizes.max()), 4 * len(ordered) // self._count + 8, 1 << 17)
        places = np.arange(most + 1)[:, None]
        spots = np.where(places < np.minimum(sizes, most), sizes.cumsum() - sizes + places, -1)
        return np.append(ordered, len(ordered))[spots]

    def _exchange(self, items: Integers, apart: int, partners: int, turn: int) -> tuple[int, bool]:
        """Exchange items of costly and idle bins. Return the number of pairs, and whether any exchanged."""
        loads = self.loads
        ranked = _order(self.loads)
        count = min(-(-self._count // (partners + 1)), self._count // 2)
        count = min(int(np.count_nonzero(loads > self._enough)), count)
        partners = min((self._count - count) // count, 4 * partners)
        first = turn * ((self._count - count) * 5 // 13)
        low = ranked[:-count].take(np.arange(first, first + count * partners), mode="wrap")
        high = np.tile(ranked[::-1][:count], partners)
        half = (loads[high] - loads[low]) // 2
        high_places, low_places, error = self._best(items, high, low, half, apart)
        after = np.maximum(loads[low] + half + error, self._enough)
        best = after.reshape(partners, count).argmin(axis=0) * count + np.arange(count)
        best = best[error[best] < half[best]]
        high = high[best]
        low = low[best]
        got = items[low_places[best], low]
        lost = items[high_places[best], high]
        items[high_places[best], high] = got
        items[low_places[best], low] = lost
        self.bins[got] = high
        self.bins[lost] = low
        for sums, values in ((loads, self._costs), (self._fills, self._sizes)):
            sums[high] += values[got] - values[lost]
            sums[low] += values[lost] - values[got]
        return len(half), len(best) > 0

    def _best(
        self, items: Integers, high: Integers, low: Integers, wanted: Integers, apart: int
    ) -> tuple[Integers, Integers, Integers]:
        """Return [P] the places of each pair's two items whose exchange moves nearest to `wanted`, and the error."""
        width = len(items)
        bits = len(items).bit_length()
        # One of `errors` has an error and, in its last bits, a place: one minimum finds both.
        # The longer axis must be contiguous, which is many times as fast.
        highs, lows = (items[:, b] if width > len(b) else items.take(b, 1) for b in (high, low))
        give = (self._costs[highs] - wanted) << bits
        take = self._costs[lows] << bits
        room = self._limit - self._fills[low]
        spare = self._limit - self._fills[high]
        is_tight = min(room.min(), spare.min()) < self._longest
        least = np.full(len(high), _NEVER)
        shifts = np.zeros_like(high)
        apart = min(apart, width)
        for shift in range(1 - apart, apart):
            start = max(shift, 0)
            other = max(-shift, 0)
            one = slice(start, width - other)
            two = slice(other, width - start)
            errors = np.abs(give[one] - take[two])
            errors |= np.arange(start, width - other)[:, None]
            if is_tight:
                growth = self._sizes[highs[one]] - self._sizes[lows[two]]
                errors[(growth > room) | (-growth > spare)] = _NEVER
            errors = errors.min(axis=0)
            better = errors < least
            least = np.where(better, errors, least)
            shifts = np.where(better, shift, shifts)
        high_places = least & ((1 << bits) - 1)
        return high_places, high_places - shifts, least >> bits
