from __future__ import annotations

import math
import os
import pickle
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks.processes import RankFailed, run_processes, run_ranks, torchrun_environ

from burnish.distributed.collectives import (
    agree,
    any_rank,
    from_main,
    gather_objects,
    reduce_stats,
    same_on_all_ranks,
)
from burnish.distributed.layout import Layout
from burnish.distributed.meeting import connect_lazily, in_groups
from burnish.distributed.processes import process_group
from burnish.errors import BurnishError, MissingError
from burnish.tracking.stats import Max, Mean, Stats, Sum

CPU = torch.device("cpu")
ALONE = Layout()


def test_one_process_needs_no_group():
    stats = Stats(loss=Mean(1.0, 2.0))
    assert gather_objects("x", ALONE) == ["x"]
    assert from_main("x", ALONE) == "x"
    assert any_rank(True, ALONE)
    assert not any_rank(False, ALONE)
    assert reduce_stats(stats, ALONE, CPU) is stats
    same_on_all_ranks("x", "x", ALONE)
    with agree(ALONE):
        pass


def test_one_process_raises_its_own_error():
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as raised, agree(ALONE):
        raise error
    assert raised.value is error


def _gather_and_flags(layout):
    flags = [any_rank(layout.rank == chosen, layout) for chosen in (0, 2, 7)]
    return gather_objects({"rank": layout.rank}, layout), from_main(layout.rank, layout), flags


def test_every_rank_gets_every_value_and_any_flag():
    values = [{"rank": rank} for rank in range(3)]
    assert run_ranks(_gather_and_flags, 3) == [(values, 0, [True, True, False])] * 3


def _fail_on(rank, layout):
    if layout.rank == rank:
        raise ValueError("mine")


def _in_a_grid():
    connect_lazily(Layout(world=16_000))
    patience = timedelta(seconds=60)
    with process_group(CPU, 60) as layout:
        before = len(os.listdir("/proc/self/fd"))
        any_rank(False, layout)
        connected = len(os.listdir("/proc/self/fd")) - before
        layout = in_groups(layout, patience, mesh=1, most=2)
        sizes = [dist.get_world_size(group) for group in layout.groups]
        sent = pickle.loads(pickle.dumps(layout))  # noqa: S301 - our own
        assert (sent, sent.groups) == (layout, ())
        flags = [any_rank(layout.rank == chosen, layout) for chosen in (0, 4, 7)]
        one = [[None, None], {"rank": layout.rank}, "x" * layout.rank]
        both = _reduce_different_names(layout), _reduce_different_names(replace(layout, groups=()))
        kind = ValueError if layout.rank == 5 else BurnishError
        with pytest.raises(kind), agree(layout):
            _fail_on(5, layout)
        joined = gather_objects(f"{layout.rank}", layout, lambda parts: f"({''.join(parts)})")
        return connected, sizes, (gather_objects(one, layout), joined), flags, both


def test_a_grid_of_groups_gathers_and_flags_as_one_group_does():
    store = dist.TCPStore("127.0.0.1", 0, 6, True, timedelta(seconds=60), wait_for_workers=False)
    environs = [torchrun_environ(rank, 6, store.port) for rank in range(6)]
    found = run_processes(_in_a_grid, environs)
    for _, sizes, (gathered, joined), flags, (one, other) in found:
        assert sizes == [2, 3]
        assert joined == ["((01)(23)(45))"]
        assert gathered == [[[None, None], {"rank": rank}, "x" * rank] for rank in range(6)]
        assert flags == [True, True, False]
        assert one == other
    # A quick rank may have connected itself to a slow one before that one counts.
    connected = [each[0] for each in found]
    assert any(connected), "all were connected to all before they had anything to say"


def _stats(rank):
    return Stats(
        {
            "tensors": Mean(torch.tensor(float(rank)), torch.tensor(2)),
            "floats": Mean(0.1 * (rank + 1), 1.0),
            "count": Sum(2**25 + rank),
            "largest": Max(torch.tensor(-1.0 - rank)),
            "empty": Mean(0.0, 0.0),
        }
    )


def _reduce(layout):
    reduced = reduce_stats(_stats(layout.rank), layout, CPU)
    assert all(
        isinstance(m.total, torch.Tensor) for m in reduced.values() if not isinstance(m, Max)
    )
    only_sums = reduce_stats(Stats(a=Sum(1.0)), layout, CPU)
    only_max = reduce_stats(Stats(a=Max(float(layout.rank))), layout, CPU)
    nothing = reduce_stats(Stats(), layout, CPU)
    return [s.values_by_name() for s in (reduced, only_sums, only_max, nothing)]


def test_statistics_are_merged_as_one_process_would():
    oracle = _stats(0).merge(_stats(1)).merge(_stats(2)).values_by_name()
    everyone = run_ranks(_reduce, 3)
    assert str(everyone[0]) == str(everyone[1]) == str(everyone[2])
    reduced, only_sums, only_max, nothing = everyone[0]
    assert list(reduced) == list(oracle)
    assert math.isnan(reduced.pop("empty"))
    assert math.isnan(oracle.pop("empty"))
    assert reduced == pytest.approx(oracle, rel=1e-15)
    assert (only_sums, only_max, nothing) == ({"a": 3.0}, {"a": 2.0}, {})


def _reduce_different_names(layout):
    everywhere = {"everywhere": Sum(1.0)}
    own = [{"first/mean": Mean(1.0, 2.0), "first/max": Max(-3.0)}, {"second": Mean(5.0, 1.0)}, {}]
    stats = Stats({**own[layout.rank % 3], **everywhere})
    return reduce_stats(stats, layout, CPU).values_by_name()


def test_a_name_that_some_ranks_lack_is_kept():
    expected = {"first/mean": 0.5, "first/max": -3.0, "everywhere": 3.0, "second": 5.0}
    everyone = run_ranks(_reduce_different_names, 3)
    assert everyone == [expected] * 3
    assert [list(values) for values in everyone] == [list(expected)] * 3


def _reduce_different_kinds(layout):
    metric = Sum(1.0) if layout.rank == 0 else Max(1.0)
    reduce_stats(Stats({"reward": metric}), layout, CPU)


def test_one_name_of_two_kinds_is_refused_by_all():
    with pytest.raises(RankFailed) as raised:
        run_ranks(_reduce_different_kinds, 2)
    for rank in range(2):
        assert "rank 1" in raised.value.failures[rank]


def _agree(layout, error, failing):
    try:
        with agree(layout):
            if layout.rank in failing:
                raise error
    except Exception as raised:
        elsewhere = getattr(raised, "printed_by_main", False)
        return type(raised), str(raised), getattr(raised, "exit_code", None), elsewhere
    finally:
        with agree(layout):  # the ranks are still in step
            pass
    return None


def test_no_error_is_agreed_on_silently():
    assert run_ranks(_agree, 2, ValueError("x"), ()) == [None, None]


def test_an_error_of_ours_is_the_same_on_every_rank_and_names_the_rank():
    error = MissingError("no column answer", have="question", do="rename it")
    mine, *others = reversed(run_ranks(_agree, 3, error, (2,)))
    assert mine == (MissingError, str(error), 5, False)
    assert others == [(MissingError, f"rank 2: {error}", 5, True)] * 2


def test_an_error_of_another_library_is_told_with_its_kind():
    first, second = run_ranks(_agree, 2, KeyError("x"), (0,))
    assert first == (KeyError, "'x'", None, False)
    assert second == (BurnishError, "rank 0: KeyError: 'x'", 1, True)


def test_the_lowest_failing_rank_is_told_to_the_others():
    answers = run_ranks(_agree, 3, ValueError("x"), (1, 2))
    assert [kind for kind, *_ in answers] == [BurnishError, ValueError, ValueError]
    assert answers[0][1] == "rank 1: ValueError: x"


def _same(layout, values):
    try:
        same_on_all_ranks(values[layout.rank], "the configuration", layout)
    except BurnishError as error:
        return str(error)
    return ""


def test_values_that_have_to_be_the_same():
    assert run_ranks(_same, 3, ["a", "a", "a"]) == ["", "", ""]
    told = run_ranks(_same, 3, ["a", b"a", "b"])
    assert told[0] == told[1] == told[2]
    assert "the configuration" in told[0]
    assert "have: rank 2 " in told[0]
    assert "have: ranks 1, 2 " in run_ranks(_same, 3, ["a", "b", "c"])[1]
