"""Send rollouts to rank 0. Tokens and texts are on one rank each; all ranks know the numbers."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from burnish.distributed.collectives import deliver
from burnish.distributed.layout import Layout
from burnish.records import Floats, Rollout
from burnish.records.rollout_table import RolloutTable

# Tokens of the rollouts that rank 0 gets at a time.
_ROUND_TOKENS = 1 << 20


def on_main(table: RolloutTable, layout: Layout) -> RolloutTable:
    """Return a table that has all rollouts whole on rank 0. Collective."""
    everything = range(len(table.owners))
    with arriving(table, everything, everything, layout) as incoming:
        whole = [rollout for _, rollout in incoming]
    return replace(table, objects=whole, places=np.arange(len(whole))) if layout.is_main else table


@contextmanager
def arriving(
    table: RolloutTable, order: Sequence[int], whole: Collection[int], layout: Layout
) -> Iterator[Iterator[tuple[int, Rollout]]]:
    """Iterate over numbers and rollouts on rank 0, in `order`. Collective.

    Rank 0 gets texts of all, and tokens only of `whole`, in rounds of about a million tokens.
    """
    incoming = _arriving(table, order, whole, layout)
    try:
        yield incoming
    finally:
        for _ in incoming:  # every rank takes part in all rounds, even after an error
            pass


def _arriving(
    table: RolloutTable, order: Sequence[int], whole: Collection[int], layout: Layout
) -> Iterator[tuple[int, Rollout]]:
    if not (table.owners > 0).any():
        yield from ((number, table.rollout(number)) for number in order if layout.is_main)
        return
    numbers_of_all = np.asarray(order, np.int64)
    rounds = np.cumsum(table.sequence_lengths[numbers_of_all]) // _ROUND_TOKENS
    for numbers in np.split(numbers_of_all, np.flatnonzero(np.diff(rounds)) + 1):
        own_rollouts = {
            n: table.rollout(n) for n in numbers[table.owners[numbers] == layout.rank].tolist()
        }
        parts = {
            n: each
            if n in whole
            else (each.text, each.conversation, each.prompt.text, each.prompt.answer)
            for n, each in own_rollouts.items()
        }
        parcels = [] if layout.is_main or not own_rollouts else [([0], pickle.dumps(parts))]
        received: dict[int, Any] = {}
        for data in deliver(parcels, layout):
            received |= pickle.loads(data)  # noqa: S301 - from a rank of this run
        for number in numbers.tolist() if layout.is_main else ():
            known = table.rollout(number)
            got = received.get(number)
            if isinstance(got, tuple):
                text, conversation, asked, answer = got
                prompt = replace(known.prompt, text=asked, answer=answer)
                got = replace(known, text=text, conversation=conversation, prompt=prompt)
            yield number, got or known


def arrays_on_main(
    arrays: Mapping[str, Mapping[int, Floats]], numbers: Collection[int], layout: Layout
) -> Mapping[str, Mapping[int, Floats]]:
    """Return these rollouts' arrays; rank 0 gets those of all ranks. Collective."""
    wanted = {name: {n: each[n] for n in numbers if n in each} for name, each in arrays.items()}
    sends = layout.is_first_peer and not layout.is_main and any(wanted.values())
    for data in deliver([([0], pickle.dumps(wanted))] if sends else [], layout):
        for name, each in pickle.loads(data).items():  # noqa: S301 - from a rank of this run
            wanted[name] |= each
    return wanted
