"""Dividing sequences among ranks, beside verl's algorithm: balance and time.

    python -m bench.balance [--json] [--rounds N] [--cases NAME ...]

The peer is verl 0.9.1's `get_seqlen_balanced_partitions`, the largest differencing method (Karmarkar & Karp 1982), in its
own process. Costs are verl's, 24,576 s + s² for a sequence of s tokens. Both sides divide the same costs, in turns,
and on the same core, because two cores of a shared machine differ more than the algorithms do.

Balance is max / mean of the ranks' costs, averaged over several draws. Its ratio is the peer's over ours; the goal
is 0.999, because ours stops at one part in 1,000. Time has no goal for 20 sequences: ours takes about a
millisecond for any small number. In the largest case the peer would make items × ranks objects, 51 million, so there it
divides into equal counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter

import numpy as np

from bench.machine import Result, command_line, ratio, report
from bench.peers import Peer
from burnish.data.balance import Integers, share_evenly

LENGTHS: dict[str, Callable[[np.random.Generator, int], Integers]] = {
    "uniform": lambda rng, count: rng.integers(64, 2048, count),
    "tail": lambda rng, count: np.clip(rng.lognormal(6.0, 1.0, count), 8, 32768).astype(np.int64),
    "short": lambda rng, count: rng.integers(50, 91, count),
}
"""Lengths in tokens: from 64 to 2,048; lognormal around 400, up to 32,768; those of verl's own test."""


@dataclass(frozen=True)
class Case:
    """Sequences to divide."""

    sequences: int
    """Number of sequences."""
    ranks: int
    """Number of ranks."""
    lengths: str
    """A key of `LENGTHS`."""
    draws: int
    """Number of times that lengths are drawn."""

    def costs(self, seed: int) -> Integers:
        """Return the cost of each sequence."""
        rng = np.random.default_rng(seed)
        lengths = LENGTHS[self.lengths](rng, self.sequences)
        return 24576 * lengths + lengths * lengths


CASES = {
    f"{sequences}-over-{ranks}{'' if lengths == 'uniform' else f'-{lengths}'}": Case(
        sequences, ranks, lengths, draws
    )
    for sequences, ranks, draws, kinds in (
        (20, 4, 200, ("uniform", "tail")),
        (20, 5, 200, ("short",)),
        (128, 8, 100, ("uniform", "tail")),
        (256, 64, 20, ("uniform", "tail")),
        (512, 16, 20, ("uniform", "tail")),
        (512, 64, 10, ("uniform", "tail")),
        (1024, 32, 8, ("uniform", "tail")),
        (100_352, 512, 1, ("uniform", "tail")),
    )
    for lengths in kinds
}


def ours(costs: Integers, case: Case) -> list[list[int]]:
    bins = share_evenly(costs.astype(np.float64), case.ranks)
    ends = np.bincount(bins, minlength=case.ranks).cumsum()
    return [held.tolist() for held in np.split(np.argsort(bins, kind="stable"), ends[:-1])]


def evenness(costs: Integers, bins: list[list[int]]) -> float:
    """Return max / mean over ranks."""
    loads = [int(costs[held].sum()) for held in bins]
    assert sorted(item for held in bins for item in held) == list(range(len(costs)))
    return max(loads) / mean(loads)


def compare(name: str, case: Case, rounds: int, peer: Peer) -> list[Result]:
    draws = [case.costs(seed) for seed in range(case.draws)]
    question = {
        "costs": [costs.tolist() for costs in draws],
        "ranks": case.ranks,
        "equal_counts": case.sequences > 100_000,
    }
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range(rounds + 1):
        start = perf_counter()
        bins = [ours(costs, case) for costs in draws]
        spent = perf_counter() - start
        answer = peer.ask(question)
        if number:
            seconds["ours"].append(spent)
            seconds["peer"].append(answer["seconds"])
    divided = {"ours": bins, "peer": answer["parts"]}
    balance = {
        side: mean(evenness(costs, parts) for costs, parts in zip(draws, found, strict=True))
        for side, found in divided.items()
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
            0.999,
        ),
        Result(
            f"balance/{name}/time",
            each["ours"],
            each["peer"],
            None,
            "ms",
            ratio(seconds["peer"], seconds["ours"]),
            1.0 if case.sequences > 20 else 0,
        ),
    ]


def main() -> None:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with Peer("verl", "bench.balance_verl", {}, 1) as peer:
        results = [
            result
            for name in arguments.cases
            for result in compare(name, CASES[name], arguments.rounds, peer)
        ]
    report(results, arguments.json)


if __name__ == "__main__":
    main()
