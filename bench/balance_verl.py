"""The peer of `bench.balance`: verl 0.9.1's own division of sequences among ranks. Runs under verl's Python.

A question has `costs` (a list of lists, one per draw), `ranks` and `equal_counts`. An answer has `seconds` for all draws,
and `parts`: for each draw, the items of each rank.
"""

from __future__ import annotations

from bench.peers import Turns

TURNS = Turns()

from time import perf_counter  # noqa: E402 (stdout is moved first)

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions  # noqa: E402

if __name__ == "__main__":
    TURNS.next()
    TURNS.answer(ready=True)
    while True:
        question = TURNS.next()
        start = perf_counter()
        parts = [
            get_seqlen_balanced_partitions(costs, question["ranks"], question["equal_counts"])
            for costs in question["costs"]
        ]
        TURNS.answer(seconds=perf_counter() - start, parts=parts)
