"""Attention of packed sequences by dense kernels: sequences of about one length share a block.

Sequences of like length are laid side by side in a block `[n, L]`, and each block is one call of a dense kernel, which
computes exactly what each sequence alone would give. Shorter ones are filled up at their end, where causal attention
does not look, by at most an eighth or 15 rows. Sequences of one length that lie in the order of the blocks become blocks
by a mere change of view.

Left out: the CUDA kernel that needs no blocks (`burnish.models.kernels.attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burnish.models.kernels.cpu_attention import causal_attention
from burnish.models.rows import Indices, on_device, select_rows


@dataclass(frozen=True, slots=True)
class Block:
    """Some sequences in one dense attention call."""

    count: int
    """Sequences."""
    length: int
    """Rows per sequence, those that fill it up among them."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Which packed row is which row of the blocks."""

    gather: Tensor
    """[R] int64, for each row of the blocks a packed row; those that fill a sequence up are its last once more."""
    scatter: Tensor
    """[T] int64, for each packed row its row of the blocks."""
    filling: Tensor | None
    """[R - T] int64, the rows of the blocks that fill sequences up. None: there are none."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlan:
    """How T packed rows become R rows of blocks, and back."""

    blocks: tuple[Block, ...]
    """The dense calls, in the order of their rows, which they cover."""
    order: Order | None
    """None: packed rows are the rows of the blocks."""

    def attend(self, rows: Sequence[Tensor], scaling: float, window: int | None) -> Tensor:
        """Causal attention of `[T, heads, head_dim]` queries, keys and values; `[T, heads, head_dim]`."""
        ordered = [self._cut(self._order(part)) for part in rows]
        outputs = []
        for block, *parts in zip(self.blocks, *ordered, strict=True):
            dense = [
                part.view(block.count, block.length, *part.shape[1:]).transpose(1, 2)
                for part in parts
            ]
            outputs.append(_causal(dense, scaling, window).transpose(1, 2).flatten(0, 1))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self._restore(output)

    def _cut(self, rows: Tensor) -> Sequence[Tensor]:
        """The rows of each block; a cut costs a copy of the gradients."""
        if len(self.blocks) == 1:
            return (rows,)
        return torch.split(rows, [block.count * block.length for block in self.blocks])

    def _order(self, packed: Tensor) -> Tensor:
        if self.order is None:
            return packed
        return select_rows(packed, self.order.gather, self.order.scatter, None)

    def _restore(self, rows: Tensor) -> Tensor:
        if self.order is None:
            return rows
        return select_rows(rows, self.order.scatter, self.order.gather, self.order.filling)


def plan_blocks(lengths: Sequence[int], device: torch.device) -> BlockPlan:
    """Group sequences by length, the longest first."""
    numbers = np.asarray(lengths, np.int64)
    starts, kinds = numbers.cumsum() - numbers, _rounded_up(numbers)
    blocks, rows, real = [], [np.empty(0, np.int64)], [np.empty(0, np.bool)]
    for kind in np.unique(kinds[kinds > 0])[::-1]:
        of_kind = np.flatnonzero(kinds == kind)
        own = numbers[of_kind, None]
        steps = np.arange(own.max())
        blocks.append(Block(len(of_kind), len(steps)))
        rows.append((starts[of_kind, None] + np.minimum(steps, own - 1)).ravel())
        real.append((steps < own).ravel())
    gather, is_real = np.concatenate(rows), np.concatenate(real)
    if is_real.all() and (np.diff(gather) == 1).all():
        return BlockPlan(tuple(blocks), None)
    scatter = np.flatnonzero(is_real)[np.argsort(gather[is_real])]
    filling = None if is_real.all() else on_device(np.flatnonzero(~is_real), device)
    order = Order(on_device(gather, device), on_device(scatter, device), filling)
    return BlockPlan(tuple(blocks), order)


def _rounded_up(lengths: Indices) -> Indices:
    """What the lengths of a block have in common: the next multiple of 16, of long ones of a sixteenth of the next power of two."""
    powers = 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    steps = np.maximum(16, powers // 16)
    rounded: Indices = -(-lengths // steps) * steps
    return rounded


def _causal(dense: Sequence[Tensor], scaling: float, window: int | None) -> Tensor:
    """Causal attention `[n, heads, L, head_dim]`, over the last `window` tokens where given."""
    query, key, value = dense
    length = query.shape[2]
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        output: Tensor = causal_attention(query, key, value, scaling, window or length)
        return output
    if window is not None and window < length:
        return _windowed(dense, scaling, window)
    gqa = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa
    )


def _windowed(dense: Sequence[Tensor], scaling: float, window: int) -> Tensor:
    """Causal attention over the last `window` tokens, as many queries at a time."""
    query, key, value = dense
    gqa, length = query.shape[1] != key.shape[1], query.shape[2]
    outputs = []
    for start in range(0, length, window):
        stop, first = min(start + window, length), max(0, start - window + 1)
        mask = _band(stop - start, stop - first, start - first, window, query.device)
        span = slice(first, stop)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, span],
                value[:, :, span],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=gqa,
            )
        )
    return torch.cat(outputs, dim=2)


def _band(queries: int, keys: int, offset: int, window: int, device: torch.device) -> Tensor:
    """[queries, keys] bool: query i is at key position offset + i and sees itself and window - 1 before."""
    distance = (
        offset
        + torch.arange(queries, device=device)[:, None]
        - torch.arange(keys, device=device)[None, :]
    )
    return (distance >= 0) & (distance < window)
