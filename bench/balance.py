"""Dividing sequences among ranks, beside verl's algorithm: how even, and how fast.

    python -m bench.balance [--json] [--rounds N] [--cases NAME ...]

The peer is the largest differencing method (Karmarkar & Karp 1982) in the form in which verl 0.9.1's
`get_seqlen_balanced_partitions` uses it, written anew here: a state is a tuple of sets, the two states with the
largest spread are merged, heavy sets with light ones, and with equal counts the states begin with k
neighbouring items each. Costs are verl's, 24,576 s + s². Both sides divide the same costs with equal counts and without.

Balance is max / mean of the ranks' costs, averaged over several draws; its ratio is the peer's over ours, and counts
as met from 0.9999 on, because ours stops at one part in 10,000. The peer without equal counts takes memory and time with items × ranks and is left out of the largest case.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from bench.machine import Result, command_line, interleaved, ratio, report
from burnish.data.partition import Bins, Integers, Items, divide


@dataclass(frozen=True)
class Case:
    """Lengths to divide."""

    sequences: int
    """How many."""
    ranks: int
    """Among how many."""
    long_tail: bool
    """Lognormal around 400 tokens, up to 32,768; else uniform from 64 to 2,048."""
    draws: int
    """How often lengths are drawn."""
    equal_counts: bool

    def costs(self, seed: int) -> Integers:
        """The cost of each sequence."""
        rng = np.random.default_rng(seed)
        if self.long_tail:
            lengths = np.clip(rng.lognormal(6.0, 1.0, self.sequences), 8, 32768).astype(np.int64)
        else:
            lengths = rng.integers(64, 2048, self.sequences)
        return 24576 * lengths + lengths * lengths


CASES = {
    f"{sequences}-over-{ranks}{'-tail' if tail else ''}{'-equal' if equal else ''}": Case(
        sequences, ranks, tail, draws, equal
    )
    for sequences, ranks, draws in (
        (20, 4, 20),
        (128, 8, 20),
        (512, 16, 5),
        (1024, 32, 3),
        (100_352, 512, 1),
    )
    for tail in (False, True)
    for equal in (False, True)
    if equal or sequences < 100_000
}


class _Set:
    """Items of one rank."""

    __slots__ = ("items", "total")

    def __init__(self) -> None:
        self.total, self.items = 0, list[int]()

    def __lt__(self, other: _Set) -> bool:
        return (self.total, len(self.items), self.items) < (
            other.total,
            len(other.items),
            other.items,
        )


class _State:
    """A division of some items, the heaviest set first."""

    __slots__ = ("sets",)

    def __init__(self, items: Sequence[tuple[int, int]], count: int) -> None:
        self.sets = [_Set() for _ in range(count)]
        for held, (cost, item) in zip(self.sets, items, strict=False):
            held.total, held.items = cost, [item]
        self.sets.sort(reverse=True)

    def merge(self, other: _State) -> None:
        for mine, theirs in zip(self.sets, reversed(other.sets), strict=True):
            mine.items.extend(theirs.items)
            mine.total += theirs.total
        self.sets.sort(reverse=True)

    @property
    def spread(self) -> int:
        return self.sets[0].total - self.sets[-1].total

    def __lt__(self, other: _State) -> bool:
        if self.spread != other.spread:
            return self.spread > other.spread
        return other.sets[0] < self.sets[0]


def largest_differencing(costs: Sequence[int], count: int, equal_counts: bool) -> Bins:
    """verl's method; with `equal_counts` the items have to divide by `count`."""
    rising = sorted((cost, item) for item, cost in enumerate(costs))
    size = count if equal_counts else 1
    heap = [_State(rising[start : start + size], count) for start in range(0, len(rising), size)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        first.merge(second)
        heapq.heappush(heap, first)
    return [held.items for held in heap[0].sets]


def ours(costs: Integers, case: Case) -> Bins:
    items = Items(costs, costs, int(costs.sum()))
    return divide(items, case.ranks, equal_counts=case.equal_counts) or []


def evenness(costs: Integers, bins: Bins) -> float:
    """max / mean over ranks."""
    loads = [int(costs[held].sum()) for held in bins]
    assert sorted(item for held in bins for item in held) == list(range(len(costs)))
    return max(loads) / mean(loads)


def compare(name: str, case: Case, rounds: int) -> list[Result]:
    draws = [case.costs(seed) for seed in range(case.draws)]
    plain = [costs.tolist() for costs in draws]
    sides: dict[str, Callable[[], list[Bins]]] = {
        "ours": lambda: [ours(costs, case) for costs in draws],
        "peer": lambda: [
            largest_differencing(costs, case.ranks, case.equal_counts) for costs in plain
        ],
    }
    seconds = interleaved(sides, rounds)
    balance = {
        side: mean(evenness(costs, bins) for costs, bins in zip(draws, run(), strict=True))
        for side, run in sides.items()
    }
    each = {side: median(times) / case.draws * 1e3 for side, times in seconds.items()}
    return [
        Result(
            f"balance/{name}/max-over-mean",
            balance["ours"],
            balance["peer"],
            1.0,
            "",
            balance["peer"] / balance["ours"],
            0.9999,
        ),
        Result(
            f"balance/{name}/time",
            each["ours"],
            each["peer"],
            None,
            "ms",
            ratio(seconds["peer"], seconds["ours"]),
            1.0,
        ),
    ]


def main() -> None:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    results = [
        result
        for name in arguments.cases
        for result in compare(name, CASES[name], arguments.rounds)
    ]
    report(results, arguments.json)


if __name__ == "__main__":
    main()
