"""Measure how fast ranks compute and communicate, and name the slow ones.

Bandwidths are bus bandwidths, as in NCCL's tests: bytes / time · (n - 1) / n, and twice that for an all-reduce.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
import torch.distributed as dist

from burnish.check.machine import Finding
from burnish.distributed.collectives import all_gather, gather_objects, reduce_scatter
from burnish.distributed.device import has_bf16_products, measured_matmul_peak, synchronize
from burnish.distributed.layout import Layout
from burnish.errors import bytes_text, few

_ROUNDS = 5
# A rank this many times slower than the median is named.
_ODD_FACTOR = 1.5
# Most seconds between a clock and the median of all.
_MOST_SKEW = 0.5


def measure(layout: Layout, device: torch.device) -> list[Finding]:
    """Measure all ranks together; return the same findings on each. Collective."""
    hosts = gather_objects(socket.gethostname(), layout)
    return [
        _clocks(layout, hosts),
        _products(layout, device, hosts),
        *_collectives(layout, device),
        _pairs(layout, device, hosts),
    ]


def _clocks(layout: Layout, hosts: Sequence[str]) -> Finding:
    dist.barrier()
    now = gather_objects(time.time(), layout)
    skews = [at - median(now) for at in now]
    wrong = [
        f"rank {rank} on {hosts[rank]} {skew:+.1f} s"
        for rank, skew in enumerate(skews)
        if abs(skew) > _MOST_SKEW
    ]
    return Finding(
        "clocks",
        few(wrong) or f"{max(now) - min(now):.3f} s apart",
        want=f"less than {_MOST_SKEW} s from each other" if wrong else "",
        do="start chrony or systemd-timesyncd on these machines",
    )


def _products(layout: Layout, device: torch.device, hosts: Sequence[str]) -> Finding:
    dtype = torch.bfloat16 if has_bf16_products(device) else torch.float32
    peaks = gather_objects(measured_matmul_peak(device, dtype), layout)
    speeds = f"{min(peaks) / 1e12:.2f} to {max(peaks) / 1e12:.2f} TFLOPS ({dtype})"
    return _compared("matrix products", speeds, [1 / peak for peak in peaks], hosts)


def _collectives(layout: Layout, device: torch.device) -> Iterator[Finding]:
    number = torch.zeros(1, device=device)
    latency = _seconds(lambda: dist.all_reduce(number), layout, device)
    yield Finding("latency", f"{1e6 * latency:.0f} µs for an all-reduce of one number")
    world = layout.world
    elements = _bytes(device) // 4 // world * world
    whole, part = (torch.zeros(elements // shards, device=device) for shards in (1, world))
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "all-reduce": (2.0, lambda: dist.all_reduce(whole)),
        "all-gather": (1.0, lambda: all_gather(whole, part)),
        "reduce-scatter": (1.0, lambda: reduce_scatter(part, whole)),
    }
    for name, (times, call) in calls.items():
        seconds = _seconds(call, layout, device)
        speed = times * (world - 1) / world * whole.nbytes / seconds
        yield Finding(name, f"{bytes_text(speed)}/s with {bytes_text(whole.nbytes)}")


def _pairs(layout: Layout, device: torch.device, hosts: Sequence[str]) -> Finding:
    """Exchange a tensor with log2(n) ranks in turn: a slow rank is slow with all."""
    sent, received = (torch.zeros(_bytes(device) // 4, device=device) for _ in range(2))
    durations: list[float] = []
    distance = 1
    while distance < layout.world:
        peer = layout.rank ^ distance
        for warm in (False, True):
            dist.barrier()
            if peer < layout.world:
                begin = time.perf_counter()
                swap = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
                for waiting in dist.batch_isend_irecv(swap):
                    waiting.wait()
                synchronize(device)
                durations += [time.perf_counter() - begin] * warm
        distance *= 2
    seconds = gather_objects(median(durations), layout)
    slowest, fastest = (sent.nbytes / each(seconds) for each in (max, min))
    speeds = f"{bytes_text(slowest)}/s to {bytes_text(fastest)}/s each way"
    return _compared("pairs", speeds, seconds, hosts)


def _compared(part: str, text: str, seconds: Sequence[float], hosts: Sequence[str]) -> Finding:
    usual = median(seconds)
    odd = [
        f"rank {rank} on {hosts[rank]} takes {duration / usual:.1f} times as long"
        for rank, duration in enumerate(seconds)
        if duration > _ODD_FACTOR * usual
    ]
    return Finding(
        part,
        f"{text}; {few(odd)}" if odd else text,
        want="ranks that are about as fast" if odd else "",
        do="look there for other processes, heat, slow links and low clocks; else leave the machine out",
    )


def _bytes(device: torch.device) -> int:
    return 8 << 20 if device.type == "cpu" else 256 << 20


def _seconds(call: Callable[[], object], layout: Layout, device: torch.device) -> float:
    """Return the median over rounds of the slowest rank's time."""
    durations: list[float] = []
    for _ in range(_ROUNDS + 1):
        dist.barrier()
        begin = time.perf_counter()
        call()
        synchronize(device)
        durations.append(time.perf_counter() - begin)
    by_rank = gather_objects(durations[1:], layout)
    return median(max(times[number] for times in by_rank) for number in range(_ROUNDS))
