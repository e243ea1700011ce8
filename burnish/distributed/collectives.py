"""Collectives on objects, statistics, flags and failures.

Objects travel between the processes of one run as pickles over gloo; no pickle is read from disk.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from burnish.distributed.device import widest_float
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.records import to_device
from burnish.tracking.stats import Max, Metric, Number, Stats

T = TypeVar("T")

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch's functions. torch 2.13 renamed both and warns about the old names."""


def gather_objects(
    value: T, layout: Layout, merge: Callable[[list[T]], T] | None = None
) -> list[T]:
    """Return all ranks' values by rank; with `merge`, only the merged value. Collective."""
    if layout.world == 1:
        return [value]
    return gather_within(value, layout.groups or (None,), merge)


def gather_rows(
    numbers: Sequence[int] | npt.NDArray[np.integer], rows: npt.NDArray[np.float64], layout: Layout
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Return the rows of all first peers, sorted by number. Collective."""
    # Peers have equal rows, so only the first of them sends any.
    arrays = np.asarray(numbers, np.int32), rows
    encoded = [array[: None if layout.is_first_peer else 0].tobytes() for array in arrays]
    return by_number(gather_objects(encoded, layout), rows.shape[1:])


def by_number(
    encoded: Sequence[Sequence[bytes]], shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Decode and join the ranks' numbered rows."""
    numbers = np.frombuffer(b"".join(each for each, _ in encoded), np.int32)
    rows = np.frombuffer(b"".join(each for _, each in encoded)).reshape(-1, *shape)
    order = np.argsort(numbers, kind="stable")
    return numbers[order], rows[order]


def gather_within(
    value: T,
    groups: Sequence[ProcessGroup | None],
    merge: Callable[[list[T]], T] | None = None,
) -> list[T]:
    """Gather values along these dims of the rank grid; None gathers from all ranks. Collective."""
    values = [value]
    for group in groups:
        gathered: list[list[T]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(gathered, values, group)
        values = [each for part in gathered for each in part]
        if merge is not None:
            values = [merge(values)]
    return values


Parcel = tuple[Sequence[int], bytes]
"""The receiving ranks, and the bytes for each of them."""


def deliver(parcels: Iterable[Parcel], layout: Layout) -> list[bytes]:
    """Send parcels to their receivers; return this rank's received bytes. Collective.

    Parcels travel dim by dim, slowest first, so neighbouring receivers share one copy.
    """
    pending = list(parcels)
    below = layout.world
    if layout.world == 1:
        return [data for receivers, data in pending for _ in receivers]
    for group in reversed(layout.groups or (None,)):
        size = dist.get_world_size(group)
        below //= size
        outgoing: list[list[Parcel]] = [[] for _ in range(size)]
        for receivers, data in pending:
            by_place: dict[int, list[int]] = {}
            for rank in receivers:
                by_place.setdefault(rank // below % size, []).append(rank)
            for place, ranks in by_place.items():
                outgoing[place].append((ranks, data))
        pending = [parcel for parcels in _swapped(outgoing, group) for parcel in parcels]
    return [data for _, data in pending]


def _swapped(values: Sequence[T], group: ProcessGroup | None) -> list[T]:
    packed = [pickle.dumps(each) for each in values]
    leaving = torch.tensor([len(each) for each in packed])
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=group)
    sent = torch.frombuffer(bytearray().join(packed), dtype=torch.uint8)
    received = torch.empty(int(coming.sum()), dtype=torch.uint8)
    sizes = coming.tolist()
    ends = coming.cumsum(0).tolist()
    dist.all_to_all_single(received, sent, sizes, leaving.tolist(), group=group)
    data = received.numpy().data
    return [pickle.loads(data[n - size : n]) for n, size in zip(ends, sizes, strict=True)]  # noqa: S301


def from_main(value: T, layout: Layout) -> T:
    """Return rank 0's value. Collective."""
    if layout.world == 1:
        return value
    values: list[T] = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def any_rank(flag: bool, layout: Layout) -> bool:
    """Return whether any rank sets the flag. Collective."""
    return bool(total(torch.tensor([int(flag)]), layout, dist.ReduceOp.MAX).item())


def total(values: Tensor, layout: Layout, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce values on the CPU over all ranks, in place. Collective."""
    for group in (layout.groups or (None,)) if layout.world > 1 else ():
        dist.all_reduce(values, op, group)
    return values


def reduce_stats(stats: Stats, layout: Layout, device: torch.device) -> Stats:
    """Merge statistics over all ranks; ranks that share a micro-batch count once. Collective.

    Values stay 0-d tensors on `device`, fp64 if supported; nothing waits for the device.
    """
    if layout.world == 1:
        return stats
    kinds = _agreed_kinds(stats, layout)
    merged: dict[str, Metric] = {}
    for is_max, neutral in ((False, 0.0), (True, float("-inf"))):
        chosen = {name: kind for name, kind in kinds.items() if (kind is Max) == is_max}
        numbers: list[Number] = [
            getattr(stats[name], field.name) if name in stats else neutral
            for name, kind in chosen.items()
            for field in fields(kind)
        ]
        if numbers:
            packed = _pack(numbers, device)
            dist.all_reduce(packed, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM)
            reduced = iter((packed if is_max else packed / layout.sharing).unbind())
            for name, kind in chosen.items():
                merged[name] = kind(*islice(reduced, len(fields(kind))))
    return Stats({name: merged[name] for name in kinds})


def _agreed_kinds(stats: Stats, layout: Layout) -> dict[str, type[Metric]]:
    kinds: dict[str, type[Metric]] = {name: type(metric) for name, metric in stats.items()}
    text = "\n".join(f"{name} {kind.__name__}" for name, kind in kinds.items())
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    bounds = total(torch.tensor([digest, -digest]), layout, dist.ReduceOp.MAX)
    if int(bounds[0]) == -int(bounds[1]):
        return kinds
    union: dict[str, type[Metric]] = {}
    for rank, kinds_of_rank in enumerate(gather_objects(kinds, layout)):
        for name, kind in kinds_of_rank.items():
            if union.setdefault(name, kind) is not kind:
                raise BurnishError(
                    f"the statistic {name} is of different kinds on different ranks",
                    have=f"{union[name].__name__} before rank {rank}, {kind.__name__} on it",
                    want="one kind",
                )
    return union


def _pack(numbers: list[Number], device: torch.device) -> Tensor:
    wide = widest_float(device)
    plain = [0.0 if isinstance(number, Tensor) else float(number) for number in numbers]
    packed = to_device(torch.tensor(plain, dtype=wide), device)
    places = [place for place, number in enumerate(numbers) if isinstance(number, Tensor)]
    if places:
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        stacked = torch.stack([t.detach().to(device, wide).reshape(()) for t in tensors])
        packed[torch.tensor(places).to(device)] = stacked
    return packed


@contextmanager
def agree(layout: Layout) -> Iterator[None]:
    """Raise an exception of any rank on every rank, at the end of the block. Collective.

    A failing rank raises its own error. The others raise the lowest failing rank's error as a
    `BurnishError` naming that rank. Run no collectives inside the block.
    """
    own_error: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again below
        own_error = error
    if not any_rank(own_error is not None, layout):
        return
    errors = gather_objects(None if own_error is None else _portable(own_error, layout), layout)
    if own_error is not None:
        raise own_error
    other_error = next(error for error in errors if error is not None)
    other_error.printed_by_main = True
    raise other_error


def _portable(error: Exception, layout: Layout) -> BurnishError:
    if not isinstance(error, BurnishError):
        return BurnishError(f"rank {layout.rank}: {type(error).__name__}: {error}")
    # An error makes its text when it is built, and a copy builds it again: the second one has the new problem in its text.
    named = copy.copy(error)
    named.problem = f"rank {layout.rank}: {error.problem}"
    return copy.copy(named)


def same_on_all_ranks(value: bytes | str, what: str, layout: Layout) -> None:
    """Raise `BurnishError` on every rank if a value differs, naming `what` and the ranks. Collective."""
    data = value.encode() if isinstance(value, str) else value
    digests = gather_objects(hashlib.blake2b(data, digest_size=16).hexdigest(), layout)
    differ = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if differ:
        ranks = (
            f"rank {differ[0]} differs" if len(differ) == 1 else f"ranks {', '.join(differ)} differ"
        )
        raise BurnishError(
            f"{what} is not the same on all ranks",
            have=f"{ranks} from rank 0",
            want="the same on every rank",
            do="give all processes the same command, environment and files",
        )
