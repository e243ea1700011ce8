"""Which part of a parameter a rank holds whose layers are shared by several ranks, and of which checkpoint tensors that is a part.

Pure arithmetic. Left out: which parameters are cut along which dim (`burnish.engines.torch.tensor_parallel`),
and what FSDP2 cuts further (`burnish.models.names`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from burnish.boxes.box import Box
from burnish.models.names import Region


@dataclass(frozen=True, slots=True)
class Cut:
    """The indices along one dim of a parameter that a rank holds, laid side by side."""

    dim: int
    """The dim, from 0."""
    spans: tuple[range, ...]
    """Runs of indices: one, or one of each of several tensors that the parameter joins along the dim."""

    @classmethod
    def of(cls, size: int, dim: int, rank: int, ranks: int, joined: int = 1) -> Cut:
        """The part of `rank` among `ranks` of a parameter with `size` indices that joins so many tensors of one size."""
        each = size // joined
        start, stop = each * rank // ranks, each * (rank + 1) // ranks
        return cls(dim, tuple(range(n * each + start, n * each + stop) for n in range(joined)))

    def of_tensor(self, parameter: Tensor) -> Tensor:
        """The part of the whole parameter."""
        return torch.cat(
            [parameter.narrow(self.dim, s.start, len(s)) for s in self.spans], self.dim
        )


def cut_regions(regions: Iterable[Region], cuts: Mapping[str, Cut]) -> tuple[Region, ...]:
    """What the checkpoint tensors are of the cut parameters; those of which this rank holds nothing are left out."""
    return tuple(
        part
        for region in regions
        for part in (
            _parts(region, cuts[region.parameter]) if region.parameter in cuts else [region]
        )
    )


def _parts(region: Region, cut: Cut) -> Iterator[Region]:
    """The parts of one checkpoint tensor that lie in a cut parameter, one per span."""
    first, size = region.box.offsets[cut.dim], region.box.sizes[cut.dim]
    held = 0  # where the span begins in the cut parameter
    for span in cut.spans:
        start, stop = max(first, span.start), min(first + size, span.stop)
        if start < stop:
            offsets, sizes = list(region.box.offsets), list(region.box.sizes)
            offsets[cut.dim], sizes[cut.dim] = held + start - span.start, stop - start
            begins = tuple(start - first if dim == cut.dim else 0 for dim in region.dims)
            yield replace(region, box=Box(tuple(offsets), tuple(sizes)), start=begins)
        held += len(span)
