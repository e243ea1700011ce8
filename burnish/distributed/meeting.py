"""How several ranks of a run meet: the store, who is absent, and groups of many ranks."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from burnish.distributed.collectives import gather_objects
from burnish.distributed.environment import place_of
from burnish.distributed.layout import Layout
from burnish.distributed.rank_place import RankPlace
from burnish.errors import BurnishError, UsageError, few

_log = logging.getLogger(__name__)

# Messages of gloo and NCCL about a time-out.
_TIMEOUT = re.compile(r"Timed out waiting \d+ms for|Watchdog caught collective operation timeout")
# If rank 0 serves the store, it waits so long at the end for ranks that may still use it.
_END_WAIT = timedelta(seconds=5)
# Seconds that rank 0 waits for others before it reports that it waits.
_SILENT_SECONDS = 20.0
_COUNT = "count"
_ALL = "all"
# How long a rank waits for the list of absent ranks, which another rank makes.
_NAMES_WAIT = timedelta(seconds=30)
# Up to _MESH ranks, each rank connects to all others. More ranks send small messages within groups of at most _GROUP.
_MESH = 256
_GROUP = 8
# File descriptors that a rank needs besides its connections.
_OWN_FILES = 512


def connect_lazily(layout: Layout) -> None:
    """Have gloo connect only ranks of a large run that talk to each other."""
    if layout.world > _MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def group_sizes(world: int, most: int = _GROUP) -> list[int]:
    """Factor `world` into the dims of a grid, each at most `most` if possible."""
    sizes = list[int]()
    left = world
    while left > 1:
        fitting = (*range(min(most, left), 1, -1), *range(most + 1, left + 1))
        sizes.append(next(n for n in fitting if left % n == 0))
        left //= sizes[-1]
    return sizes


def in_groups(layout: Layout, timeout: timedelta, mesh: int = _MESH, most: int = _GROUP) -> Layout:
    """Return the layout, with the groups of `group_sizes` beyond `mesh` ranks. Collective.

    gloo passes messages around a ring. A grid of 16,000 ranks takes 27 hops, one ring 15,999.
    """
    groups = list[dist.ProcessGroup]()
    below = 1
    for size in group_sizes(layout.world, most) if layout.world > mesh else ():
        first = layout.rank // (below * size) * (below * size) + layout.rank % below
        ranks = range(first, first + below * size, below)
        groups.append(dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True))
        below *= size
    return replace(layout, groups=tuple(groups))


def by_machine(layout: Layout, timeout: timedelta) -> Layout:
    """Return the layout with its `machines` groups. Collective."""
    if layout.world == layout.local_world:
        return layout
    places = gather_objects((layout.local_rank, layout.local_world), layout)
    size = layout.local_world
    if size == 1 or places != [(rank % size, size) for rank in range(layout.world)]:
        return layout
    first = layout.rank - layout.local_rank
    within = range(first, first + size)
    across = range(layout.local_rank, layout.world, size)
    groups = (
        dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
        for ranks in (within, across)
    )
    return replace(layout, machines=tuple(groups))


@contextmanager
def open_store(place: RankPlace, timeout: timedelta) -> Iterator[Store]:
    """Hold a store open until all ranks have left it."""
    layout = place.layout
    raise_descriptors(layout.world * (2 - place.agent_store) if layout.is_main else 0)
    store = _connect(place, timeout)
    yield store
    with suppress(RuntimeError):  # a rank that leaves much later than rank 0 finds the store closed
        arrive(store, layout, "left")
        if layout.rank == 0 and not place.agent_store:
            store.wait([f"left/{_ALL}"], _END_WAIT)


def raise_descriptors(connections: int) -> None:
    """Raise rank 0's limit of open files for its `connections`. Raises `UsageError` above the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = connections + _OWN_FILES
    if soft != unlimited and soft < needed and (soft < hard or hard == unlimited):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == unlimited else hard, hard))
    if hard != unlimited and hard < needed:
        raise UsageError(
            f"rank 0 cannot have {connections} connections to the other ranks",
            have=f"a hard limit of {hard} open files",
            want=f"a limit of {needed} or more",
            do="raise it where the run is launched: ulimit -Hn, LimitNOFILE of the service, or --ulimit nofile of the container",
        )


def _connect(place: RankPlace, timeout: timedelta) -> Store:
    """Connect to the store, with a prefix per attempt and opened group: the launcher's store outlives both."""
    layout = place.layout
    serves = layout.rank == 0 and not place.agent_store
    try:
        server = TCPStore(place.host, place.port, layout.world, serves, timeout, False)
        start = f"burnish/{place.attempt if place.same_attempt else 0}"
        # All ranks have opened equally many groups, so the number is the same on all.
        opening = server.add(f"{start}/openings/{layout.rank}", 1)
    except (RuntimeError, OSError) as error:
        raise BurnishError(
            f"rank {layout.rank} cannot {'open' if serves else 'reach'} the meeting point {place.host} port {place.port}",
            have=str(error).partition("\n")[0],
            want=f"all {layout.world} ranks there within {timeout.total_seconds():g} s",
            do="check that rank 0 runs, and set MASTER_ADDR and MASTER_PORT to its machine and a free port",
        ) from error
    return PrefixStore(f"{start}/{opening}", server)


def is_first(text: str) -> bool:
    """Return whether no rank has passed this text before; True without a store."""
    place = place_of(os.environ)
    if place.agent_store:
        with suppress(RuntimeError, OSError):
            store = TCPStore(place.host, place.port, place.layout.world, False, _END_WAIT, False)
            digest = hashlib.sha256(text.encode()).hexdigest()
            return bool(store.add(f"burnish/{place.attempt}/said/{digest}", 1) == 1)
    return True


def arrive(store: Store, layout: Layout, point: str) -> None:
    """Count this rank. The last rank sets the key that all wait for."""
    store.set(f"{point}/{layout.rank}", f"{socket.gethostname()}, pid {os.getpid()}")
    if store.add(f"{point}/{_COUNT}", 1) == layout.world:
        store.set(f"{point}/{_ALL}", "")


def await_everybody(store: Store, layout: Layout, timeout: timedelta, point: str) -> None:
    """Wait until all ranks have arrived at a point. Raises `BurnishError` naming absent ranks."""
    arrive(store, layout, point)
    everybody = [f"{point}/{_ALL}"]
    end = time.monotonic() + timeout.total_seconds()
    with named_absence(store, layout, timeout, point):
        report_at = min(end, time.monotonic() + _SILENT_SECONDS)
        while layout.is_main and not store.check(everybody):  # torch warns of waits that time out
            time.sleep(0.02)
            if time.monotonic() > report_at:
                there = store.add(f"{point}/{_COUNT}", 0)
                _log.info("waiting for the other processes: %d of %d are here", there, layout.world)
                break
        store.wait(everybody, timedelta(seconds=max(0.001, end - time.monotonic())))


@contextmanager
def named_absence(store: Store, layout: Layout, timeout: timedelta, point: str) -> Iterator[None]:
    """Name absent ranks if the block waits in vain."""
    try:
        yield
    except RuntimeError as error:
        raise BurnishError(
            f"rank {layout.rank} did not meet all {layout.world} ranks of the run",
            have=_absent(store, layout.world, point),
            want=f"all of them within {timeout.total_seconds():g} s",
            do="look at their output; raise distributed.timeout_seconds if they only start slowly",
        ) from error


def _absent(store: Store, world: int, point: str) -> str:
    try:
        if store.add(f"{point}/asked", 1) == 1:
            absent = [rank for rank in range(world) if not store.check([f"{point}/{rank}"])]
            store.set(f"{point}/absent", few([str(rank) for rank in absent]))
        store.wait([f"{point}/absent"], _NAMES_WAIT)
        return f"nothing from rank {store.get(f'{point}/absent').decode()}"
    except RuntimeError:
        return "the meeting point has closed: rank 0 or the launcher is gone"


@contextmanager
def named_timeout(layout: Layout, seconds: float) -> Iterator[None]:
    """Name the time-out of a collective. Raises `BurnishError`."""
    try:
        yield
    except RuntimeError as error:
        if not _TIMEOUT.search(str(error)):
            raise
        raise BurnishError(
            f"rank {layout.rank} waited {seconds:g} s in a collective for the other ranks",
            have=str(error).partition("\n")[0],
            want="every rank in the same collective",
            do="see where the other ranks were; raise distributed.timeout_seconds if they are only slow",
        ) from error
