"""Keys and values of what has been read so far, in slots: one row per running completion.

What travels as `packing` through the model (`burnish.models.kernels.attention.Attends`) is a `PromptCache`, which
reads several packed prompts at once and keeps their keys and values, and then a step of a `Cache`, in which every
row appends one token. `SlotCache` holds a copy of a prompt in each row that continues it. Rows grow together, by
an eighth or more at a time. Left out: pages; rows that share their prompt (`burnish.rollout.builtin.shared_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from burnish.errors import IncompatibleError
from burnish.models.kernels.attention import Attends, PackedLayout

_GRAIN = 128
"""Rows grow by at least so many tokens."""
_SPAN_GRAIN = 8
"""Attention runs over a multiple of so many positions, which kernels want of a mask."""


class PromptCache:
    """Packed prompts being read, then the keys and values they left in every layer."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._layout = PackedLayout.of(lengths, device)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See `Attends.attend`: every token sees its own prompt up to itself."""
        index = int(module.layer_idx)  # type: ignore[arg-type]
        if index in self.keys:
            raise IncompatibleError(
                f"{type(module).__name__} attends twice in one layer",
                have=f"a second call in layer {index}",
                want="keys and values once for each layer",
                do="train a model of another family",
            )
        # Copies, for views would keep the queries beside them alive.
        self.keys[index] = key[0].contiguous()
        self.values[index] = value[0].contiguous()
        return self._layout.attend(module, query, key, value, scaling, sliding_window)

    def rows(self, prompts: Sequence[int]) -> Tensor:
        """Where each of the prompts lies among the packed tokens: [n, longest], the last token repeated."""
        lengths = torch.tensor([self.lengths[prompt] for prompt in prompts])
        starts = torch.tensor([0, *self.lengths]).cumsum(0)[torch.tensor(prompts)]
        columns = torch.arange(int(lengths.max()))
        return starts[:, None] + columns.minimum(lengths[:, None] - 1)


class Cache(Protocol):
    """Keys and values of completions in slots, and of what they continue."""

    def place(self, rows: Tensor, prompts: PromptCache, which: Sequence[int]) -> None:
        """Start row `rows[i]` with prompt `which[i]`."""

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows over others; none is in both."""

    def step(self, positions: Tensor, span: int) -> Attends:
        """One decoding step of the first n rows, whose latest tokens are at `positions` [n], all below `span`.

        No other row goes on.
        """


class SlotCache:
    """A `Cache` of `slots` completions, one row each, in the model's dtype: `[slots, capacity, kv_heads, head_dim]` per layer."""

    def __init__(self, slots: int, longest: int) -> None:
        """`longest` is the most tokens a row will ever hold; memory comes as rows need it."""
        self._slots = slots
        self._longest = longest
        self._capacity = 0
        self._layers: dict[int, list[Tensor]] = {}

    def place(self, rows: Tensor, prompts: PromptCache, which: Sequence[int]) -> None:
        """See `Cache.place`."""
        source = prompts.rows(which).to(rows.device, non_blocking=True)
        length = source.shape[1]
        self._add_layers(prompts)
        self._reserve(length)
        for layer, held in self._layers.items():
            for mine, theirs in zip(
                held, (prompts.keys[layer], prompts.values[layer]), strict=True
            ):
                mine[:, :length].index_copy_(0, rows, theirs.transpose(0, 1)[source])

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """See `Cache.move`."""
        for held in self._layers.values():
            for mine in held:
                mine.index_copy_(0, targets, mine.index_select(0, sources))

    def _reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens."""
        if length <= self._capacity:
            return
        old = self._capacity
        self._capacity = _rounded(grown(old, length, self._longest))
        for held in self._layers.values():
            for part, mine in enumerate(held):
                held[part] = mine.new_zeros(len(mine), self._capacity, *mine.shape[2:])
                held[part][:, :old] = mine

    def step(self, positions: Tensor, span: int) -> DecodeStep:
        """See `Cache.step`."""
        self._reserve(span)
        return DecodeStep(self._layers, positions, min(_rounded(span), self._capacity))

    def _add_layers(self, prompts: PromptCache) -> None:
        for layer, key in prompts.keys.items():
            if layer not in self._layers:
                self._layers[layer] = [
                    part.new_zeros(self._slots, self._capacity, part.shape[0], part.shape[2])
                    for part in (key, prompts.values[layer])
                ]


class DecodeStep:
    """One token for each of the first n rows of a `SlotCache`; an `Attends`."""

    def __init__(self, layers: dict[int, list[Tensor]], positions: Tensor, span: int) -> None:
        self._layers = layers
        self._positions = positions
        self._rows = torch.arange(len(positions), device=positions.device)
        self._span = span
        self._biases: dict[int | None, Tensor] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See `Attends.attend`: token i joins row i and sees that row up to itself."""
        rows = len(self._positions)
        held = self._layers[int(module.layer_idx)]  # type: ignore[arg-type]
        for mine, latest in zip(held, (key, value), strict=True):
            mine[self._rows, self._positions] = latest[0].transpose(0, 1)
        keys, values = (mine[:rows, : self._span].transpose(1, 2) for mine in held)
        bias = self._bias(sliding_window, keys.dtype)
        output = _attend_one(query[0].transpose(0, 1), keys, values, bias, scaling)
        return output.flatten(1, 2)[None]

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[n, 1, 1, span]: 0 where the row's token sees the position, -inf where not."""
        if window not in self._biases:
            columns = torch.arange(self._span, device=self._positions.device)
            distance = self._positions[:, None] - columns
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._biases[window] = bias.masked_fill_(hidden, -torch.inf)[:, None, None]
        return self._biases[window]


def _attend_one(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float
) -> Tensor:
    """Attention of one token per row, `[n, heads, head_dim]`, as `[n, kv_heads, heads per key head, head_dim]`.

    A CPU is fastest with one query per head. Elsewhere the kernels that take a bias want as many key
    heads as query heads, so the heads that share keys become the queries of one call.
    """
    grouped = query.view(len(query), keys.shape[1], -1, query.shape[-1])
    if query.device.type != "cpu":
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling)
    output = scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=bias, scale=scaling, enable_gqa=True
    )
    return output.view(grouped.shape)


def grown(capacity: int, length: int, longest: int) -> int:
    """How many tokens rows of `capacity` get room for when they need `length`: an eighth more than they have, up to `longest`."""
    return max(length, min(capacity + max(_GRAIN, capacity // 8), longest))


def _rounded(length: int) -> int:
    return -(-length // _SPAN_GRAIN) * _SPAN_GRAIN
