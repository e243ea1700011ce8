"""Attention of packed sequences by dense kernels: sequences of like length share a padded block.

Causal attention needs no mask for padding on the right: a real token never looks to its right. So
sequences whose lengths differ little are laid side by side in a block `[n, L]`, and one call of
scaled_dot_product_attention per block computes exactly what each sequence alone would give. A
single sequence, or neighbours of one length, are blocks by a mere change of view.

Left out: the CUDA kernel that needs no blocks (`burnish.models.attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burnish.models.rows import select_rows
from burnish.parallel.device import has_matrix_units

_SLACK_FRACTION = 8
"""A sequence may be shorter than its block by 1/8 of the block's length ..."""
_SLACK_TOKENS = 8
"""... or by so many tokens, whichever is more."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some sequences in one dense attention call."""

    count: int
    """Sequences."""
    length: int
    """Rows per sequence, padding included."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlan:
    """How T packed rows become blocks, and back."""

    blocks: tuple[Block, ...]
    """The dense calls, in the order of their padded rows, which they cover."""
    gather: Tensor | None
    """[P] int64, for each padded row the packed row it copies (padding copies a row of its own sequence). None: the padded rows are the packed rows."""
    scatter: Tensor | None
    """[T] int64, for each packed row its padded row."""
    padding: Tensor | None
    """[pads] int64, the padded rows that are padding."""

    def attend(self, rows: Sequence[Tensor], scaling: float, window: int | None) -> Tensor:
        """Causal attention of `[T, heads, head_dim]` queries, keys and values; `[T, heads, head_dim]`."""
        padded = [self._cut(self._pad(part)) for part in rows]
        outputs = []
        for block, *parts in zip(self.blocks, *padded, strict=True):
            dense = [
                part.view(block.count, block.length, *part.shape[1:]).transpose(1, 2)
                for part in parts
            ]
            outputs.append(_causal(dense, scaling, window).transpose(1, 2).flatten(0, 1))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self._unpad(output)

    def _cut(self, padded: Tensor) -> Sequence[Tensor]:
        """The rows of each block; a cut costs a copy of the gradients."""
        if len(self.blocks) == 1:
            return (padded,)
        return torch.split(padded, [block.count * block.length for block in self.blocks])

    def _pad(self, packed: Tensor) -> Tensor:
        if self.gather is None or self.scatter is None:
            return packed
        return select_rows(packed, self.gather, self.scatter, None)

    def _unpad(self, padded: Tensor) -> Tensor:
        if self.gather is None or self.scatter is None:
            return padded
        return select_rows(padded, self.scatter, self.gather, self.padding)


def plan_blocks(lengths: Sequence[int], device: torch.device) -> BlockPlan:
    """Group sequences of like length; the longest come first unless all have one length."""
    if len(set(lengths)) <= 1:
        blocks = (Block(len(lengths), lengths[0]),) if lengths else ()
        return BlockPlan(blocks, None, None, None)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    blocks_made: list[Block] = []
    rows: list[Tensor] = []
    pads: list[Tensor] = []
    scatter = torch.empty(starts[-1], dtype=torch.int64)
    position = 0
    for members in _groups(lengths):
        height = lengths[members[0]]
        steps = torch.arange(height)
        blocks_made.append(Block(len(members), height))
        for index in members:
            rows.append(starts[index] + steps.clamp(max=lengths[index] - 1))
            pads.append(position + steps[lengths[index] :])
            scatter[starts[index] : starts[index + 1]] = position + steps[: lengths[index]]
            position += height
    gather, padding = torch.cat(rows), torch.cat(pads)
    return BlockPlan(tuple(blocks_made), gather.to(device), scatter.to(device), padding.to(device))


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences by block, longest sequence first in each."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[index] == 0:
            continue
        height = lengths[groups[-1][0]] if groups else 0
        if groups and height - lengths[index] <= max(_SLACK_TOKENS, height // _SLACK_FRACTION):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _causal(dense: Sequence[Tensor], scaling: float, window: int | None) -> Tensor:
    """Causal attention `[n, heads, L, head_dim]`, over the last `window` tokens where given."""
    length = dense[0].shape[2]
    half_on_cpu = dense[0].device.type == "cpu" and dense[0].dtype in (
        torch.bfloat16,
        torch.float16,
    )
    if window is not None and window < length:
        exact = [part.float() for part in dense] if half_on_cpu else dense
        return _windowed(exact, scaling, window).to(dense[0].dtype)
    query, key, value = dense
    if half_on_cpu and length:
        output: Tensor = _HalfOnCpu.apply(query, key, value, scaling)  # type: ignore[no-untyped-call]
        return output
    gqa = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa
    )


class _HalfOnCpu(torch.autograd.Function):
    """torch's causal flash attention on a CPU for bf16 and fp16: with matrix units two to three times as fast forward as in fp32.

    Without them, and backward, the same numbers are taken to fp32 first: backward the kernel for half precision
    adds up the gradients of keys and values in it, and is up to eight times slower where sequences are short.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        given = [query, key, value]
        if not has_matrix_units(query.device):
            given = [part.float() for part in given]
        output, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *given, 0.0, True, scale=scaling
        )
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.scaling = scaling
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        *parts, log_sums = ctx.saved_tensors
        dtype, given = parts[0].dtype, [part.float() for part in (gradients[0], *parts)]
        query, key, value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, log_sums, 0.0, True, scale=ctx.scaling
        )
        return query.to(dtype), key.to(dtype), value.to(dtype), None


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
