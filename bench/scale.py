"""The control plane of very many ranks, which one machine imitates.

    python -m bench.scale [--json] [--ranks N] [--cases NAME ...]

`save`: one process does what each rank does to plan a save of a model of 70 billion weights, fully sharded: it plans a section of
the files for all ranks, and takes its own share of the others.

`start`: fake ranks connect to a real store and a real relay, each in a process of its own, and do there what a run's
ranks do. They share this machine's cores; on a cluster only store and relay share one.

The goal stands as the limit: a ratio above 1 keeps it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.machine import Result, command_line, report
from burnish.boxes.pieces import PieceTable
from burnish.boxes.shards import TensorSpec
from burnish.boxes.table import BoxTable, Ints
from burnish.checkpoint.layout import MAIN, Disks, Outline, WritePlan
from burnish.distributed import failure_watch, processes
from burnish.distributed.device import peak_memory, reset_peak_memory, used_memory
from burnish.distributed.environment import Place
from burnish.distributed.layout import Layout
from burnish.distributed.processes import group_sizes

CPU = torch.device("cpu")
RANKS = 16_000
PER_PROCESS = 4_000
"""Fake ranks that share a process."""
PATIENCE = timedelta(minutes=20)


@contextmanager
def beside(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A process that runs `target(pipe, *arguments)`, and this end of its pipe."""
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
    """A store, until the pipe closes."""
    processes.raise_descriptors(ranks)
    store = TCPStore("127.0.0.1", 0, None, True, PATIENCE, False)
    pipe.send(store.port)
    wait_for_end(pipe)


def serve_relay(pipe: Connection, ranks: int) -> None:
    """A relay, until the pipe closes."""
    processes.raise_descriptors(ranks)
    relay = failure_watch._Relay(local=True, patience=None)
    relay.start()
    pipe.send(relay.contact)
    wait_for_end(pipe)


def wait_for_end(pipe: Connection) -> None:
    with suppress(EOFError):
        pipe.recv()


def meet(pipe: Connection, first: int, count: int, ranks: int, port: int) -> None:
    """Fake ranks: connect to a store, then twice do what meeting asks of it, each when told.

    One after the other, because thousands of threads measure themselves. Those that wait find the others there.
    """
    processes.raise_descriptors(count)
    pipe.send("ready")
    pipe.recv()
    places = [
        Place(Layout(rank, ranks, rank % 8, 8), "127.0.0.1", port, agent_store=True)
        for rank in range(first, first + count)
    ]
    with ThreadPoolExecutor(16) as pool:  # a connection looks its own name up
        stores = list(pool.map(lambda place: processes._connect(place, PATIENCE), places))
    pipe.send(count)
    pipe.recv()
    for point in ("here", "joined"):
        for place, store in zip(places, stores, strict=True):
            processes._arrive(store, place.layout, point)
        for store in stores:
            store.wait([f"{point}/all"], PATIENCE)
    pipe.send(count)
    pipe.recv()


def listen(pipe: Connection, first: int, count: int, contact: dict[str, Any]) -> None:
    """Fake ranks' connections to a relay: introduce all, and wait for a failure if asked to."""
    processes.raise_descriptors(count)
    lines = []
    pipe.send("ready")
    pipe.recv()
    for rank in range(first, first + count):
        connection = socket.create_connection((contact["address"], contact["port"]), 60)
        me = {"token": contact["token"], "rank": rank, "host": "here", "pid": 1}
        connection.sendall(json.dumps(me).encode() + b"\n")
        lines.append(connection)
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
    """Seconds from a message to all until the last one's answer."""
    begun = perf_counter()
    for pipe, message in zip(pipes, messages, strict=True):
        pipe.send(message)
    for pipe in pipes:
        pipe.recv()
    return perf_counter() - begun


@contextmanager
def crowd(
    target: Callable[..., None], ranks: int, *arguments: object
) -> Iterator[list[Connection]]:
    """Processes that imitate `ranks` ranks."""
    with ExitStack() as stack:
        shares = [(n, min(PER_PROCESS, ranks - n)) for n in range(0, ranks, PER_PROCESS)]
        pipes = [stack.enter_context(beside(target, *share, *arguments)) for share in shares]
        for pipe in pipes:
            pipe.recv()
        yield pipes


def start(ranks: int) -> list[Result]:
    """What rank 0 and the launcher's store have to do until all have met, and until all have heard of a failure."""
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
    """What a rank does for the plan of a save, in a process of its own."""
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
    """Plan rank 0's section as `WritePlan.together` does, of pieces that are made here instead of gathered."""
    roles, disks, size = [MAIN], Disks.one(ranks), group_sizes(ranks)[0]
    tensors = stored_tensors()
    reset_peak_memory(CPU)
    before, begun = used_memory(CPU), process_time()
    outline = Outline.of([tensors] * ranks, roles, disks)
    sections = outline.sections(ranks, size)
    wanted = outline.tensors_in(sections[0])
    outlined = process_time() - begun
    rows = np.array([number for number, each in enumerate(tensors) if each.name in wanted])
    boxes = pieces(tensors, rows, ranks)
    begun = process_time()
    message = pickle.dumps(boxes)
    count = sum(len(each[0]) for each in boxes)
    del boxes
    have = [PieceTable(tensors, BoxTable(*boxes), index) for index, *boxes in pickle.loads(message)]  # noqa: S301
    telling = process_time() - begun
    begun = process_time()
    shares = outline.shares(have, sections[0], disks, range(size))
    planned = process_time() - begun
    begun = process_time()
    told = [pickle.dumps(share) for share in shares]
    received = pickle.loads(pickle.dumps([told] * len(sections)))  # noqa: S301 - our own
    WritePlan._joined(outline, [pickle.loads(each[0]) for each in received])  # noqa: S301
    telling += process_time() - begun
    moves = sum(len(wave) for group in shares[0].moves for wave in (group.own, *group.waves))
    print(
        f"{len(tensors)} tensors in {len(outline.blocks.file)} blocks and {len(sections)} sections: {count} pieces in "
        f"the first, {len(message) / 1e6:.0f} MB received from other groups, {len(pickle.dumps(told)) * len(sections) / 1e6:.1f} MB within the "
        f"group, {moves} moves of rank 0",
        flush=True,
    )
    pipe.send((outlined, planned, telling, peak_memory(CPU) - before))


def stored_tensors() -> tuple[TensorSpec, ...]:
    """A model of 70 billion weights, the bits that bf16 lacks, and two moments."""
    layer: dict[str, tuple[int, ...]] = {
        "q": (8192, 8192),
        "k": (1024, 8192),
        "v": (1024, 8192),
        "o": (8192, 8192),
    }
    layer |= {"gate": (28672, 8192), "up": (28672, 8192), "down": (8192, 28672)}
    layer |= {"norm1": (8192,), "norm2": (8192,)}
    shapes = {f"layers.{n}.{name}": shape for n in range(80) for name, shape in layer.items()}
    shapes |= {"embed": (128256, 8192), "head": (128256, 8192), "norm": (8192,)}
    kinds = {"model": torch.bfloat16, "residual": torch.int16}
    kinds |= dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
    return tuple(
        TensorSpec(f"{kind}/{name}", shape, dtype)
        for kind, dtype in kinds.items()
        for name, shape in shapes.items()
    )


def pieces(tensors: tuple[TensorSpec, ...], rows: Ints, ranks: int) -> list[tuple[Ints, ...]]:
    """Every rank's pieces of some tensors, cut by rows as FSDP cuts them."""
    lengths = np.array([tensors[row].shape[0] for row in rows])
    columns = np.array([(*tensors[row].shape, 1)[1] for row in rows])
    most, found = -(-lengths // ranks), list[tuple[Ints, ...]]()
    for rank in range(ranks):
        first = np.minimum(rank * most, lengths)
        size = np.minimum(most, lengths - first)
        offsets = np.stack([first, np.zeros_like(first)], axis=1)
        some = size > 0
        sizes = np.stack([size, columns], axis=1)
        found.append((rows[some], rows[some], offsets[some], sizes[some]))
    return found


def within(name: str, ours: float, unit: str, goal: float | None = None) -> Result:
    """A figure that is to be at most `goal`."""
    if goal is None:
        return Result(f"scale/{name}", ours, None, None, unit, 0, 0)
    return Result(f"scale/{name}", ours, None, goal, unit, goal / max(ours, 1e-9), 1)


CASES: dict[str, Callable[[int], list[Result]]] = {"start": start, "save": save}


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
