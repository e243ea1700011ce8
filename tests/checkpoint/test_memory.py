"""How much memory saving and loading take beside the tensors, as the system counts it (VmHWM).

The state here has 240 MB; `python -m bench.checkpoint --cases memory` does the same with more.
"""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.checkpoints.states import contents_of, make_state, shards_of, writer_pid
from support.ranks.processes import run_ranks

from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.steps import newest
from burnish.distributed.device import peak_memory, reset_peak_memory, used_memory
from burnish.distributed.host_memory import Arena

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CPU, MIB = torch.device("cpu"), 1 << 20
SAVING = (64 + 16) * MIB  # 64 MiB and the largest wave
LOADING = 32 * MIB
STATUS = 8 * MIB  # of Python's own objects and the allocator's rounding
SHAPES = {f"layers.{n}.weight": (1024, 2048) for n in range(9)} | {"embed.weight": (480, 2048)}


def state(layout):
    """This rank's part of weights and slots, in memory of its own."""
    weights, slots = {}, {}
    for name, shape in SHAPES.items():
        rows = -(-shape[0] // layout.world)
        start = min(layout.rank * rows, shape[0])
        stop = min(start + rows, shape[0])
        part = torch.arange((stop - start) * shape[1], dtype=torch.float32).view(-1, shape[1])
        weights[name] = part.add_(start)
        slots |= {f"{slot}/{name}": part + 0.5 for slot in ("exp_avg", "exp_avg_sq")}
    return as_shards(weights, layout), as_shards(slots, layout)


def as_shards(parts, layout):
    """The parts as shards of the whole tensors, which nobody has."""
    whole = {
        name: torch.empty(SHAPES[name.partition("/")[2] or name], device="meta") for name in parts
    }
    shards = shards_of(whole, layout)
    for shard in shards:
        object.__setattr__(shard, "tensor", parts[shard.spec.name])
    return shards


def held():
    """Resident bytes, with nothing left to the allocator that it could give back; the peak starts from here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak_memory(CPU)
    return used_memory(CPU)


def save_small(checkpoints, layout, *, background=False):
    """What code and libraries take once is taken here."""
    contents = contents_of(*make_state(1), layout)
    if background:
        checkpoints.begin_save(1, contents)
        assert checkpoints.finished(wait=True).error is None
    else:
        checkpoints.save(1, contents)


def save_and_load(layout, root):
    """Bytes at the peak of saving, and of loading, beyond what was held before."""
    weights, slots = state(layout)
    contents = contents_of({}, {}, layout, weights=weights, training=slots, check_finite=True)
    with Checkpoints(Path(root), layout) as checkpoints:
        save_small(checkpoints, layout)
        CheckpointSource(newest(Path(root)), layout).fill(shards_of(make_state(1)[0], layout))
        before = held()
        checkpoints.save(2, contents)
        saving = peak_memory(CPU) - before
    before = held()
    source = CheckpointSource(newest(Path(root)), layout)
    source.fill(weights)
    source.fill(slots)
    return saving, peak_memory(CPU) - before


def save_and_load_by_way_of(layout, root):
    """Bytes of the arena in use, and held, after each of two saves and a load."""
    weights, slots = state(layout)
    arena, found = Arena(CPU), []
    contents = contents_of({}, {}, layout, weights=weights, training=slots, arena=arena)
    with Checkpoints(Path(root), layout) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, contents)
            found.append(settled(arena))
        checkpoints.resume(lambda step, source: source.fill(weights), arena)
    return [*found, settled(arena)]


def settled(arena):
    """Bytes in use, and held, once threads have let go of what they were given: they do so after they say that they are done."""
    deadline = time.monotonic() + 5
    while arena.used and time.monotonic() < deadline:
        time.sleep(0.01)
    return arena.used, arena.held


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_saving_and_loading_take_a_few_blocks(tmp_path, world):
    for saving, loading in run_ranks(save_and_load, world, str(tmp_path)):
        assert 4 * MIB < saving <= SAVING
        assert MIB < loading <= LOADING  # more than nothing: it is measured


@pytest.mark.nightly
def test_blocks_and_what_ranks_send_are_carved_from_the_arena_again_and_again(tmp_path):
    for first, *later in run_ranks(save_and_load_by_way_of, 2, str(tmp_path)):
        assert first[0] == 0
        assert 4 * MIB < first[1] <= SAVING
        assert later == [first, first]


def writer_memory(checkpoints, field):
    text = Path(f"/proc/{writer_pid(checkpoints)}/status").read_text()
    return int(re.search(rf"^{field}:\s*(\d+) kB$", text, re.MULTILINE)[1]) * 1024


def save_in_background(layout, root):
    """The rank's bytes of state; what it takes beyond them, and what its writer takes of its own."""
    weights, slots = state(layout)
    size = sum(shard.tensor.nbytes for shard in [*weights, *slots])
    contents = contents_of({}, {}, layout, weights=weights, training=slots, check_finite=True)
    with Checkpoints(Path(root), layout, background_timeout=250) as checkpoints:
        save_small(checkpoints, layout, background=True)
        idle = writer_memory(checkpoints, "VmRSS")
        before = held()
        for step in (2, 3):  # the second time in the memory of the first
            checkpoints.begin_save(step, contents)
            assert checkpoints.finished(wait=True).error is None
        return size, peak_memory(CPU) - before, writer_memory(checkpoints, "VmHWM") - idle


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_saving_in_the_background_takes_one_copy_more(tmp_path, world):
    """The writer's peak includes the copy, which is the training process's own memory, shared."""
    for size, training, writer in run_ranks(save_in_background, world, str(tmp_path)):
        assert 0.9 * size < training <= size + STATUS
        assert writer <= size + SAVING


@contextmanager
def only(budget):
    """The system gives no more than what is held and a budget. Stacks of threads, which it counts, are small here."""
    threading.stack_size(MIB // 4)
    held()
    status = Path("/proc/self/status").read_text()
    data = int(re.search(r"VmData:\s*(\d+)", status)[1]) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + budget, before[1]))
    try:
        with pytest.raises((RuntimeError, MemoryError)):
            torch.empty(budget + STATUS, dtype=torch.uint8)  # so it is a limit
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def save_and_resume(layout, root):
    """Whether all is as it was when a process that may have its state and the stated budgets has saved and resumed."""
    weights, slots = state(layout)
    contents = contents_of({}, {}, layout, weights=weights, training=slots, check_finite=True)

    def load(step, source):
        source.fill(weights)
        source.fill(slots)

    with Checkpoints(Path(root), layout) as checkpoints:
        save_small(checkpoints, layout)
        CheckpointSource(newest(Path(root)), layout).fill(shards_of(make_state(1)[0], layout))
        with only(SAVING + STATUS):
            checkpoints.save(2, contents)
        for shard in [*weights, *slots]:
            shard.tensor.fill_(-1.0)
        with only(LOADING + STATUS):
            assert checkpoints.resume(load).step.step == 2
    parts = zip((weights, slots), state(layout), strict=True)
    return all(
        torch.equal(a.tensor, b.tensor)
        for mine, expected in parts
        for a, b in zip(mine, expected, strict=True)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_may_have_just_state_and_budget_goes_on(tmp_path, world):
    assert all(run_ranks(save_and_resume, world, str(tmp_path)))
