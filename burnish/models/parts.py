"""A rank's part of a model whose matrices, vocabulary or experts several ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from burnish.boxes.box import Box
from burnish.distributed.tensor_collectives import (
    all_gather_replicated,
    all_gather_rows,
    reduce_scatter_rows,
)
from burnish.models.names import Region


@dataclass(frozen=True, slots=True)
class ShardRule:
    """The indices along one dim of a parameter that a rank holds."""

    dim: int
    """The dim, from 0."""
    spans: tuple[range, ...]
    """Runs of indices: one, or one of each of several tensors that the parameter joins along the dim."""

    @classmethod
    def of(cls, size: int, dim: int, rank: int, ranks: int, joined: int = 1) -> ShardRule:
        """Return a rank's part of `size` indices that join `joined` equal tensors."""
        length = size // joined
        start = length * rank // ranks
        stop = length * (rank + 1) // ranks
        return cls(dim, tuple(range(n * length + start, n * length + stop) for n in range(joined)))

    def of_tensor(self, parameter: Tensor) -> Tensor:
        """Return the part of the whole parameter."""
        return torch.cat(
            [parameter.narrow(self.dim, s.start, len(s)) for s in self.spans], self.dim
        )


def cut_regions(regions: Iterable[Region], cuts: Mapping[str, ShardRule]) -> tuple[Region, ...]:
    """Return the checkpoint tensors that this rank holds, as boxes of the cut parameters."""
    own_regions: list[Region] = []
    for region in regions:
        cut = cuts.get(region.parameter)
        own_regions.extend([region] if cut is None else _parts(region, cut))
    return tuple(own_regions)


def _parts(region: Region, cut: ShardRule) -> Iterator[Region]:
    first = region.box.offsets[cut.dim]
    size = region.box.sizes[cut.dim]
    begin = 0  # where the span begins in the cut parameter
    for span in cut.spans:
        start = max(first, span.start)
        stop = min(first + size, span.stop)
        if start < stop:
            offsets = list(region.box.offsets)
            sizes = list(region.box.sizes)
            offsets[cut.dim], sizes[cut.dim] = begin + start - span.start, stop - start
            begins = list(region.start or (0,) * len(region.dims))
            if cut.dim in region.dims:  # else it is one index along the dim, such as an expert
                begins[region.dims.index(cut.dim)] += start - first
            yield replace(region, box=Box(tuple(offsets), tuple(sizes)), start=tuple(begins))
        begin += len(span)


def keep_parts(model: nn.Module, cuts: Mapping[str, ShardRule]) -> None:
    """Replace cut parameters of a model on meta by their parts; tied parameters stay tied."""
    parts: dict[int, nn.Parameter] = {}
    for name, whole in list(model.named_parameters(remove_duplicate=False)):
        if name not in cuts:
            continue
        if id(whole) not in parts:
            part = cuts[name].of_tensor(whole.detach())
            parts[id(whole)] = nn.Parameter(part, whole.requires_grad)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, parts[id(whole)])


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyPart:
    """This rank's part of the vocabulary."""

    tokens: range
    """The ids of the tokens whose rows this rank holds."""
    group: ProcessGroup
    """The ranks that share the vocabulary."""

    def columns(self, token_ids: Tensor) -> Tensor:
        """Return this rank's row of each token [N], -1 if it is another rank's."""
        columns = token_ids - self.tokens.start
        return torch.where((columns >= 0) & (columns < len(self.tokens)), columns, -1)

    def embed(self, embedding: nn.Module, token_ids: Tensor) -> Tensor:
        """Embed tokens [C] by all ranks' rows of `embedding`; return this rank's part [C / ranks, H]. Collective."""
        columns = self.columns(token_ids)
        rows = embedding(columns.clamp(min=0))
        return reduce_scatter_rows(torch.where(columns[:, None] >= 0, rows, 0), self.group)

    def merged(self, sums: Tensor) -> Tensor:
        """Return m, S, D and z_y - m [4, N] of the whole vocabulary from this rank's. Collective."""
        ranks = all_gather_rows(sums[None], self.group)
        top, total, dot, chosen = ranks.unbind(dim=1)
        highest = top.amax(dim=0)
        lift = top - highest
        share = lift.exp()
        return torch.stack(
            (
                highest,
                (share * total).sum(dim=0),
                (share * (dot + total * lift)).sum(dim=0),
                (chosen + lift).amax(dim=0),
            )
        )

    def all_rows(self, rows: Tensor) -> Tensor:
        """Return the states of all ranks' tokens; their gradients are summed over ranks. Collective."""
        return all_gather_rows(rows, self.group)

    def all_values(self, values: Tensor) -> Tensor:
        """Return all ranks' values, one per token. All ranks must compute the same from them. Collective."""
        return all_gather_replicated(values, self.group)
