"""The control plane of very many ranks, imitated by one machine.

    python -m bench.scale [--json] [--ranks N] [--cases NAME ...]

`save`: one process does the work of each rank in planning a save of a model of 70 billion weights, fully sharded. It plans a section
of the files for all ranks, and takes its own share of the other sections.

`publish`: one process does the work of each rank in publishing those weights, except sending.
`step`: messages and Python of a step of GRPO that saves and writes nothing. gloo passes messages round in rings, so they take
hops × the time of a hop. The hop is measured between two processes on this machine; scale it by your network's latency. A delivery
takes one hop per dim of the grid of ranks. Each rank has 16 rollouts, of 400 new tokens on average. With the run's own functions it
reads the numbers of all ranks, divides the prompts, chooses the groups, divides the sequences among the ranks, computes advantages
and makes statistics. Further figures: the bytes that it receives, its memory, and the numbers of a critic.

`start`: fake ranks connect to a real store and a real relay, each in its own process, and use them as a run's
ranks do. They share this machine's cores; on a cluster, only store and relay share a machine.

The limit is the goal: a ratio of 1 or more meets it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from bench.machine import Result, command_line, report
from burnish.algorithms.base import load_advantage
from burnish.algorithms.critic import gae, value_stats
from burnish.boxes.gather import waves_of
from burnish.boxes.pieces import PieceTable, alike_tensors
from burnish.boxes.plan import WAVE_BYTES
from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.table import BoxTable, Ints
from burnish.checkpoint.write_plan import MAIN, Outline, WriteShare
from burnish.config.schema import RunConfig
from burnish.data import batching
from burnish.data.balance import by_share, inverse, share_evenly
from burnish.data.loader import Loader
from burnish.distributed import failure_watch, meeting, processes
from burnish.distributed.collectives import any_rank, by_number, deliver
from burnish.distributed.device import (
    keep_freed_pages,
    peak_memory,
    reset_peak_memory,
    used_memory,
)
from burnish.distributed.layout import Layout
from burnish.distributed.meeting import group_sizes
from burnish.distributed.rank_place import RankPlace
from burnish.distributed.stall import StallLimits
from burnish.methods.parts.policy_update import PolicyUpdate
from burnish.methods.parts.rollouts import GroupSampler, RolloutQueue, merged_shares
from burnish.models.flops import ModelFlops
from burnish.records import Completion, Example, Prompt, Rollout
from burnish.records.rollout_table import RolloutTable
from burnish.rewards.overview import RewardFailures
from burnish.runs.stragglers import Stragglers
from burnish.tracking.observers import wanted_rollouts

T = TypeVar("T")

CPU = torch.device("cpu")
RANKS = 16_000
LAYERS = 80
"""Layers of the model."""
FLAGS = 3
GATHERS = 1
DELIVERIES = 1
"""Messages of a step, as traced in a run of two ranks. Three flags: whether a rank was told to stop, the same together with whether a
save is late, and whether statistics are alike. A gathering of the rollouts' numbers, and a delivery of their tokens."""
REPEATED = 7
"""Number of times that a step's Python is timed; the median counts."""
SAMPLES = 16
"""Rollouts that a rank makes in a step."""
CONFIG = {
    "model": {"path": "x"},
    "data": {"train": ["x"]},
    "reward": {"functions": [{"function": "exact_match"}]},
}
"""GRPO with default settings."""
PER_PROCESS = 4_000
"""Fake ranks that share a process."""
PATIENCE = timedelta(minutes=20)


@contextmanager
def beside(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run `target(pipe, *arguments)` in a process. Yield this end of its pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    with closing(ours):
        yield ours
    process.join(30)
    process.kill()


def serve_store(pipe: Connection, ranks: int) -> None:
    """Serve a store until the pipe closes."""
    meeting.raise_descriptors(ranks)
    store = TCPStore("127.0.0.1", 0, None, True, PATIENCE, False)
    pipe.send(store.port)
    wait_for_end(pipe)


def serve_relay(pipe: Connection, ranks: int) -> None:
    """Serve a relay until the pipe closes."""
    meeting.raise_descriptors(ranks)
    relay = failure_watch._Relay(local=True, limits=StallLimits(0.0))
    relay.start()
    pipe.send(relay.contact)
    wait_for_end(pipe)


def wait_for_end(pipe: Connection) -> None:
    with suppress(EOFError):
        pipe.recv()


def meet(pipe: Connection, first: int, count: int, ranks: int, port: int) -> None:
    """As fake ranks, connect to a store, then meet at it twice; begin each part at a message.

    The ranks act one after the other: with thousands of threads, the threads would be measured. So a rank that waits for the others
    finds them there.
    """
    meeting.raise_descriptors(count)
    pipe.send("ready")
    pipe.recv()
    places = [
        RankPlace(Layout(rank, ranks, rank % 8, 8), "127.0.0.1", port, agent_store=True)
        for rank in range(first, first + count)
    ]
    with ThreadPoolExecutor(16) as pool:  # each connection looks its own name up, which takes time
        stores = list(pool.map(lambda place: meeting._connect(place, PATIENCE), places))
    pipe.send(count)
    pipe.recv()
    for point in ("here", "joined"):
        for place, store in zip(places, stores, strict=True):
            meeting.arrive(store, place.layout, point)
        for store in stores:
            store.wait([f"{point}/all"], PATIENCE)
    join(places, stores)
    pipe.send(count)
    pipe.recv()


def join(places: list[RankPlace], stores: list[Store]) -> None:
    """Use the store as torch and gloo do for the world's group and each group of the grid: write and read addresses, and wait."""
    world = places[0].layout.world
    below = 1
    for size in (1, *group_sizes(world)):
        below *= size
        keys = [f"{size}/{below}/{each.layout.rank // below}/{each.layout.rank}" for each in places]
        for key, store in zip(keys, stores, strict=True):
            store.set(key, "x" * 100)
            store.add(f"{key}/barrier", 1)
            store.add(f"{key}/barrier", 0)
            store.set(f"{key}/last", "1")
        for key, store in zip(keys, stores, strict=True):
            store.wait([f"{key}/last"], PATIENCE)
            for _ in range(2):
                store.wait([key], PATIENCE)
                store.get(key)


def listen(pipe: Connection, first: int, count: int, contact: dict[str, Any]) -> None:
    """As fake ranks, connect to a relay and introduce all. Then wait for a failure, which the first rank reports if asked to."""
    meeting.raise_descriptors(count)
    pipe.send("ready")
    pipe.recv()
    address = contact["address"], contact["port"]
    known = {"token": contact["token"], "host": "here", "pid": 1}
    ranks = [known | {"rank": rank} for rank in range(first, first + count)]
    with ThreadPoolExecutor(16) as pool:
        lines = list(pool.map(partial(failure_watch.introduced, address), ranks))
    pipe.send(count)
    if pipe.recv():
        lines[0].sendall(json.dumps({"reason": "out of paper", "lines": []}).encode() + b"\n")
    for connection in lines:
        connection.settimeout(60)
        assert connection.recv(1 << 16).startswith(b'{"rank"')
    pipe.send(count)
    for connection in lines:
        connection.close()


def together(pipes: list[Connection], messages: list[object]) -> float:
    """Send each process a message. Return the seconds until the last answer."""
    begun = perf_counter()
    for pipe, message in zip(pipes, messages, strict=True):
        pipe.send(message)
    for pipe in pipes:
        pipe.recv()
    return perf_counter() - begun


@contextmanager
def crowd(
    target: Callable[..., None], ranks: int, *arguments: object, each: int = PER_PROCESS
) -> Iterator[list[Connection]]:
    """Start processes that imitate `ranks` ranks. Yield their pipes."""
    with ExitStack() as stack:
        shares = [(n, min(each, ranks - n)) for n in range(0, ranks, each)]
        pipes = [stack.enter_context(beside(target, *share, *arguments)) for share in shares]
        for pipe in pipes:
            pipe.recv()
        yield pipes


def start(ranks: int) -> list[Result]:
    """Measure the work of rank 0's relay and the launcher's store until all ranks have met, and until all know of a failure."""
    with beside(serve_store, ranks) as server:
        port = server.recv()
        with crowd(meet, ranks, ranks, port) as pipes:
            connected, met = (together(pipes, [None] * len(pipes)) for _ in range(2))
            for pipe in pipes:
                pipe.send(None)
    with beside(serve_relay, ranks) as server:
        contact = server.recv()
        with crowd(listen, ranks, contact) as pipes:
            known = together(pipes, [None] * len(pipes))
            told = together(pipes, [number == 0 for number in range(len(pipes))])
    return [
        within("start/store/connect", connected, "s"),
        within("start/store/meet", met, "s"),
        within("start/relay/connect", known, "s"),
        within("start/relay/failure", told, "s"),
        within("start", connected + met + known, "s", 60),
    ]


def save(ranks: int) -> list[Result]:
    """Measure a rank's work for the plan of a save, in a separate process."""
    with beside(plan, ranks) as pipe:
        outlined, planned, told, size = pipe.recv()
    return [
        within("save/outline", outlined, "s"),
        within("save/section", planned, "s"),
        within("save/messages", told, "s"),
        within("save", outlined + planned + told, "s", 10),
        within("save/memory", size / 1e6, "MB", 500),
    ]


def plan(pipe: Connection, ranks: int) -> None:
    """Plan rank 0's section as `WritePlan.together` does, from pieces that are made here instead of gathered."""
    size = prod(group_sizes(ranks)[:3])
    tensors = stored_tensors()
    reset_peak_memory(CPU)
    before = used_memory(CPU)
    begun = process_time()
    outline = Outline.of([tensors] * ranks, [MAIN])
    sections = outline.sections(ranks, size)
    wanted = outline.tensors_in(sections[0])
    outlined = process_time() - begun
    rows = np.array([number for number, each in enumerate(tensors) if each.name in wanted])
    boxes = pieces(tensors, rows, ranks)
    begun = process_time()
    message = pickle.dumps(boxes)
    count = sum(len(each) for each, _ in boxes)
    del boxes
    have = [PieceTable(tensors, *each) for each in pickle.loads(message)]  # noqa: S301
    telling = process_time() - begun
    begun = process_time()
    shares = outline.shares(have, sections[0], ranks, range(size))
    planned = process_time() - begun
    begun = process_time()
    told = [pickle.dumps(share) for share in shares]
    received = pickle.loads(pickle.dumps([told] * len(sections)))  # noqa: S301 - our own
    WriteShare.joined([pickle.loads(each[0]) for each in received])  # noqa: S301
    telling += process_time() - begun
    moves = sum(len(wave) for group in shares[0].moves for wave in (group.own, *group.waves))
    print(
        f"{len(tensors)} tensors in {len(outline.blocks.file)} blocks and {len(sections)} sections: {count} pieces in "
        f"the first, {len(message) / 1e6:.0f} MB received from other groups, {len(pickle.dumps(told)) * len(sections) / 1e6:.1f} MB within the "
        f"group, {moves} moves of rank 0",
        flush=True,
    )
    pipe.send((outlined, planned, telling, peak_memory(CPU) - before))


def stored_tensors(layers: int = LAYERS) -> tuple[TensorSpec, ...]:
    """Return the tensors of a model of 70 billion weights: in bf16, the bits that bf16 lacks, and two moments."""
    layer: dict[str, tuple[int, ...]] = {
        "q": (8192, 8192),
        "k": (1024, 8192),
        "v": (1024, 8192),
        "o": (8192, 8192),
    }
    layer |= {"gate": (28672, 8192), "up": (28672, 8192), "down": (8192, 28672)}
    layer |= {"norm1": (8192,), "norm2": (8192,)}
    shapes = {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()}
    shapes |= {"embed": (128256, 8192), "head": (128256, 8192), "norm": (8192,)}
    kinds = {"model": torch.bfloat16, "residual": torch.int16}
    kinds |= dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
    return tuple(
        TensorSpec(f"{kind}/{name}", shape, dtype)
        for kind, dtype in kinds.items()
        for name, shape in shapes.items()
    )


def pieces(
    tensors: tuple[TensorSpec, ...], rows: Ints, ranks: int, of: range | None = None
) -> list[tuple[BoxTable, Ints]]:
    """Return all ranks' pieces of some tensors, or those `of` some ranks, cut by rows as FSDP cuts them."""
    lengths = np.array([tensors[row].shape[0] for row in rows])
    columns = np.array([(*tensors[row].shape, 1)[1] for row in rows])
    most = -(-lengths // ranks)
    found = list[tuple[BoxTable, Ints]]()
    for rank in range(ranks) if of is None else of:
        first = np.minimum(rank * most, lengths)
        size = np.minimum(most, lengths - first)
        offsets = np.stack([first, np.zeros_like(first)], axis=1)
        some = size > 0
        sizes = np.stack([size, columns], axis=1)
        found.append((BoxTable(rows[some], offsets[some], sizes[some]), rows[some]))
    return found


def publish(ranks: int) -> list[Result]:
    """Measure a rank's work to publish the model, in a separate process: the plan, and each step."""
    with beside(gather, ranks) as pipe:
        planned, told, ran, waves = pipe.recv()
    print(f"{waves} waves; {told / 1e6:.1f} MB of pieces from all ranks", flush=True)
    return [within("publish/plan, once", planned, "s"), within("publish", ran, "s", 1)]


def gather(pipe: Connection, ranks: int) -> None:
    """Plan the gathering of a model, and go through its parts as `Gather.run` does, but without elements."""
    tensors = tuple(each for each in stored_tensors() if each.name.startswith("model/"))
    rows = np.arange(len(tensors))
    boxes, first = pieces(tensors, rows, ranks, range(1))[0]
    have = [
        (tensors[number], boxes.box(row, len(tensors[number].shape)))
        for row, number in enumerate(first.tolist())
    ]
    begun = process_time()
    row_of = {number: [row] for row, number in enumerate(first.tolist())}
    own = [row_of.get(number, []) for number in range(len(tensors))]
    alike = alike_tensors([[have[n] for n in each] for each in own], tensors, Layout())
    looked = process_time() - begun
    some = np.array(sorted({*alike}))
    others = pieces(tensors, some, ranks)
    message = pickle.dumps(others)
    begun = process_time()
    told = pickle.loads(message)  # noqa: S301 - our own
    tables = [PieceTable(tensors, *each) for each in told]
    tables[0] = PieceTable(tensors, tables[0].boxes, np.arange(len(tables[0].boxes)))
    waves = waves_of(tables, tensors, alike, own, 0, WAVE_BYTES)
    planned = process_time() - begun + looked
    begun = process_time()
    layout = Layout(0, ranks)
    empty = torch.empty(0, dtype=torch.uint8)
    for parts, lengths in waves:
        int(lengths.max()), int(lengths.sum()), np.flatnonzero(lengths).tolist()
        for part in parts:
            if layout.rank in part.ranks:
                part.of(part.ranks.index(layout.rank))
            empty.view(part.spec.dtype)
            Shard(part.spec, part.all, empty)
    pipe.send((planned, len(message), process_time() - begun, len(waves)))


def step(ranks: int) -> list[Result]:
    """Measure a step's messages, one after the other, and the Python of each rank."""
    with beside(serve_store, 2) as server, crowd(pass_on, 2, server.recv(), each=1) as pipes:
        for pipe in pipes:
            pipe.send(None)
        hop, delivery = map(max, zip(*(pipe.recv() for pipe in pipes), strict=True))
    sizes = group_sizes(ranks)
    hops = sum(size - 1 for size in sizes)
    ring = 2 * hops * hop
    delivered = len(sizes) * delivery
    messages = (FLAGS + GATHERS) * ring + DELIVERIES * delivered
    print(
        f"{sizes}: {hops} hops of {hop * 1e6:.0f} µs; {FLAGS} flags, {GATHERS} gathering, {DELIVERIES} delivery",
        flush=True,
    )
    with beside(exchange, ranks) as pipe:
        received, seconds, memory, tokens = pipe.recv()
    print(f"{tokens / 1e6:.0f} million tokens", flush=True)
    python = sum(took for name, took in seconds.items() if "critic" not in name)
    return [
        within("step/flag", ring * 1e3, "ms"),
        within("step/delivery", delivered * 1e3, "ms"),
        within("step/messages", messages * 1e3, "ms"),
        *[within(f"step/{name}", size / 1e6, "MB") for name, size in received.items()],
        *[within(f"step/{name}", took * 1e3, "ms") for name, took in seconds.items()],
        within("step/Python", python * 1e3, "ms"),
        within("step/memory", memory / 1e6, "MB"),
        within("step", (messages + python) * 1e3, "ms", 100),
    ]


def exchange(pipe: Connection, ranks: int) -> None:
    """Do every rank's work on all rollouts of a step of GRPO. Pack the rollouts of one rank. Whiten the advantages of PPO."""
    rng = np.random.default_rng(0)
    begin = 100
    limit = 800
    messages = []
    for rank, row in enumerate(rng.integers(1, limit, (ranks, SAMPLES)).tolist()):
        task = Prompt(rank, np.arange(begin) + rank, "", None, None, "", {})
        group = [
            Rollout(task, n, completion(size), "", reward, {"exact_match": reward})
            for n, (size, reward) in enumerate(zip(row, rng.random(SAMPLES).tolist(), strict=True))
        ]
        told = (
            None,
            RolloutTable.of([group]).encoded(),
            dict.fromkeys(("generate", "score"), np.array([1.5])),
        )
        messages.append(pickle.dumps(told))
    levels = [messages]
    for size in group_sizes(ranks):
        groups = [levels[-1][n : n + size] for n in range(0, len(levels[-1]), size)]
        levels.append([pickle.dumps(merged_shares(list(map(pickle.loads, g)))) for g in groups])
    config = RunConfig.model_validate(
        {**CONFIG, "batch": {"prompts": ranks, "tokens_per_device": SAMPLES * limit}}
    )
    seconds = dict[str, float]()
    flops = ModelFlops(per_token=1e5, attention={None: 1})
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    engine: Any = SimpleNamespace(layout=Layout(0, ranks))
    advantage = load_advantage(config.algorithm.advantage)
    update = PolicyUpdate(engine, None, None, flops, config, advantage)
    keep_freed_pages()  # as a rank does
    reset_peak_memory(CPU)
    before = used_memory(CPU)

    def clock(name: str, make: Callable[[], T]) -> T:
        # the first step imports modules
        made = make()
        taken = []
        for _ in range(REPEATED):
            begun = process_time()
            made = make()
            taken.append(process_time() - begun)
        seconds[name] = median(taken)
        return made

    table, took = clock("hearing of all", lambda: hear(levels, group_sizes(ranks)))
    stragglers = Stragglers(warns=False)
    failures = RewardFailures(config.reward)
    asked = rng.integers(20, 400, ranks).astype(np.float64)

    def collect(*_: object) -> RolloutTable:
        owners = share_evenly(asked, ranks)
        found = table.take(inverse(by_share(owners, ranks)))
        failures.update(found)
        stragglers.update(took)
        return found

    collector: Any = SimpleNamespace(layout=Layout(), collect=collect, stragglers=stragglers)
    collector.generator = SimpleNamespace(called_by_rank0=False)
    sampler = GroupSampler(config, collector, [], Loader(ranks, 0, shuffle=True))
    queue = RolloutQueue(sampler, 1)
    drawn = clock("choosing", lambda: sampler.sample(0))
    outlines = update.outlines(drawn.groups, np.arange(ranks * SAMPLES), "sampled_logprobs")
    lengths = outlines.lengths
    shares = batching._assign(outlines, ranks, config.microbatch_tokens, flops)
    table = held_by(drawn.groups, shares.ranks)
    drawn = replace(drawn, groups=table)
    clock("dividing", lambda: update.minibatches(table))
    credit = clock("advantages", lambda: update.assign_credit(table, []))

    def statistics() -> None:
        queue.stats(drawn)
        wanted_rollouts(config.tracking, 2, 9, table, validation=False)

    clock("statistics", statistics)
    memory = peak_memory(CPU) - before
    tokens = 0
    for each in shares.microbatches(0):
        mask = [np.arange(length) >= begin for length in lengths[each].tolist()]
        mine = [
            Example(np.zeros(len(m), np.int64), m, sampled_logprobs=np.zeros(len(m), np.float32))
            for m in mask
        ]
        every = list(range(len(mine)))
        packet = every, batching._packet(dict(enumerate(mine)), every, ["sampled_logprobs"])
        tokens += len(pickle.dumps(packet))
    values = [np.zeros(each.item(), np.float32) for each in table.lengths[:SAMPLES]]
    estimates = gae(table.rewards[:SAMPLES], values, None, 1.0, 0.95)
    sums = estimates.sums.tobytes()
    numbers = np.arange(len(table.owners), dtype=np.int32).reshape(ranks, SAMPLES)
    of_critic = [pickle.dumps([each.tobytes(), sums]) for each in numbers]

    def whiten() -> None:
        found = by_number([pickle.loads(each) for each in of_critic], (6,))[1]  # noqa: S301 - our own
        estimates.whitened(found, table.lengths)
        value_stats(found, table.lengths)

    clock("numbers of a critic", whiten)
    assert len(credit.advantages) == len(table.owners)
    dist.destroy_process_group()
    heard = sum(
        len(m)
        for level, size in zip(levels, group_sizes(ranks), strict=False)
        for m in level[:size]
    )
    sizes = {
        "numbers of all": heard,
        "numbers of a critic": sum(map(len, of_critic)),
        "tokens of its own": tokens,
    }
    pipe.send((sizes, seconds, memory, int(lengths.sum())))


def hear(levels: list[list[bytes]], sizes: Sequence[int]) -> tuple[RolloutTable, Any]:
    """Handle the messages of each of rank 0's groups as rank 0 does."""
    for level, size in zip(levels, sizes, strict=False):
        own = merged_shares([pickle.loads(message) for message in level[:size]])  # noqa: S301 - our own
        if level is not levels[-2]:
            pickle.dumps(own)  # for the next group
    return RolloutTable.gathered([own[1]]), own[2]


def held_by(table: RolloutTable, ranks: npt.NDArray[np.int64]) -> RolloutTable:
    """Return a table in which each rank owns the rollouts that it trains on, so that rank 0 needs no other rank."""
    mine = np.flatnonzero(ranks == 0)
    held = np.full(len(ranks), -1)
    held[mine] = np.arange(len(mine))
    objects = [
        Rollout(
            Prompt(0, np.arange(asked), "", None, None, "", {}), 0, completion(size), "", 0.0, {}
        )
        for asked, size in zip(table.prompt_lengths[mine], table.lengths[mine], strict=True)
    ]
    return replace(table, owners=ranks, places=held, objects=objects)


def completion(size: int) -> Completion:
    """Return a completion of `size` tokens."""
    numbers = np.zeros(size, np.float32)
    return Completion(np.zeros(size, np.int64), numbers, numbers, "stop", 7)


def pass_on(pipe: Connection, rank: int, count: int, port: int) -> None:
    """As one of two real processes, exchange flags and deliveries over gloo, and send their times."""
    pipe.send("ready")
    pipe.recv()
    with processes.process_group(
        CPU, 60, RankPlace(Layout(rank, 2, rank, 2), "127.0.0.1", port, True)
    ) as layout:
        parcels = [([1 - rank], b"x")]
        flag = half_of(lambda: any_rank(False, layout))
        delivery = half_of(lambda: deliver(parcels, layout)) * 2
    pipe.send((flag, delivery))


def half_of(work: Callable[[], object]) -> float:
    """Return half of the median seconds."""
    seconds = []
    for _ in range(500):
        begun = perf_counter()
        work()
        seconds.append(perf_counter() - begun)
    return median(seconds) / 2


def within(name: str, ours: float, unit: str, goal: float | None = None) -> Result:
    """Return a figure that should be at most `goal`."""
    if goal is None:
        return Result(f"scale/{name}", ours, None, None, unit, 0, 0)
    return Result(f"scale/{name}", ours, None, goal, unit, goal / max(ours, 1e-9), 1)


CASES: dict[str, Callable[[int], list[Result]]] = {
    "start": start,
    "save": save,
    "publish": publish,
    "step": step,
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    os.environ |= {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    results = [result for case in arguments.cases for result in CASES[case](arguments.ranks)]
    report(results, arguments.json)


if __name__ == "__main__":
    main()
