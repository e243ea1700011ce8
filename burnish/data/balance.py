"""Assign sequences to ranks and micro-batches: fewest rounds first, then equal cost.

Each micro-batch is a round of collectives, which takes as long as its costliest rank. Every rank
computes the same answer.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from burnish.data.partition import Bins, Integers, Items, divide, level
from burnish.errors import UsageError

Costs = npt.NDArray[np.float64]
"""The time that each of N things takes, in any unit, shape [N]."""

_COST_SUM = 2.0**52
"""What all costs are scaled to add up to, at most, as integers."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Which sequences each rank runs."""

    microbatches: list[list[Integers]]
    """For each rank equally many micro-batches, in the order they are run, each the indices of its sequences, ascending."""
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

    `lengths` [N] are in tokens; no micro-batch exceeds `budget`. `costs` [N] are evened out. Sequences
    with the same number in `groups` [N] stay in one micro-batch. Cheap rounds come first and last, so the
    stages of a pipeline fill and empty quickly. A micro-batch is empty only if there are fewer groups
    than micro-batches.

    Raises `UsageError` for a cost that is not a positive number, and for a sequence or group longer than
    the budget.
    """
    group = np.arange(len(lengths))
    if groups is not None:
        _, group = np.unique(groups, return_inverse=True)
    items = Items(_summed(_whole(costs), group), _summed(lengths, group), budget)
    _check_limit(items, group)
    fewest = max(1, -(-int(lengths.sum()) // (budget * ranks)))
    bins = divide(items, fewest * ranks)
    if bins is None:
        tight = _packed(items)
        count = -(-len(tight) // ranks) * ranks
        bins = divide(items, count) if count > fewest * ranks else None
        if bins is None:
            bins = _spread(tight, items.costs, count)
            level(bins, items)
    return _dealt(bins, items, group, ranks)


def share_evenly(costs: Costs, ranks: int) -> list[list[int]]:
    """Give each rank equally many things (or one more) of about equal total cost; indices ascending."""
    whole = _whole(costs)
    bins = divide(Items(whole, whole, int(whole.sum())), ranks, equal_counts=True)
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
    """Sum over each group; exact, because the total is below 2^53."""
    return np.bincount(group, weights=values).astype(np.int64)


def _check_limit(items: Items, group: Integers) -> None:
    longest = int(np.argmax(items.sizes))
    if items.sizes[longest] > items.limit:
        raise UsageError(
            "sequences that stay together do not fit into a micro-batch",
            have=f"{items.sizes[longest]} tokens from sequence {int(np.argmax(group == longest))} on",
            want=f"at most {items.limit}",
            do=f"set batch.tokens_per_device={items.sizes[longest]} or more",
        )


def _packed(items: Items) -> Bins:
    """Put each item into the fullest bin that has room (best fit decreasing).

    Uses at most 11/9 of the fewest possible bins, plus one (Johnson 1974).
    """
    bins: Bins = []
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    sizes = items.sizes.tolist()
    for item in np.argsort(-items.sizes, kind="stable").tolist():
        place = bisect_left(rooms, (sizes[item], -1))
        if place < len(rooms):
            room, index = rooms.pop(place)
        else:
            room, index = items.limit, len(bins)
            bins.append([])
        bins[index].append(item)
        insort(rooms, (room - sizes[item], index))
    return bins


def _spread(bins: Bins, costs: Integers, count: int) -> Bins:
    """Add bins up to `count`; each takes one item of the costliest bin that has two."""
    loads = [int(costs[held].sum()) for held in bins]
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


def _dealt(bins: Bins, items: Items, group: Integers, ranks: int) -> Shares:
    """Group bins of similar cost into rounds; in each, the rank with least so far gets the costliest."""
    loads = np.array([items.costs[held].sum() for held in bins], dtype=np.int64)
    rounds = np.argsort(-loads, kind="stable").reshape(-1, ranks)
    totals = np.zeros(ranks, dtype=np.int64)
    for each in rounds:
        idlest = np.argsort(totals, kind="stable")
        each[idlest] = each.copy()
        totals += loads[each]
    ordered = np.concatenate([rounds[::2][::-1], rounds[1::2]])
    contents = _sequences(bins, group)
    shares = [[contents[index] for index in ordered[:, rank]] for rank in range(ranks)]
    return Shares(shares, ranks * float(loads[rounds].max(axis=1).sum() / loads.sum()))


def _sequences(bins: Bins, group: Integers) -> list[Integers]:
    """The sequences of the groups in each bin, ascending."""
    home = np.empty(int(group.max()) + 1, dtype=np.int64)
    for index, held in enumerate(bins):
        home[held] = index
    counts = np.bincount(home[group], minlength=len(bins))
    return np.split(np.argsort(home[group], kind="stable"), np.cumsum(counts)[:-1])
