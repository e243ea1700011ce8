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
from burnish.models.packing import Indices, PrefixTree, RowMap, host_tensor, on_device, select_rows
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
    """Maps C computed rows to the A rows of whole sequences, and back."""

    sources: RowMap
    """[A], the computed row that stands for each sequence row."""
    first: Tensor
    """[C] int64, the sequence row from which each computed row's output is taken."""
    others: Tensor
    """[A - C] int64, all other sequence rows."""

    @classmethod
    def of(cls, sources: Indices, device: torch.device) -> _SharedRows:
        """Plan from `sources` [A], the computed row of each sequence row. See `RowMap.of`."""
        _, first = np.unique(sources, return_index=True)
        others = np.setdiff1d(np.arange(len(sources)), first)
        return cls(RowMap.of(sources, device), host_tensor(first), host_tensor(others))

    def spread(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the rows of whole sequences. Gradients of keys and values add up."""
        query = select_rows(query, self.sources.index, self.first, None)
        return [query, self.sources.take(key), self.sources.take(value)]

    def collect(self, output: Tensor) -> Tensor:
        """Return the outputs of the computed rows."""
        return select_rows(output, self.first, self.sources.index, self.others)


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
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
        return cls(tuple(lengths), to_device(ends, device), max(lengths, default=0))

    @classmethod
    def of_tree(
        cls, tree: PrefixTree, lengths: Sequence[int], device: torch.device
    ) -> PackedLayout:
        """Lay out sequences that share rows. Only leaves of the tree go through attention. See `RowMap.of`."""
        host = torch.device("cpu")
        if len(tree.computed) == len(tree.rows):
            return cls.of(lengths, host)
        sequences = np.split(tree.rows, np.cumsum(lengths)[:-1])
        layout = cls.of([lengths[leaf] for leaf in tree.leaves], host)
        sources = np.concatenate([sequences[leaf] for leaf in tree.leaves])
        return replace(layout, shared=_SharedRows.of(sources, device))

    @cached_property
    def blocks(self) -> BlockPlan:
        """The blocks of the dense path."""
        return BlockPlan.of(self.lengths, self.cu_seqlens.device)

    def attend(self, layer: int, parts: Heads, softmax: Softmax) -> Tensor:
        """See `PackedAttention.attend`."""
        if not softmax.window or softmax.window >= self.max_seqlen:
            softmax = softmax._replace(window=None)
        rows = [part.transpose(1, 2).squeeze(0) for part in parts]
        if self.shared is not None:
            rows = self.shared.spread(*rows)
        if softmax.softcap is None and has_varlen_kernel(parts[0], parts[2]):
            output = self._varlen(rows, softmax)
        else:
            output = self.blocks.attend(rows, softmax)
        return (output if self.shared is None else self.shared.collect(output))[None]

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """See `PackedAttention.mix`. Each sequence computes a common beginning again."""
        rows = hidden[0] if self.shared is None else self.shared.sources.take(hidden[0])
        output = self.blocks.computed([rows], lambda parts: mixer(parts[0], None))
        return (output if self.shared is None else self.shared.collect(output))[None]

    def _varlen(self, rows: list[Tensor], softmax: Softmax) -> Tensor:
        query, key, value = rows
        scaling, window, _, sinks = softmax
        if sinks is not None:
            from burnish.models.kernels.sink_attention import sink_attention

            how = (sinks, self.cu_seqlens, self.max_seqlen, scaling, window)
            return sink_attention(*rows, *how)[0]
        output = _varlen_attn(
            query,
            key,
            value,
            self.cu_seqlens,
            self.cu_seqlens,
            self.max_seqlen,
            self.max_seqlen,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
        )
        assert isinstance(output, Tensor)  # a tuple only if log-sum-exps are requested
        return output


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
class BlockPlan:
    """Maps T packed rows to R rows of blocks, and back. Padding repeats a sequence's last row."""

    blocks: tuple[tuple[int, int], ...]
    """Number of sequences and rows per sequence of each dense call, in the order of their rows."""
    gather: Tensor | None
    """[R] int64, the packed row of each block row; None: packed rows are block rows."""
    scatter: Tensor | None
    """[T] int64, the block row of each packed row; None with `gather`."""
    padding: Tensor | None
    """[R - T] int64, the block rows that pad; None: there are none."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> BlockPlan:
        """Group sequences by length, longest first; each is padded by at most an eighth, or 15 rows."""
        numbers = np.asarray(lengths, np.int64)
        starts = numbers.cumsum() - numbers
        kinds = _rounded_up(numbers)
        blocks = []
        rows = [np.empty(0, np.int64)]
        real = [np.empty(0, np.bool)]
        for kind in np.unique(kinds[kinds > 0])[::-1]:
            members = np.flatnonzero(kinds == kind)
            own = numbers[members, None]
            steps = np.arange(own.max())
            blocks.append((len(members), len(steps)))
            rows.append((starts[members, None] + np.minimum(steps, own - 1)).ravel())
            real.append((steps < own).ravel())
        gather = np.concatenate(rows)
        is_real = np.concatenate(real)
        if is_real.all() and (np.diff(gather) == 1).all():
            return cls(tuple(blocks), None, None, None)
        scatter = np.flatnonzero(is_real)[np.argsort(gather[is_real])]
        padding = None if is_real.all() else on_device(np.flatnonzero(~is_real), device)
        return cls(tuple(blocks), on_device(gather, device), on_device(scatter, device), padding)

    def attend(self, rows: Sequence[Tensor], softmax: Softmax) -> Tensor:
        """Return attention of queries, keys and values, all [T, heads, head_dim]."""

        def attended(parts: list[Tensor]) -> Tensor:
            dense = [part.transpose(1, 2) for part in parts]
            return _causal(dense, softmax).transpose(1, 2)

        return self.computed(rows, attended)

    def computed(
        self, rows: Sequence[Tensor], function: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        """Apply a causal `function` of blocks [n, L, ...] to rows [T, ...]."""
        if self.gather is not None and self.scatter is not None:
            rows = [select_rows(part, self.gather, self.scatter, None) for part in rows]
        sizes = [count * length for count, length in self.blocks]
        cut = [(part,) if len(sizes) == 1 else torch.split(part, sizes) for part in rows]
        outputs = []
        for (count, length), *parts in zip(self.blocks, *cut, strict=True):
            dense = [part.view(count, length, *part.shape[1:]) for part in parts]
            outputs.append(function(dense).flatten(0, 1))
        output = outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs)
        if self.gather is None or self.scatter is None:
            return output
        return select_rows(output, self.scatter, self.gather, self.padding)


def _rounded_up(lengths: Indices) -> Indices:
    powers = 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    steps = np.maximum(16, powers // 16)
    return -(-lengths // steps) * steps


def _causal(dense: Sequence[Tensor], softmax: Softmax) -> Tensor:
    query, key, value = dense
    scaling, window, softcap, sinks = softmax
    length = query.shape[2]
    gqa = query.shape[1] != key.shape[1]
    is_half = query.device.type == "cpu" and query.dtype == torch.bfloat16
    if is_half or not softmax.is_plain:
        from burnish.models.kernels.span_attention import causal_attention

        return causal_attention(query, key, value, scaling, window or length, softcap, sinks)
    if gqa and query.device.type != "cpu" and query.dtype == torch.float32:
        # With grouped heads in fp32, CUDA has no kernel but the one that holds all scores.
        times = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
        gqa = False
    if window is None or window >= length:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa
        )
    outputs = []
    for start in range(0, length, window):  # as many queries at a time as a query sees keys
        stop = min(start + window, length)
        first = max(0, start - window + 1)
        queries = torch.arange(start, stop, device=query.device)[:, None]
        distance = queries - torch.arange(first, stop, device=query.device)[None, :]
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, first:stop],
                value[:, :, first:stop],
                attn_mask=(distance >= 0) & (distance < window),
                scale=scaling,
                enable_gqa=gqa,
            )
        )
    return torch.cat(outputs, dim=2)
