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
"""What all costs are scaled to add up to, at most, as integers. Times the number of bins it fits into 63 bits."""
_CLOSE_ENOUGH = 1_000
"""A bin that costs more than the mean by less than one part in this is left as it is."""
_AT_ONCE = 8
"""One bin in this many gives an item in one turn."""
_LOOKED_AT = (16, 256)
"""Items of other bins among which each looks for the best exchange, and again if there is none."""
_TURNS, _PATIENCE = 200, 1_000
"""Turns of exchanges, and of dealing that end because bins are full, at most."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Which sequences each rank runs."""

    ranks: Integers
    """[N] the rank of each sequence."""
    places: Integers
    """[N] the micro-batch of each sequence, among its rank's in the order they are run."""
    rounds: int
    """Micro-batches of each rank."""
    imbalance: float
    """The sum over rounds of the costliest micro-batch, over the mean of the ranks' costs: how much longer a step
    takes than if nobody waited. 1 is perfect; with one round it is max / mean over ranks."""

    def microbatches(self, rank: int) -> list[Integers]:
        """Return the indices of the sequences, ascending, of each of a rank's micro-batches."""
        mine = np.flatnonzero(self.ranks == rank)
        return [mine[self.places[mine] == number] for number in range(self.rounds)]


def share_out(
    lengths: Integers,
    costs: Costs,
    ranks: int,
    budget: int,
    *,
    groups: Integers | None = None,
) -> Shares:
    """Assign every sequence to a rank and a micro-batch.

    No micro-batch exceeds `budget` tokens. Sequences with the same number in `groups` [N] stay in
    one. Cheap rounds come first and last, so a pipeline fills and empties quickly.

    Raises `UsageError` for a cost that is not positive, or a sequence or group over the budget.
    """
    group = np.arange(len(lengths))
    if groups is not None:
        group = (np.bincount(groups) > 0).cumsum()[groups] - 1
    sizes = _summed(lengths, group)
    _check_limit(sizes, budget, group)
    whole = _summed(_whole(costs), group)
    count = max(1, -(-int(lengths.sum()) // (budget * ranks))) * ranks
    bins = divide(whole, sizes, budget, count)
    if bins is None:
        tight = _packed(sizes, budget)
        fewest, count = count, -(-(int(tight.max()) + 1) // ranks) * ranks
        bins = divide(whole, sizes, budget, count) if count > fewest else None
        if bins is None:
            bins = _spread(tight, whole, count)
            _Division(bins, whole, sizes, budget, count).level()
    return _dealt(bins, whole, group, count, ranks)


def share_evenly(costs: Costs, ranks: int) -> Integers:
    """Return the rank of each thing, for equal total costs."""
    return share_out(np.ones_like(costs, np.int64), costs, ranks, max(len(costs), 1)).ranks


def _whole(costs: Costs) -> Integers:
    """Round costs to integers ≥ 1, whose sums are exact in any order."""
    good = np.isfinite(costs) & (costs > 0)
    if not good.all():
        bad = int(np.flatnonzero(~good)[0])
        raise UsageError("a cost is not a positive number", have=f"{costs[bad]} for sequence {bad}")
    shares = costs / (costs.max(initial=0.0) or 1.0)  # 1: there are none
    return np.maximum(np.rint(shares * (_COST_SUM / max(len(costs), 1))), 1).astype(np.int64)


def _summed(values: Integers, group: Integers, count: int = 0) -> Integers:
    """Sum over each group; exact, because totals are below 2^53."""
    return np.bincount(group, weights=values, minlength=count).astype(np.int64)


def _order(values: Integers) -> Integers:
    """Order numbers ≥ 0 stably."""
    if len(values) < 10_000:
        return np.argsort(values, kind="stable")
    order = np.arange(len(values))
    for shift in range(0, int(values.max()).bit_length(), 16):  # 16 bits are sorted by radix
        digits = (values[order] >> shift).astype(np.uint16)
        order = order[np.argsort(digits, kind="stable")]
    return order


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
    bins, count = np.zeros_like(sizes), 0
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    falling = np.argsort(-sizes, kind="stable")
    for item, size in zip(falling.tolist(), sizes[falling].tolist(), strict=True):
        place = bisect_left(rooms, (size, -1))
        if place < len(rooms):
            room, index = rooms.pop(place)
        else:
            room, index = limit, count
            count += 1
        bins[item] = index
        insort(rooms, (room - size, index))
    return bins


def _spread(bins: Integers, costs: Integers, count: int) -> Integers:
    """Give each empty bin a costly item of another."""
    _, first = np.unique(bins, return_index=True)
    others = np.setdiff1d(np.arange(len(bins)), first)
    moved = others[np.argsort(-costs[others], kind="stable")][: count - len(first)]
    bins[moved] = len(first) + np.arange(len(moved))
    return bins


def _dealt(bins: Integers, costs: Integers, group: Integers, count: int, ranks: int) -> Shares:
    """Group bins of similar cost into rounds; the rank with least so far gets the costliest."""
    loads = _summed(costs, bins, count)
    rounds = np.argsort(-loads, kind="stable").reshape(-1, ranks)
    totals = np.zeros(ranks, dtype=np.int64)
    for each in rounds:
        idlest = np.argsort(totals, kind="stable")
        each[idlest] = each.copy()
        totals += loads[each]
    ordered = np.concatenate([rounds[::2][::-1], rounds[1::2]])
    places = np.empty(count, dtype=np.int64)
    places[ordered.ravel()] = np.arange(count)
    round_of, rank_of = np.divmod(places[bins[group]], ranks)
    imbalance = ranks * float(loads[rounds].max(axis=1).sum() / max(loads.sum(), 1))
    return Shares(rank_of, round_of, len(ordered), imbalance)


def divide(costs: Integers, sizes: Integers, limit: int, count: int) -> Integers | None:
    """Return the bins of N items, of about equal cost within the limit, or None."""
    bins = _by_falling_cost(costs, sizes, limit, count)
    if bins is not None:
        _Division(bins, costs, sizes, limit, count).level()
    return bins


def _by_falling_cost(costs: Integers, sizes: Integers, limit: int, count: int) -> Integers | None:
    """Give the costliest item to the idlest bin with room (longest processing time; Graham 1969).

    A turn gives many bins an item each, until one of these, or a full one, is next. Returns None if
    an item finds no room, or not soon.
    """
    bins, falling = np.zeros_like(costs), _order(costs.max(initial=0) - costs)
    loads, rooms = np.zeros(count, dtype=np.int64), np.full(count, limit)
    start, patience = 0, _PATIENCE
    while start < len(falling):
        item = falling[start]
        has_room = rooms >= sizes[item]
        if not has_room.any() or not patience:
            return None
        near = loads <= loads[has_room].min() + costs[item]
        full = rooms[near & ~has_room].max(initial=0)
        idlest = np.flatnonzero(near & has_room)
        idlest = idlest[_order(loads[idlest])][: len(falling) - start]
        items, before = falling[start : start + len(idlest)], loads[idlest]
        idler = np.minimum.accumulate(before + costs[items])[:-1] < before[1:]
        other = (sizes[items] > rooms[idlest]) | (sizes[items] <= full)
        stops = np.flatnonzero(idler | other[1:])
        end = int(stops[0]) + 1 if len(stops) else len(items)
        items, idlest = items[:end], idlest[:end]
        bins[items] = idlest
        loads[idlest] += costs[items]
        rooms[idlest] -= sizes[items]
        start += end
        patience -= bool(other[end : end + 1].any())
    return bins


class _Division:
    def __init__(
        self, bins: Integers, costs: Integers, sizes: Integers, limit: int, count: int
    ) -> None:
        self._bins, self._limit, self._count = bins, limit, count
        self._costs, self._sizes = np.append(costs, 0), np.append(sizes, 0)  # the last: no item
        self._loads, self._fills = _summed(costs, bins, count), _summed(sizes, bins, count)
        mean = -(-int(costs.sum()) // count)
        self._mean, self._enough = mean, mean + mean // _CLOSE_ENOUGH
        self._rising, self._step = _order(costs), int(costs.max(initial=0)) + 1

    def level(self) -> None:
        """Improve costly bins until exchanges do not help them."""
        loads = self._loads
        for _ in range(2):
            hopeless = np.zeros(self._count, dtype=np.bool_)
            for _ in range(_TURNS):
                high = np.flatnonzero((loads > self._enough) & ~hopeless)
                if not len(high):
                    break
                high = high[np.argsort(-loads[high], kind="stable")]
                high = high[: -(-self._count // _AT_ONCE)]
                for looked_at in _LOOKED_AT:
                    high = high[~self._exchange(high, looked_at)] if len(high) else high
                hopeless[high] = True

    def _exchange(self, high: Integers, looked_at: int) -> npt.NDArray[np.bool_]:
        """Exchange items of bins [H] with others, idle to costly ones. Return [H] whether one is found."""
        low = np.delete(np.arange(self._count), high)
        if not len(high) or not len(low):
            return np.zeros(len(high), dtype=np.bool_)
        low = low[_order(self._loads[low])]
        partners = min(len(low), -(-looked_at * self._count // len(self._bins)))
        places = np.arange(len(high))[:, None] + np.arange(partners) * (len(low) // partners)
        load, given, taken, other = self._best(high, low[places % len(low)])
        improved = load < self._loads[high]
        some = np.flatnonzero(improved)
        some = some[np.unique(other[some], return_index=True)[1]]
        self._move(given[some], high[some], other[some])
        some = some[taken[some] >= 0]
        self._move(taken[some], other[some], high[some])
        return improved

    def _best(self, high: Integers, low: Integers) -> tuple[Integers, Integers, Integers, Integers]:
        """Find the exchange of each bin [H] with one of `low` [H, P] that leaves the costlier cheapest.

        Returns [H] its cost, the item to give, the one to take (-1: none), and the other bin.
        """
        loads, fills, active = self._loads, self._fills, np.zeros(self._count, dtype=np.bool_)
        active[high] = active[low] = True
        held = self._rising[active[self._bins[self._rising]]]
        held = held[_order(self._bins[held])]
        sizes = np.bincount(self._bins[held], minlength=self._count)
        ends = sizes.cumsum()
        starts, keys = ends - sizes, self._bins[held] * self._step + self._costs[held]
        row = np.repeat(np.arange(len(high)), sizes[high])
        begins = sizes[high].cumsum() - sizes[high]
        given = held[np.arange(len(row)) + (starts[high] - begins)[row]]
        load, other = loads[high][:, None], loads[low]
        wanted = np.minimum((load - other) // 2, load - self._mean)[row]
        price = np.clip(self._costs[given][:, None] - wanted, 0, self._step - 1)
        low = low[row]
        dearer = np.searchsorted(keys, low * self._step + price)
        low, load = low[..., None], load[row][..., None]
        taken = np.stack([dearer - 1, dearer], axis=-1)
        taken = np.where((starts[low] <= taken) & (taken < ends[low]), taken, -1)
        taken = np.append(held, -1)[taken]
        change = self._costs[given][:, None, None] - self._costs[taken]
        growth = self._sizes[given][:, None, None] - self._sizes[taken]
        after = np.maximum(np.maximum(load - change, loads[low] + change), self._enough)
        fits = (fills[low] + growth <= self._limit) & (
            fills[high][row][:, None, None] - growth <= self._limit
        )
        after = np.where(fits, after, load).reshape(len(row), -1)
        least = after.min(axis=1)
        best = np.minimum.reduceat(least, begins)
        hits = np.flatnonzero(least == best[row])
        hits = hits[np.unique(row[hits], return_index=True)[1]]
        option = after[hits].argmin(axis=1)
        return (
            best,
            given[hits],
            taken.reshape(after.shape)[hits, option],
            low[hits, option // 2, 0],
        )

    def _move(self, items: Integers, source: Integers, target: Integers) -> None:
        self._bins[items] = target
        for sums, values in ((self._loads, self._costs), (self._fills, self._sizes)):
            sums[source] -= values[items]
            sums[target] += values[items]
