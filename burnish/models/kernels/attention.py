"""Attention over packed sequences, as a transformers attention implementation.

The models run on one row of tokens, `[1, T]`, in which several sequences lie end to end. Attention
is the only layer that has to know where each begins. Models built with `IMPLEMENTATION` hand their
queries, keys and values to whatever object travels in the keyword argument `packing` of the model's
forward: a `PackedLayout` when training and scoring, a key-value cache when generating. No mask is
built: transformers makes none for an implementation that registers no mask function. It is never
compiled: what it does depends on the lengths of the sequences.

Left out: attention dropout (runs must be repeatable), attention softcapping and attention sinks
(refused), and bidirectional layers (refused).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from burnish.distributed.autograd import uncompiled
from burnish.errors import IncompatibleError
from burnish.models.kernels.cpu_attention import causal_attention
from burnish.models.packing import Indices, PrefixTree, RowMap, on_device, select_rows

IMPLEMENTATION = "burnish_packed"
"""The name under which transformers knows this attention (`config._attn_implementation`)."""

_REFUSED = ("softcap", "s_aux", "position_bias")
"""Keyword arguments of attention variants that would silently be computed wrongly."""

_VARLEN_COMPLETE = {"scale", "window_size", "enable_gqa"} <= set(
    inspect.signature(varlen_attn).parameters
)
"""Whether this torch's variable-length kernel has the options that language models need."""


class Attends(Protocol):
    """What may travel as `packing`: it decides which keys each query sees."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Attention output `[1, T, heads, head_dim]`.

        `query` is `[1, heads, T, head_dim]`, `key` and `value` `[1, kv_heads, T, head_dim]`, with
        positions already applied. `module` is the attention layer (its `layer_idx` names it).
        A `sliding_window` of W lets each token see itself and the W - 1 tokens before it.
        """


@uncompiled
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer; hands on to `options["packing"]`.

    Raises `IncompatibleError` for a variant of attention that is not computed here.
    """
    refused = [name for name in _REFUSED if options.get(name) is not None]
    if refused or attention_mask is not None or not getattr(module, "is_causal", True):
        raise IncompatibleError(
            f"{type(module).__name__} asks for a kind of attention that Burnish does not compute",
            have=", ".join(refused) or "an attention mask or a bidirectional layer",
            want="causal attention without softcapping, sinks, position bias or mask",
            do="train a model of another family",
        )
    scaling = options.get("scaling")
    packing: Attends | None = options.get("packing")
    if packing is None:
        raise IncompatibleError(
            f"{type(module).__name__} does not pass on what its model is told of packed sequences",
            have="attention that is called without the keyword packing",
            want="layers that hand their keywords on, as those of transformers 5 do",
            do="train a model of another family",
        )
    output = packing.attend(
        module,
        query,
        key,
        value,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        options.get("sliding_window"),
    )
    return output, None


AttentionInterface.register(IMPLEMENTATION, attention_forward)


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """How C computed rows, each a node of a tree of prefixes, become A rows of whole sequences, and back."""

    sources: RowMap
    """[A], the computed row that each row of a sequence is."""
    kept: Tensor
    """[C] int64, for each computed row one row of a sequence that it is."""
    others: Tensor
    """[A - C] int64, the rows of sequences whose output nobody takes."""

    @classmethod
    def of(cls, sources: Indices, device: torch.device) -> SharedRows:
        """From the computed row of each row of the sequences; every computed row is in one of them."""
        _, kept = np.unique(sources, return_index=True)
        others = np.setdiff1d(np.arange(len(sources)), kept)
        return cls(RowMap.of(sources, device), on_device(kept, device), on_device(others, device))

    def spread(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Queries, keys and values of the computed rows as rows of sequences.

        A query whose output nobody takes gets no gradient, so only keys and values have sums to make.
        """
        query, *others = rows
        return [
            select_rows(query, self.sources.index, self.kept, None),
            *(self.sources.take(part) for part in others),
        ]

    def collect(self, output: Tensor) -> Tensor:
        """The outputs of the computed rows."""
        return select_rows(output, self.kept, self.sources.index, self.others)


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences of one micro-batch lie. Made once per micro-batch, used by every layer."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, in order."""
    cu_seqlens: Tensor
    """[S + 1] int32 on the device of the tokens: where each sequence starts, and T."""
    max_seqlen: int
    """Length of the longest sequence."""
    shared: SharedRows | None = None
    """Which of their tokens are the same row of queries, keys and values; None: each is its own."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """The layout of sequences of these lengths, for tokens on `device`."""
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
        return cls(tuple(lengths), ends.to(device, non_blocking=True), max(lengths, default=0))

    @classmethod
    def of_tree(
        cls, tree: PrefixTree, lengths: Sequence[int], device: torch.device
    ) -> PackedLayout:
        """The layout of the computed tokens of sequences of these lengths: only the leaves of the tree go through attention."""
        if len(tree.computed) == len(tree.rows):
            return cls.of(lengths, device)
        sequences = np.split(tree.rows, np.cumsum(lengths)[:-1])
        layout = cls.of([lengths[leaf] for leaf in tree.leaves], device)
        sources = np.concatenate([sequences[leaf] for leaf in tree.leaves])
        return replace(layout, shared=SharedRows.of(sources, device))

    @cached_property
    def blocks(self) -> BlockPlan:
        """The blocks of the portable path; made at its first use."""
        return plan_blocks(self.lengths, self.cu_seqlens.device)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See `Attends.attend`: every token sees its own sequence up to itself."""
        window = sliding_window if sliding_window and sliding_window < self.max_seqlen else None
        rows = [part.transpose(1, 2).squeeze(0) for part in (query, key, value)]
        if self.shared is not None:
            rows = self.shared.spread(rows)
        if _has_varlen_kernel(query, value):
            output = self._varlen(rows, scaling, window)
        else:
            output = self.blocks.attend(rows, scaling, window)
        return (output if self.shared is None else self.shared.collect(output))[None]

    def _varlen(self, rows: list[Tensor], scaling: float, window: int | None) -> Tensor:
        query, key, value = rows
        output = varlen_attn(
            query,
            key,
            value,
            self.cu_seqlens,
            self.cu_seqlens,
            self.max_seqlen,
            self.max_seqlen,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(output, Tensor)  # the log-sum-exp comes along only when asked for
        return output


def _has_varlen_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether flash attention over packed sequences can take these queries and values."""
    return (
        query.is_cuda
        and torch.version.cuda is not None
        and _VARLEN_COMPLETE
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and query.shape[-1] == value.shape[-1]
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


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
