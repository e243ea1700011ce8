"""Merge numbers correctly over ranks and micro-batches.

A mean is kept as (total, count), so a step's mean covers all its tokens or sequences for any cut.
Values may be 0-d tensors until `Stats.values`, so collecting never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Number = float | Tensor
"""A float, or a 0-d tensor still on the device."""


@dataclass(frozen=True, slots=True)
class Mean:
    """total / count; merging adds both. NaN when the count is 0."""

    total: Number
    count: Number

    def merge(self, other: Mean) -> Mean:
        """Both parts together."""
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        """The mean as a float."""
        count = float(self.count)
        return float(self.total) / count if count else float("nan")


@dataclass(frozen=True, slots=True)
class Sum:
    """A total; merging adds."""

    total: Number

    def merge(self, other: Sum) -> Sum:
        """Both parts together."""
        return Sum(self.total + other.total)

    def value(self) -> float:
        """The total as a float."""
        return float(self.total)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest; merging takes the larger."""

    largest: Number

    def merge(self, other: Max) -> Max:
        """The larger of both; where it lies, if both lie there."""
        if isinstance(self.largest, Tensor) and isinstance(other.largest, Tensor):
            return Max(torch.maximum(self.largest, other.largest))
        return self if float(self.largest) >= float(other.largest) else other

    def value(self) -> float:
        """The largest as a float."""
        return float(self.largest)


@dataclass(frozen=True, slots=True)
class EffectiveShare:
    """Kish's effective sample size of weights as a share of their number, (Σw)² / (n Σw²); merging adds. NaN if all weights are 0."""

    total: Number
    squares: Number
    count: Number

    def merge(self, other: EffectiveShare) -> EffectiveShare:
        """Both parts together."""
        squares, count = self.squares + other.squares, self.count + other.count
        return EffectiveShare(self.total + other.total, squares, count)

    def value(self) -> float:
        """The share as a float."""
        divisor = float(self.count) * float(self.squares)
        return float(self.total) ** 2 / divisor if divisor else float("nan")


Metric = Mean | Sum | Max | EffectiveShare


class Stats(dict[str, Metric]):
    """Metrics by name (`actor/pg_loss`). `a | b` joins different names; `a.merge(b)` adds equal ones."""

    def merge(self, other: Stats) -> Stats:
        """Both together: a name in both is merged, any other kept."""
        merged = Stats(self)
        for name, metric in other.items():
            mine = merged.get(name)
            merged[name] = metric if mine is None else mine.merge(metric)  # type: ignore[arg-type]
        return merged

    def prefixed(self, prefix: str) -> Stats:
        """Return the same metrics under `prefix` + name (`actor/`, `critic/`)."""
        return Stats({prefix + name: metric for name, metric in self.items()})

    def values_by_name(self) -> dict[str, float]:
        """Plain floats, for sinks."""
        return {name: metric.value() for name, metric in self.items()}
