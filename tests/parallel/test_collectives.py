from __future__ import annotations

import time

import pytest
from distributed import RankFailed, run_ranks

from burnish.parallel.collectives import any_rank, gather_objects


def _gather(layout, base):
    assert any_rank(layout.rank == 1, layout)
    return gather_objects(base + layout.rank, layout)


def test_gather():
    for _ in range(3):
        t = time.time()
        assert run_ranks(_gather, 3, 10) == [[10, 11, 12]] * 3
        print(time.time() - t)


def _boom(layout):
    if layout.rank == 1:
        raise ValueError("boom")


def test_fail():
    with pytest.raises(RankFailed, match="boom"):
        run_ranks(_boom, 2)
