"""Gathering against indexing the whole tensors."""

from __future__ import annotations

import os
import random
import socket
import struct
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints.random_layouts import BF16, F32, random_layout
from support.nightly import by_day, draws
from support.ranks.processes import run_ranks
from support.ranks.traffic import Traffic
from torch.utils._python_dispatch import TorchDispatchMode

from burnish.boxes.box import Box, whole
from burnish.boxes.gather import Gather, assembled
from burnish.boxes.pieces import alike_tensors
from burnish.boxes.shards import Shard, TensorSpec
from burnish.distributed.collectives import gather_objects
from burnish.distributed.layout import Layout
from burnish.distributed.meeting import by_machine
from burnish.errors import IncompatibleError, MissingError

MINUTE = timedelta(seconds=60)
SHAPES = {"a": (7, 5), "b": (), "d": (300,), "e": (3, 4, 5), "f": (8, 3)}
SHAPES |= {"g": (7, 5), "h": (300,), "i": (8, 3), "j": (7, 5)}  # as layers repeat


def tensors_of(salt=0):
    return {
        name: (torch.arange(whole(shape).elements, dtype=F32) + 1000 * salt + i).reshape(shape) / 7
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def shards_of(pieces, tensors):
    return [Shard(spec, box, tensors[spec.name][box.slices].clone()) for spec, box in pieces]


def rows_of(layout):
    """Pieces as FSDP cuts them: rows by rank, the last ranks with fewer or none."""
    found = []
    for name, shape in SHAPES.items():
        if not shape:
            found.append((TensorSpec(name, shape, F32), whole(shape)))
            continue
        size = -(-shape[0] // layout.world)
        start = min(layout.rank * size, shape[0])
        stop = min(start + size, shape[0])
        rest = shape[1:]
        box = Box((start, *[0] * len(rest)), (stop - start, *rest))
        found += [(TensorSpec(name, shape, F32), box)] if stop > start else []
    return found


def replicas_of(layout):
    """Pieces as two replicas have them, each by rows."""
    return rows_of(Layout(layout.rank // 2, max(layout.world // 2, 1)))


def stage_of(layout):
    """Pieces as a pipeline has them: whole tensors, each on one rank."""
    return [
        (TensorSpec(name, shape, F32), whole(shape))
        for number, (name, shape) in enumerate(SHAPES.items())
        if number % layout.world == layout.rank
    ]


def check_gathers(layout, pieces, dtype):
    want = [TensorSpec(name, shape, dtype) for name, shape in SHAPES.items()]
    gather = None
    for salt in range(2):  # the second time from the kept plan
        tensors = tensors_of(salt)
        have = shards_of(pieces, tensors)
        gather = gather or Gather(have, want, layout, wave_bytes=256)
        names = []
        for shard in assembled(gather.run(have)):
            names.append(shard.spec.name)
            assert shard.tensor.dtype == dtype
            expected = tensors[shard.spec.name].to(dtype)
            torch.testing.assert_close(shard.tensor, expected, rtol=0, atol=0)
        assert names == list(SHAPES)
    return True


def check_many(layout):
    rng = random.Random(0)
    cuts = [random_layout(rng, SHAPES, layout.world, replicas=2)[layout.rank] for _ in range(6)]
    for number, pieces in enumerate(
        [*cuts, rows_of(layout), replicas_of(layout), stage_of(layout)]
    ):
        check_gathers(layout, pieces, [F32, BF16][number % 2])
    return True


@pytest.mark.parametrize("world", by_day([2, 3, 4], [2, 3]))
def test_every_rank_gets_whole_tensors(world):
    assert run_ranks(check_many, world) == [True] * world


@given(st.integers(0, 1 << 30), st.sampled_from([F32, BF16]))
@draws(30)
def test_one_process_has_them_already(seed, dtype):
    pieces = random_layout(random.Random(seed), SHAPES, 1, replicas=1)[0]
    assert check_gathers(Layout(), pieces, dtype)


def test_alone_a_piece_is_a_view():
    spec = TensorSpec("w", (4, 3), F32)
    have = Shard(spec, whole((4, 3)), torch.ones(4, 3))
    [piece] = Gather([have], [spec], Layout()).run([have])
    assert piece.tensor.data_ptr() == have.tensor.data_ptr()


def in_machines(layout):
    """The layout as if every two processes were a machine."""
    return by_machine(replace(layout, local_world=2, local_rank=layout.rank % 2), MINUTE)


def check_machines(layout):
    return check_many(in_machines(layout))


@pytest.mark.nightly
def test_on_several_machines_too():
    assert run_ranks(check_machines, 4) == [True] * 4


def received_bytes():
    """By this process's and its neighbour's port, what has come over each of its connections."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as held:
            info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            ports = held.getsockname()[1], held.getpeername()[1]
            found[ports] = struct.unpack_from("=Q", info, 128)[0]  # tcpi_bytes_received
    return found


def crossing_of(layout):
    """Bytes between the two machines, by how the pieces are cut and whether machines are known, over the bytes of all tensors."""
    ratios, shape = [], (1 << 18,)
    for layout_of in (lambda plain: plain, in_machines):
        known = layout_of(layout)
        for of_rank in (slice(layout.rank << 16, (layout.rank + 1) << 16), slice(0, 1 << 18)):
            box = Box((of_rank.start,), (of_rank.stop - of_rank.start,))
            is_one = box == whole(shape)
            have = [Shard(TensorSpec("w", shape, F32), box, torch.ones(box.sizes))]
            have = [] if is_one and layout.rank != 1 else have
            gather = Gather(have, [TensorSpec("w", shape, F32)], known)
            before = received_bytes()
            dist.barrier()  # so that nobody sends before all have looked
            for _ in gather.run(have):
                pass
            dist.barrier()
            told = {k: n - before.get(k, 0) for k, n in received_bytes().items()}
            everybody = gather_objects(told, layout)
            ranks = {port: rank for rank, theirs in enumerate(everybody) for port, _ in theirs}
            crossed = sum(
                count
                for rank, theirs in enumerate(everybody)
                for (_, port), count in theirs.items()
                if ranks.get(port, rank) // 2 != rank // 2
            )
            ratios.append(crossed / (4 << 18))
    return ratios


def test_a_machine_gets_everything_once():
    """Where machines are not known a ring brings each its own pieces back, and a tree of one sender crosses as it likes."""
    rows, one, rows_by_machine, one_by_machine = run_ranks(crossing_of, 4)[0]
    assert rows > 1.4
    assert one > 1.9
    assert 1 <= rows_by_machine < 1.05
    assert 1 <= one_by_machine < 1.05


def alike_of(layout):
    want = [TensorSpec(name, shape, F32) for name, shape in SHAPES.items()]
    found = []
    for pieces in (rows_of(layout), replicas_of(layout), stage_of(layout)):
        own = [[(spec, box) for spec, box in pieces if spec.name == each.name] for each in want]
        found.append("".join(want[n].name for n in alike_tensors(own, want, layout)))
    return found


def test_tensors_of_one_shape_are_alike_where_every_rank_cuts_them_alike():
    assert run_ranks(alike_of, 4) == [["abdefadfa", "abdefadfa", "abdefgdia"]] * 4


def calls_of(layout):
    """Of pieces by rows, the collectives and the pieces of a run whose wave holds all."""
    have = shards_of(rows_of(layout), tensors_of())
    want = [TensorSpec(name, shape, F32) for name, shape in SHAPES.items()]
    gather = Gather(have, want, layout)
    with Traffic(layout) as traffic:
        pieces = [(piece.spec.name, piece.box.sizes) for piece in gather.run(have)]
    return len(traffic.sent), pieces


def test_a_wave_is_one_collective_and_equal_rows_one_piece():
    for calls, pieces in run_ranks(calls_of, 4):
        assert calls == 1
        assert {"d": (300,), "f": (8, 3), "b": ()}.items() <= dict(pieces).items()
        assert [name for name, _ in pieces].count("f") == 1


class Largest(TorchDispatchMode):
    """The most elements that one `torch.empty` has been asked for."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.elements = max(self.elements, found.numel())
        return found


def buffer_of(layout):
    """The bytes of the largest buffer for a long tensor and a short one by rows, for whole ones, and for those of replicas."""
    found, shapes = [], {"long": (1 << 12, 4), "short": (layout.world, 2)}
    want = [TensorSpec(name, shape, F32) for name, shape in shapes.items()]
    whole_tensors = {
        name: torch.arange(whole(shape).elements, dtype=F32).reshape(shape)
        for name, shape in shapes.items()
    }
    for parts, held in ((layout.world, True), (1, layout.rank == 0), (2, True)):
        pieces = []
        for spec in want if held else []:
            rows = spec.shape[0] // parts
            pieces.append((spec, Box((layout.rank % parts * rows, 0), (rows, spec.shape[1]))))
        have = shards_of(pieces, whole_tensors)
        gather = Gather(have, want, layout, wave_bytes=1 << 12)
        with Largest() as largest:
            for piece in gather.run(have):
                expected = whole_tensors[piece.spec.name][piece.box.slices]
                assert torch.equal(piece.tensor, expected)
        found.append(largest.elements)
    return found


def test_a_buffer_has_the_bytes_of_two_waves_at_most():
    """However few ranks send a part of a wave."""
    for sizes in run_ranks(buffer_of, 4):
        assert max(sizes) <= 2 * (1 << 12)


def test_other_shards_than_planned_are_refused():
    spec = TensorSpec("w", (4,), F32)
    shards = [Shard(spec, whole((4,)), torch.zeros(4))]
    half = [Shard(spec, whole((4,)), torch.zeros(4, dtype=BF16))]
    gather = Gather(shards, [spec], Layout())
    with pytest.raises(ValueError, match="shards"):
        list(gather.run(half))


def check_missing(layout):
    spec = TensorSpec("w", (4, 2), F32)
    held = Box((layout.rank, 0), (1, 2))
    have = [Shard(spec, held, torch.zeros(1, 2))]
    with pytest.raises(MissingError, match="w"):
        Gather(have, [spec], layout)
    with pytest.raises(IncompatibleError, match="w"):
        Gather(have, [TensorSpec("w", (2, 4), F32)], layout)
    return True


def test_what_nobody_has_is_named_on_all_ranks():
    assert run_ranks(check_missing, 2) == [True, True]
