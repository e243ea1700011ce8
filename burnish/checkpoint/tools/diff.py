"""Compare two sets of tensors. A distance in ulp counts the coarser dtype's numbers between two values (+0 and -0 are one)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from burnish.boxes.tensor_reader import TensorInfo, TensorReader, chunks

_Verdict = Literal["equal", "differs", "only in A", "only in B", "another shape", "another kind"]
"""The result for one tensor. Integers and floats differ in kind."""

_CHUNK = 1 << 14  # elements: temporaries fit into the processor's cache, and malloc reuses them
_TINIEST = 5e-324
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Distance:
    """Distance between the elements of two tensors."""

    different: int = 0
    """Elements with other bits (in fp64 where the dtypes differ)."""
    max_ulp: int = 0
    """Most ulp between two finite elements; for integers, the largest difference."""
    max_relative: float = 0.0
    """Largest |a - b| / max(|a|, |b|) of two finite elements."""
    max_absolute: float = 0.0
    """Largest |a - b| of two finite elements."""
    nonfinite: int = 0
    """Different elements with a NaN or an infinity; they count in no maximum."""
    square: float = field(default=0.0, compare=False)
    """Sum of |a - b|² over finite elements."""
    square_of_a: float = field(default=0.0, compare=False)
    """Sum of |a|² over finite elements."""

    @property
    def relative_l2(self) -> float:
        """‖a - b‖ / ‖a‖; infinite where only `a` is zero."""
        if not self.square_of_a:
            return math.inf if self.square else 0.0
        return math.sqrt(self.square / self.square_of_a)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add elements, one-dimensional and equally many."""
        if a.dtype.is_complex and b.dtype.is_complex:
            a = torch.view_as_real(a).flatten()
            b = torch.view_as_real(b).flatten()
        differing = _differing(a, b)
        count = int(differing.count_nonzero())
        self.different += count
        x = a.to(torch.float64)
        y = b.to(torch.float64)
        finite = x.isfinite() & y.isfinite()
        if not bool(finite.all()):
            self.nonfinite += int((differing & ~finite).count_nonzero())
            a = a[finite]
            b = b[finite]
            x = x[finite]
            y = y[finite]
        self.square_of_a += float(x.dot(x))
        if not count or not len(a):
            return
        if a.dtype.is_floating_point:
            apart = (x - y).abs_()
        else:
            apart = _gaps(_ordered(a), _ordered(b)).to(torch.float64)
        self.square += float(apart.dot(apart))
        largest = torch.maximum(x.abs(), y.abs()).clamp_(min=_TINIEST)
        self.max_ulp = max(self.max_ulp, _ulp(a, b))
        self.max_absolute = max(self.max_absolute, float(apart.max()))
        self.max_relative = max(self.max_relative, float(apart.div_(largest).max()))


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """A tensor of A and the one with its key in B."""

    key: str
    """Its set and name, as `model/lm_head.weight` or `exp_avg/lm_head.weight`."""
    verdict: _Verdict
    a: TensorInfo | None
    b: TensorInfo | None
    distance: Distance | None = None
    """The distance, if the verdict is "equal" or "differs"."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values; infinite distances are null."""
        sides = {
            name: side and {"dtype": str(side.dtype).partition(".")[2], "shape": list(side.shape)}
            for name, side in (("a", self.a), ("b", self.b))
        }
        distance = asdict(self.distance) if self.distance else {}
        if self.distance:
            del distance["square"], distance["square_of_a"]
            distance["relative_l2"] = self.distance.relative_l2
        plain = {name: value if math.isfinite(value) else None for name, value in distance.items()}
        return {"tensor": self.key, "verdict": self.verdict, **sides, **plain}


def compare_steps(a: TensorReader, b: TensorReader) -> Iterator[TensorDiff]:
    """Yield A's tensors in the order of its files, then those only in B."""
    for key, in_a in a.tensors.items():
        in_b = b.tensors.get(key)
        if in_b is None:
            yield TensorDiff(key, "only in A", in_a, None)
        elif in_b.shape != in_a.shape:
            yield TensorDiff(key, "another shape", in_a, in_b)
        elif _kind(in_a.dtype) != _kind(in_b.dtype):
            yield TensorDiff(key, "another kind", in_a, in_b)
        else:
            distance = Distance()
            for span in chunks(in_a.elements, _CHUNK):
                distance.add(a.read_range(key, *span), b.read_range(key, *span))
            verdict: _Verdict = "differs" if distance.different else "equal"
            yield TensorDiff(key, verdict, in_a, in_b, distance)
    for key, in_b in b.tensors.items():
        if key not in a.tensors:
            yield TensorDiff(key, "only in B", None, in_b)


def _kind(dtype: torch.dtype) -> object:
    return "float" if dtype.is_floating_point else dtype


def _differing(a: Tensor, b: Tensor) -> Tensor:
    """Mark elements that differ in bits, or in value where the dtypes differ (NaN is NaN)."""
    if a.dtype == b.dtype:
        kind = _BITS[a.dtype.itemsize]
        return a.view(kind) != b.view(kind)
    x = a.to(torch.float64)
    y = b.to(torch.float64)
    return (x != y) & ~(x.isnan() & y.isnan())


def _ulp(a: Tensor, b: Tensor) -> int:
    if a.dtype != b.dtype:
        coarser = max(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        a = a.to(coarser)
        b = b.to(coarser)
    return int(_gaps(_ordered(a), _ordered(b)).numpy().max())


def _ordered(x: Tensor) -> Tensor:
    """Return elements as int64 at distances that count the numbers between them."""
    if x.dtype == torch.uint64:
        return x.view(torch.int64) ^ torch.iinfo(torch.int64).min
    if not x.dtype.is_floating_point:
        return x.to(torch.int64)
    kind = _BITS[x.dtype.itemsize]
    bits = x.view(kind).to(torch.int64)
    return torch.where(bits >= 0, bits, torch.iinfo(kind).min - bits)


def _gaps(x: Tensor, y: Tensor) -> Tensor:
    """Return |x - y| of int64 as uint64, which holds any."""
    return (torch.maximum(x, y) - torch.minimum(x, y)).view(torch.uint64)
