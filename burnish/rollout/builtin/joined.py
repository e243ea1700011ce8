"""Linear layers that read the same rows, computed as one, with the adapters that lie on them.

    y = W x + b + s B A x

A decoding step of a small batch spends its time between the matrix products, so the layers' W are one
matrix here and one product, and so are the A of those that have an adapter; what each B makes of its part is added
in place. W is read only: an adapter is never merged into it. Left out: experts, which compute with theirs
themselves (`burnish.models.lora.experts`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from burnish.models.lora.adapter import linear_parts
from burnish.rollout.builtin.products import Product


class Joined:
    """The outputs of several linear layers for the same rows, side by side."""

    def __init__(self, *layers: nn.Module) -> None:
        """Weights, biases and A become views of joined ones, so take shards of the model afterwards."""
        plain, adapters = zip(*map(linear_parts, layers), strict=True)
        bias = None if plain[0].bias is None else _joined(plain, "bias")
        self._product = Product(_joined(plain, "weight"), bias)
        columns = _ranges([part.out_features for part in plain])
        own = [(c, adapter) for c, adapter in zip(columns, adapters, strict=True) if adapter]
        self._a = _joined([adapter.a for _, adapter in own], "weight") if own else None
        ranks = _ranges([adapter.a.out_features for _, adapter in own])
        self._wide = [(c, r, x.b.weight, x.scale) for (c, x), r in zip(own, ranks, strict=True)]

    def refresh(self) -> None:
        """Take note that the layers' own weights have changed; their adapters may change at any time."""
        self._product.refresh()

    def __call__(self, rows: Tensor) -> Tensor:
        """For `rows` [n, in]: [n, out of the first + out of the second + ...], in memory of its own."""
        result = self._product(rows)
        if self._a is not None:
            narrow = linear(rows, self._a)
            for columns, ranks, b, scale in self._wide:
                result[:, columns].addmm_(narrow[:, ranks], b.t(), alpha=scale)
        return result


def _joined(layers: Sequence[nn.Linear], name: str) -> Tensor:
    """One weight (or bias) for all layers, whose own become views of it."""
    tensors = [part.get_parameter(name).detach() for part in layers]
    whole = torch.cat(tensors)
    views = torch.split(whole, [len(tensor) for tensor in tensors])
    for part, view in zip(layers, views, strict=True):
        part.register_parameter(name, nn.Parameter(view, requires_grad=False))
    return whole


def _ranges(sizes: Sequence[int]) -> list[slice]:
    """Where parts of these sizes lie, one after the other."""
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
