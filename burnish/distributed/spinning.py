"""Let torch's threads wait without spinning while other programs take their cores.

After each parallel operation, threads of libgomp spin for milliseconds, because the next one usually comes soon. If
another program takes a core, threads spin for one that does not run, and steps take ten times as long and more. libgomp spins for
microseconds only while the process has more of its threads than there are cores (`GOMP_SPINCOUNT` in libgomp's manual).
So further threads that sleep shorten the spinning, and numbers stay the same, unlike with fewer threads for the work.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import torch

from burnish.distributed.device import own_cores

_OWN_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_TICK_SECONDS = 0.25
# Threads are crowded out if one of them waits for a core during so large a share of the time, while other programs have the cores
# for as long. The first alone proves nothing: a run's other threads, such as a tracker's, wait for those that spin.
_CROWDED = 0.1
# Ticks in a row after which threads count as crowded out, and as alone again.
_CROWDED_TICKS = 2
_CALM_TICKS = 8
# With more teams than this, their threads would cost more than the spinning.
_MOST_TEAMS = 16
# Elements of a tensor for each thread that an operation of torch uses.
_ELEMENTS = 1 << 15

_log = logging.getLogger("burnish")


@contextmanager
def brief_while_crowded() -> Iterator[None]:
    """Keep spinning brief, inside the block, while other programs take this process's cores.

    Does nothing if the user has set `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY`, if operations use one thread, or if the kernel does not
    tell how long threads wait for a core.
    """
    teams = _teams(torch.get_num_threads(), own_cores(1))
    is_set = any(name in os.environ for name in _OWN_SETTINGS)
    if is_set or not teams or not sum(_waited().values()):
        yield
        return
    end = Event()
    watcher = Thread(target=_watch, args=(end, teams), name="spinning", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        end.set()
        watcher.join()


def _teams(threads: int, cores: int) -> int:
    """Return how many further teams of threads make libgomp's threads outnumber the cores; 0 if too many would be needed."""
    if threads < 2:
        return 0
    needed = max(0, cores - threads) // (threads - 1) + 1
    return needed if needed <= _MOST_TEAMS else 0


def _waited() -> Mapping[str, float]:
    """Return the seconds for which each thread of this process has been ready and had no core."""
    seconds_by_thread: dict[str, float] = {}
    for task in Path("/proc/self/task").glob("*") if sys.platform == "linux" else ():
        try:
            _, waited, _ = (task / "schedstat").read_text().split()
        except (OSError, ValueError):  # the thread has ended, or the kernel does not count
            continue
        seconds_by_thread[task.name] = int(waited) / 1e9
    return seconds_by_thread


def _used_by_others() -> float:
    """Return the seconds that this process's cores have worked for other programs, or for other virtual machines."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name in cores:
            user, nice, system, _, _, interrupts, soft_interrupts, stolen, *_ = map(int, counts)
            ticks += user + nice + system + interrupts + soft_interrupts + stolen
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def _watch(end: Event, teams: int) -> None:
    crowded = 0
    calm = 0
    is_told = False
    release: Event | None = None
    before = _waited()
    used_before = _used_by_others()
    since = time.monotonic()
    while not end.wait(_TICK_SECONDS):
        waited = _waited()
        used = _used_by_others()
        now = time.monotonic()
        longest = max((waited[task] - before.get(task, 0.0) for task in waited), default=0.0)
        is_crowded = min(longest, used - used_before) > _CROWDED * (now - since)
        crowded = crowded + 1 if is_crowded else 0
        calm = 0 if is_crowded else calm + 1
        before = waited
        used_before = used
        since = now
        if release is None and crowded >= _CROWDED_TICKS:
            release = Event()
            for _ in range(teams):
                Thread(target=_sleep_as_team, args=(release,), daemon=True).start()
            if not is_told:
                _log.info("other programs use this machine's cores: threads wait without spinning")
                is_told = True
        elif release is not None and calm >= _CALM_TICKS:
            release.set()
            release = None
    if release is not None:
        release.set()


def _sleep_as_team(release: Event) -> None:
    """Have libgomp start a team for this thread, which lasts as long as the thread."""
    torch.zeros(torch.get_num_threads() * _ELEMENTS, device="cpu").add_(1)
    release.wait()
