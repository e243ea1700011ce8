"""DoRA (arXiv 2402.09353, equation 5), which learns the magnitude m of each output apart from its direction, as PEFT's modules do.

y = m (W + s B A) x / ‖W + s B A‖,    the norm of each row, which is a constant of the gradient
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard, ShardSource, TensorSpec
from burnish.files.safetensors import ADAPTER_PREFIX

MAGNITUDE = "lora_magnitude_vector"
"""PEFT's name of m."""

RowsOfTensors = Mapping[str, Sequence[tuple[int, TensorSpec]]]
"""By a magnitude's name in PEFT's file: the tensors of the model's checkpoint that its layer holds, each with its first row there."""


def magnitude_name(layer: str) -> str:
    """Return the name of a layer's magnitudes in PEFT's files."""
    return f"{ADAPTER_PREFIX}{layer}.{MAGNITUDE}"


def rescaled(weight: Tensor, magnitude: Tensor) -> Tensor:
    """Give the rows of a changed weight [rows, columns] these magnitudes [rows]."""
    return weight * (magnitude / torch.linalg.norm(weight, dim=1))[:, None]


def fill_magnitude(
    shard: Shard, base: ShardSource, tensors: Sequence[tuple[int, TensorSpec]]
) -> None:
    """Fill a part of the magnitudes with the norms of the model's own rows, which leave the model as it is."""
    first = shard.box.offsets[0]
    count = shard.box.sizes[0]
    for row, spec in tensors:
        start = max(first, row)
        stop = min(first + count, row + spec.shape[0])
        if start >= stop:
            continue
        rows = torch.empty(stop - start, spec.shape[1])
        base.fill([Shard(spec, Box((start - row, 0), (stop - start, spec.shape[1])), rows)])
        norms = torch.linalg.norm(rows, dim=1)
        shard.tensor.detach()[start - first : stop - first].copy_(norms)
