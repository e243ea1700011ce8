"""Causal attention over packed sequences, as a transformers attention implementation.

A model runs on one row of tokens `[1, T]`, in which sequences lie end to end. The keyword argument
`packing` computes attention: a `PackedLayout` when scoring, a KV cache when generating.

On CUDA, one call of flash attention takes all sequences. Elsewhere, and with a soft cap, similar lengths share a block
[n, L] of a dense kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from burnish.distributed.device import is_sm80_or_newer, uncompiled
from burnish.errors import IncompatibleError
from burnish.models.kernels.scores import cap, weigh
from burnish.models.packing import Indices, PrefixTree, RowMap, on_device, select_rows
from burnish.records import to_device

IMPLEMENTATION = "burnish_packed"
"""The name under which transformers knows this attention (`config._attn_implementation`)."""

# Any other number or tensor among the keyword arguments, such as chosen blocks of keys, is refused.
_UNDERSTOOD = frozenset(
    {"dropout", "scaling", "sliding_window", "position_ids", "softcap", "s_aux"}
)

_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
# torch 2.11 takes fewer key heads than query heads without the keyword.
_varlen_attn = partial(varlen_attn, enable_gqa=True) if _HAS_GQA else varlen_attn


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries `[1, heads, T, head_dim]`, and keys and values `[1, key heads, T, head_dim]`, after positions are applied."""
Mixer = Callable[[Tensor, Any], Tensor]
"""A layer with state: maps hidden states [n, L, H] of n sequences, and a transformers `Cache` or None, to its outputs [n, L, H]."""


class Softmax(NamedTuple):
    """How a layer weighs keys."""

    scaling: float
    """Factor on the products of queries and keys."""
    window: int | None = None
    """A token sees at most this many tokens, itself included; None: all before it."""
    softcap: float | None = None
    """Bound of the scores: softcap · tanh(score / softcap); None: no bound."""
    sinks: Tensor | None = None
    """[heads], one more score of every query, without a key and a value; None: no sinks."""

    @property
    def is_plain(self) -> bool:
        """Return whether torch's kernels can compute it: no sinks, no soft cap."""
        return self.softcap is None and self.sinks is None

    def weights(self, products: Tensor, bias: Tensor) -> Tensor:
        """Turn scaled fp32 products [n, key heads, heads per key head, keys] of one query per row into weights, in place."""
        sinks = self.sinks
        sinks = None if sinks is None else sinks.float().view(*products.shape[1:3], 1)
        weigh(cap(products, self.softcap).add_(bias), sinks)
        return products


class PackedAttention(Protocol):
    """Computes what passes between tokens: attention and states."""

    def attend(self, layer: int, parts: Heads, softmax: Softmax) -> Tensor:
        """Return the attention output `[1, T, heads, head_dim]`, contiguous."""

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Return a mixer's outputs for hidden states, both `[1, T, H]`."""


@uncompiled
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Call `options["packing"]`. Not compiled, because it depends on the lengths.

    Raises `IncompatibleError` for masks, bidirectional layers and unknown numbers or tensors.
    """
    refused = [
        name
        for name, value in options.items()
        if name not in _UNDERSTOOD and isinstance(value, float | Tensor)
    ]
    if refused or attention_mask is not None or not getattr(module, "is_causal", True):
        raise IncompatibleError(
            f"{type(module).__name__} needs a kind of attention that Burnish does not compute",
            have=", ".join(refused) or "an attention mask or a bidirectional layer",
            want="causal attention to all keys or a window, without position bias or mask",
            do="train a model of another family",
        )
    packing: PackedAttention | None = options.get("packing")
    if packing is None:
        raise IncompatibleError(
            f"{type(module).__name__} is called without the keyword packing, so it does not know where sequences begin",
            want="layers that pass keyword arguments on, as those of transformers 5 do",
            do="train a model of another family",
        )
    scaling = options.get("scaling")
    layer = int(getattr(module, "layer_idx", -1))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Qwen2-MoE's layers know their window, and leave it to the mask.
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    softcap = options.get("softcap")
    softmax = Softmax(scaling, window, softcap and float(softcap), options.get("s_aux"))
    return packing.attend(layer, (query, key, value), softmax), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)


@dataclass(frozen=True, slots=True, eq=False)
class _SharedRows:
    """Maps C computed rows to the A rows of whole sequences."""

    own: tuple[int, ...]
    """How many of each sequence's last rows are computed rows, which lie in the order of sequences."""
    cu_own: Tensor
    """[S + 1] int32: where the computed rows of each sequence start, and C."""
    sources: RowMap
    """[A], the computed row that stands for each sequence row."""


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences of one micro-batch lie."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, in order."""
    cu_seqlens: Tensor
    """[S + 1] int32 on the device of the tokens: where each sequence starts, and T."""
    max_seqlen: int
    """Length of the longest sequence."""
    shared: _SharedRows | None = None
    """The map from computed rows to sequence rows; None: they are the same."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """Lay out sequences of these lengths."""
        cu_seqlens = to_device(_cumulated(lengths), device)
        return cls(tuple(lengths), cu_seqlens, max(lengths, default=0))

    @classmethod
    def of_tree(
        cls, tree: PrefixTree, lengths: Sequence[int], device: torch.device
    ) -> PackedLayout:
        """Lay out sequences that share rows. Those without rows of their own are left out. See `RowMap.of`."""
        host = torch.device("cpu")
        if len(tree.computed) == len(tree.rows):
            return cls.of(lengths, host)
        sequences = np.split(tree.rows, np.cumsum(lengths)[:-1])
        kept = [number for number, own in enumerate(tree.own) if own]
        layout = cls.of([lengths[number] for number in kept], host)
        sources = np.concatenate([sequences[number] for number in kept])
        own = [tree.own[number] for number in kept]
        shared = _SharedRows(tuple(own), _cumulated(own), RowMap.of(sources, device))
        return replace(layout, shared=shared)

    @property
    def own(self) -> tuple[int, ...]:
        """How many of each sequence's last tokens are computed for it."""
        return self.lengths if self.shared is None else self.shared.own

    @property
    def begun(self) -> tuple[int, ...]:
        """How many of each sequence's first tokens are computed for another one; empty if no rows are shared."""
        pairs = zip(self.lengths, self.own, strict=True)
        return () if self.shared is None else tuple(length - own for length, own in pairs)

    @cached_property
    def whole(self) -> BlockPlan:
        """The blocks of whole sequences."""
        return BlockPlan.of(self.lengths, self.cu_seqlens.device)

    @cached_property
    def blocks(self) -> BlockPlan:
        """The blocks of the dense path."""
        if self.shared is None:
            return self.whole
        return BlockPlan.of(self.lengths, self.cu_seqlens.device, self.own)

    def attend(self, layer: int, parts: Heads, softmax: Softmax) -> Tensor:
        """See `PackedAttention.attend`."""
        if not softmax.window or softmax.window >= self.max_seqlen:
            softmax = softmax._replace(window=None)
        rows = [part.transpose(1, 2).squeeze(0) for part in parts]
        if self.shared is not None:
            rows[1:] = [self.shared.sources.take(part) for part in rows[1:]]
        if softmax.softcap is None and has_varlen_kernel(parts[0], parts[2]):
            return self._varlen(rows, softmax)[None]
        return self.blocks.attend(rows, softmax)[None]

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """See `PackedAttention.mix`. Each sequence computes a common beginning again."""
        rows = hidden[0] if self.shared is None else self.shared.sources.take(hidden[0])
        output = self.whole.computed(rows, lambda part: mixer(part, None))
        if self.shared is not None:
            parts = chain.from_iterable(zip(self.begun, self.own, strict=True))
            output = torch.cat(torch.split(output, [*parts])[1::2])
        return output[None]

    def _varlen(self, rows: list[Tensor], softmax: Softmax) -> Tensor:
        query, key, value = rows
        scaling, window, _, sinks = softmax
        # The last query of a sequence sees its last key, and each one before it a key less.
        cu_own = self.cu_seqlens if self.shared is None else self.shared.cu_own
        sequences = cu_own, self.cu_seqlens, max(self.own, default=0), self.max_seqlen
        if sinks is not None:
            from burnish.models.kernels.sink_attention import sink_attention

            return sink_attention(query, key, value, sinks, *sequences, scaling, window)[0]
        sees = (-1 if window is None else window - 1, 0)
        output = _varlen_attn(query, key, value, *sequences, scale=scaling, window_size=sees)
        assert isinstance(output, Tensor)  # a tuple only if log-sum-exps are requested
        return output


def _cumulated(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


def has_varlen_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether torch has a kernel for sequences of any length with such heads."""
    return (
        is_sm80_or_newer(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and query.shape[-1] == value.shape[-1]
    )


@dataclass(frozen=True, slots=True, eq=False)
class _BlockRows:
    """Maps T packed rows to R rows of blocks, and back. Padding repeats a sequence's last row."""

    sizes: tuple[tuple[int, int], ...]
    """Number of sequences, and rows of each, in every block."""
    gather: Tensor | None
    """[R] int64, the packed row of each block row; None: packed rows are block rows."""
    scatter: Tensor | None
    """[T] int64, the block row of each packed row; None with `gather`."""
    padding: Tensor | None
    """[R - T] int64, the block rows that pad; None: there are none."""

    @classmethod
    def of(cls, lengths: Indices, blocks: Sequence[Indices], device: torch.device) -> _BlockRows:
        """Lay out the sequences of each block, side by side."""
        starts = lengths.cumsum() - lengths
        sizes = []
        rows = [np.empty(0, np.int64)]
        real = [np.empty(0, np.bool)]
        for members in blocks:
            own = lengths[members, None]
            steps = np.arange(own.max())
            sizes.append((len(members), len(steps)))
            rows.append((starts[members, None] + np.minimum(steps, own - 1)).ravel())
            real.append((steps < own).ravel())
        gather = np.concatenate(rows)
        is_real = np.concatenate(real)
        if is_real.all() and (np.diff(gather) == 1).all():
            return cls(tuple(sizes), None, None, None)
        scatter = np.flatnonzero(is_real)[np.argsort(gather[is_real])]
        padding = None if is_real.all() else on_device(np.flatnonzero(~is_real), device)
        return cls(tuple(sizes), on_device(gather, device), on_device(scatter, device), padding)

    def cut(self, rows: Tensor) -> list[Tensor]:
        """Return the blocks [n, L, ...] of rows [T, ...]."""
        if self.gather is not None and self.scatter is not None:
            rows = select_rows(rows, self.gather, self.scatter, None)
        totals = [count * length for count, length in self.sizes]
        parts = (rows,) if len(totals) == 1 else torch.split(rows, totals)
        return [
            part.view(*size, *rows.shape[1:]) for part, size in zip(parts, self.sizes, strict=True)
        ]

    def joined(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the rows [T, ...] of blocks [n, L, ...]."""
        parts = [block.flatten(0, 1) for block in blocks]
        rows = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
        if self.gather is None or self.scatter is None:
            return rows
        return select_rows(rows, self.scatter, self.gather, self.padding)


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlan:
    """Divides packed sequences into blocks of like lengths, one call of a dense function each."""

    queries: _BlockRows
    """The rows that are computed."""
    keys: _BlockRows
    """The rows of whole sequences."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], device: torch.device, own: Sequence[int] | None = None
    ) -> BlockPlan:
        """Group sequences by length, longest first; each is padded by at most an eighth, or 15 rows.

        If only the last `own` rows of each sequence are computed, a block's sequences have equally many others.
        """
        numbers = np.asarray(lengths, np.int64)
        computed = numbers if own is None else np.asarray(own, np.int64)
        others = numbers - computed
        kinds = np.stack((_rounded_up(computed), others))
        blocks = [
            np.flatnonzero((kinds == kind[:, None]).all(0))
            for kind in np.unique(kinds[:, computed > 0], axis=1).T[::-1]
        ]
        queries = _BlockRows.of(computed, blocks, device)
        return cls(queries, queries if own is None else _BlockRows.of(numbers, blocks, device))

    def attend(self, rows: Sequence[Tensor], softmax: Softmax) -> Tensor:
        """Return attention [C, heads, head_dim] of queries [C, heads, head_dim], and keys and values [T, heads, head_dim]."""
        query, key, value = rows
        cut = self.queries.cut(query), self.keys.cut(key), self.keys.cut(value)
        outputs = []
        for parts in zip(*cut, strict=True):
            dense = [part.transpose(1, 2) for part in parts]
            outputs.append(_causal(dense, softmax).transpose(1, 2))
        return self.queries.joined(outputs)

    def computed(self, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a causal `function` of blocks [n, L, ...] to rows [T, ...] of whole sequences."""
        return self.keys.joined([function(block) for block in self.keys.cut(rows)])


def _rounded_up(lengths: Indices) -> Indices:
    powers = 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    steps = np.maximum(16, powers // 16)
    return -(-lengths // steps) * steps


def _causal(dense: Sequence[Tensor], softmax: Softmax) -> Tensor:
    """Return attention of the last queries [n, heads, Q, d] of sequences of K keys."""
    query, key, value = dense
    scaling, window, softcap, sinks = softmax
    length = key.shape[2]
    begun = length - query.shape[2]
    window = length if window is None else min(window, length)
    gqa = query.shape[1] != key.shape[1]
    is_half = query.device.type == "cpu" and query.dtype == torch.bfloat16
    if is_half or not softmax.is_plain:
        from burnish.models.kernels.span_attention import causal_attention

        return causal_attention(query, key, value, scaling, window, softcap, sinks)
    if gqa and query.device.type != "cpu" and query.dtype == torch.float32:
        # With grouped heads in fp32, CUDA has no kernel but the one that holds all scores.
        times = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
        gqa = False
    if not begun and window == length:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa
        )
    outputs = []
    for start in range(begun, length, window):  # as many queries at a time as a query sees keys
        stop = min(start + window, length)
        first = max(0, start - window + 1)
        queries = torch.arange(start, stop, device=query.device)[:, None]
        distance = queries - torch.arange(first, stop, device=query.device)[None, :]
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start - begun : stop - begun],
                key[:, :, first:stop],
                value[:, :, first:stop],
                attn_mask=(distance >= 0) & (distance < window),
                scale=scaling,
                enable_gqa=gqa,
            )
        )
    return torch.cat(outputs, dim=2)
