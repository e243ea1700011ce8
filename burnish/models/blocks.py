"""Attention of packed sequences by dense kernels: sequences of one length share a block.

Sequences of one length are laid side by side in a block `[n, L]`, and one call of
scaled_dot_product_attention per block computes exactly what each sequence alone would give. Nothing is
padded. Sequences that lie in the order of the blocks become blocks by a mere change of view.

Left out: the CUDA kernel that needs no blocks (`burnish.models.attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burnish.models.rows import on_device, select_rows
from burnish.parallel.device import has_matrix_units


@dataclass(frozen=True, slots=True)
class Block:
    """Some sequences in one dense attention call."""

    count: int
    """Sequences."""
    length: int
    """Rows per sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlan:
    """How T packed rows become blocks, and back."""

    blocks: tuple[Block, ...]
    """The dense calls, in the order of their rows, which they cover."""
    gather: Tensor | None
    """[T] int64, for each row of the blocks the packed row that it is. None: they lie in one order."""
    scatter: Tensor | None
    """[T] int64, for each packed row its row of the blocks."""

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
        if self.gather is None or self.scatter is None:
            return packed
        return select_rows(packed, self.gather, self.scatter, None)

    def _restore(self, rows: Tensor) -> Tensor:
        if self.gather is None or self.scatter is None:
            return rows
        return select_rows(rows, self.scatter, self.gather, None)


def plan_blocks(lengths: Sequence[int], device: torch.device) -> BlockPlan:
    """Group sequences by length, the longest first."""
    numbers = np.asarray(lengths, np.int64)
    order = np.argsort(-numbers, kind="stable")
    order = order[numbers[order] > 0]
    sizes, counts = np.unique(numbers[order], return_counts=True)
    blocks = tuple(
        Block(count, size)
        for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True)
    )
    starts = numbers.cumsum() - numbers
    spans = [np.arange(starts[index], starts[index] + numbers[index]) for index in order]
    gather = np.concatenate(spans) if spans else np.empty(0, np.int64)
    if (np.diff(gather) == 1).all():
        return BlockPlan(blocks, None, None)
    return BlockPlan(blocks, on_device(gather, device), on_device(np.argsort(gather), device))


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
