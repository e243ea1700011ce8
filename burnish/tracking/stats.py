"""Merge numbers over ranks and micro-batches. Values may be 0-d tensors, so collecting never waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

Number = float | Tensor
"""A float, or a 0-d tensor still on the device."""


@dataclass(frozen=True, slots=True)
class Mean:
    """total / count. NaN when the count is 0."""

    total: Number
    count: Number

    def value(self) -> float:
        """Return the mean."""
        count = float(self.count)
        return float(self.total) / count if count else float("nan")


@dataclass(frozen=True, slots=True)
class Sum:
    """A total."""

    total: Number

    def value(self) -> float:
        """Return the total."""
        return float(self.total)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest number. Unlike all other metrics, it does not merge by adding."""

    largest: Number

    def value(self) -> float:
        """Return the largest."""
        return float(self.largest)


@dataclass(frozen=True, slots=True)
class EffectiveShare:
    """Kish's effective sample size of weights as a share of their number, (Σw)² / (n Σw²). NaN if all weights are 0."""

    total: Number
    squares: Number
    count: Number

    def value(self) -> float:
        """Return the share."""
        divisor = float(self.count) * float(self.squares)
        return float(self.total) ** 2 / divisor if divisor else float("nan")


Metric = Mean | Sum | Max | EffectiveShare


class Stats(dict[str, Metric]):
    """Metrics by name (`actor/pg_loss`). `a | b` joins different names; `a.merge(b)` adds equal ones."""

    def merge(self, other: Stats) -> Stats:
        """Return both together: a name in both is merged, any other kept."""
        both = {name: _merged(self[name], other[name]) for name in self.keys() & other.keys()}
        return Stats({**self, **other, **both})

    def prefixed(self, prefix: str) -> Stats:
        """Return the same metrics under `prefix` + name (`actor/`, `critic/`)."""
        return Stats({prefix + name: metric for name, metric in self.items()})

    def values_by_name(self) -> dict[str, float]:
        """Return plain floats, for trackers."""
        return {name: metric.value() for name, metric in self.items()}


def _merged(one: Metric, other: Metric) -> Metric:
    if isinstance(one, Max) and isinstance(other, Max):
        if isinstance(one.largest, Tensor) and isinstance(other.largest, Tensor):
            return Max(torch.maximum(one.largest, other.largest))
        return max(one, other, key=Max.value)
    names = [field.name for field in fields(one)]
    return type(one)(*(getattr(one, name) + getattr(other, name) for name in names))
