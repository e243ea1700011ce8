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
from transformers import AttentionInterface

from burnish.distributed.autograd import uncompiled
from burnish.errors import IncompatibleError
from burnish.models.kernels.blocks import BlockPlan, plan_blocks
from burnish.models.prefixes import PrefixTree
from burnish.models.rows import Indices, RowMap, on_device, select_rows

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
