"""The KV cache: keys and values of prompts and completions, one slot per running completion.

`PromptCache` reads packed prompts and keeps their keys and values. Each decoding step then appends one token to every row of a
`Cache`. `SlotCache` copies the prompt into each row. `SharedCache` stores each prompt once, for CPUs without matrix units:

    softmax([Q Kp', Q Ko']) = [Wp, Wo],   output = Wp Vp + Wo Vo

Kp and Vp are the prompt's, and all its completions read them in one product. Ko and Vo are the completion's own. Decoding
waits for memory, so reading a prompt once is what saves time. Rows grow together. Left out: pages, and prefixes that prompts share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from burnish.errors import IncompatibleError
from burnish.models.kernels.attention import Attends, PackedLayout

_GRAIN = 128
"""Rows grow by at least this many tokens."""
_SPAN_GRAIN = 8
"""Masks span a multiple of this many positions, as kernels require."""


class PromptCache:
    """Keys and values of packed prompts, filled while the model reads them."""

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
        """Attend causally within each prompt and keep its keys and values; see `Attends.attend`."""
        index = int(module.layer_idx)  # type: ignore[arg-type]
        if index in self.keys:
            raise IncompatibleError(
                f"{type(module).__name__} attends twice in one layer",
                have=f"a second call in layer {index}",
                want="keys and values once for each layer",
                do="train a model of another family",
            )
        # Copies: views would keep the queries beside them alive.
        self.keys[index] = key[0].contiguous()
        self.values[index] = value[0].contiguous()
        return self._layout.attend(module, query, key, value, scaling, sliding_window)

    def rows(self, prompts: Sequence[int]) -> Tensor:
        """Return the packed positions [n, longest] of these prompts; shorter ones repeat their last token."""
        lengths = torch.tensor([self.lengths[prompt] for prompt in prompts])
        starts = torch.tensor([0, *self.lengths]).cumsum(0)[torch.tensor(prompts)]
        columns = torch.arange(int(lengths.max()))
        return starts[:, None] + columns.minimum(lengths[:, None] - 1)


class Cache(Protocol):
    """Keys and values of completions in slots, and of their prompts."""

    def place(self, rows: Tensor, prompts: PromptCache, which: Sequence[int]) -> None:
        """Start row `rows[i]` with prompt `which[i]`."""

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows `sources` over rows `targets`; no row is in both."""

    def step(self, positions: Tensor, span: int) -> Attends:
        """Begin a decoding step of the first n rows and end all others.

        The latest tokens are at `positions` [n], all below `span`.
        """


class SlotCache:
    """One row per completion, in the model's dtype: `[slots, capacity, kv_heads, head_dim]` per layer."""

    def __init__(self, slots: int, longest: int) -> None:
        """Allocate nothing yet; `longest` is the most tokens that a row will hold, prompt included."""
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
        if length <= self._capacity:
            return
        old = self._capacity
        self._capacity = _rounded(_grown(old, length, self._longest))
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
    """One decoding step of a `SlotCache`; an `Attends`."""

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
        """Append token i to row i and attend to that row; see `Attends.attend`."""
        rows = len(self._positions)
        held = self._layers[int(module.layer_idx)]  # type: ignore[arg-type]
        for mine, latest in zip(held, (key, value), strict=True):
            mine[self._rows, self._positions] = latest[0].transpose(0, 1)
        keys, values = (mine[:rows, : self._span].transpose(1, 2) for mine in held)
        bias = self._bias(sliding_window, keys.dtype)
        output = _attend_one(query[0].transpose(0, 1), keys, values, bias, scaling)
        return output.flatten(1, 2)[None]

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the mask [n, 1, 1, span]: 0 for visible positions, -inf for others."""
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
    """Attend with one token per row: [n, heads, head_dim] to [n, kv_heads, heads per key head, head_dim].

    CPUs are fastest with one query per head. Other devices' kernels with a bias need as many key heads as query heads,
    so the heads that share keys become the queries of one call.
    """
    grouped = query.view(len(query), keys.shape[1], -1, query.shape[-1])
    if query.device.type != "cpu":
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling)
    output = scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=bias, scale=scaling, enable_gqa=True
    )
    return output.view(grouped.shape)


def _grown(capacity: int, length: int, longest: int) -> int:
    """Return the new capacity of rows that need `length` tokens: an eighth more, up to `longest`."""
    return max(length, min(capacity + max(_GRAIN, capacity // 8), longest))


def _rounded(length: int) -> int:
    return -(-length // _SPAN_GRAIN) * _SPAN_GRAIN


class SharedCache:
    """Completions in slots that refer to one stored copy of their prompt; products and memory are fp32."""

    def __init__(self, slots: int, longest: int) -> None:
        """Allocate nothing yet; `longest` is the most tokens of a completion."""
        self._prompts, self._own = _Store(0), _Store(slots)
        self._longest = longest
        self._held: list[tuple[ReferenceType[PromptCache], int] | None] = [None] * slots
        self._prompt_of: list[int | None] = [None] * slots
        self._lengths = torch.zeros(slots, dtype=torch.int64)
        self._groups: _Groups | None = None

    def place(self, rows: Tensor, prompts: PromptCache, which: Sequence[int]) -> None:
        """See `Cache.place`."""
        mine = rows.tolist()
        for row in mine:
            self._prompt_of[row] = None
        used = {place for place in self._prompt_of if place is not None}
        places = {
            index: place for place in used if (index := self._index(place, prompts)) is not None
        }
        free = (place for place in range(len(self._held)) if place not in used)
        fresh = [index for index in dict.fromkeys(which) if index not in places]
        places |= zip(fresh, free, strict=False)
        for row, index in zip(mine, which, strict=True):
            self._prompt_of[row] = places[index]
        self._lengths[rows] = torch.tensor([prompts.lengths[index] for index in which])
        if fresh:
            self._read(prompts, fresh, [places[index] for index in fresh])
        self._groups = None

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """See `Cache.move`."""
        self._own.move(sources, targets)
        self._lengths[targets] = self._lengths[sources]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._prompt_of[target] = self._prompt_of[source]
        self._groups = None

    def step(self, positions: Tensor, span: int) -> SharedStep:
        """See `Cache.step`."""
        running = len(positions)
        if self._groups is None or self._groups.running != running:
            self._groups = self._grouped(running)
        lengths = self._lengths[:running]
        own = positions - lengths
        own_span = int(own.max()) + 1
        self._own.reserve(running, own_span, self._longest)
        return SharedStep(self._prompts, self._own, self._groups, lengths, own, own_span)

    def _index(self, place: int, prompts: PromptCache) -> int | None:
        """Return the index among `prompts` of the prompt stored at `place`, if it is one of them."""
        held = self._held[place]
        return held[1] if held is not None and held[0]() is prompts else None

    def _read(self, prompts: PromptCache, which: list[int], places: list[int]) -> None:
        source, target = prompts.rows(which), torch.tensor(places)
        length = source.shape[1]
        for place, index in zip(places, which, strict=True):
            self._held[place] = ref(prompts), index
        for layer, key in prompts.keys.items():
            self._prompts.add_layer(layer, key)
            self._own.add_layer(layer, key)
        self._prompts.reserve(max(places) + 1, length, length)
        for layer, held in self._prompts.layers.items():
            read = prompts.keys[layer], prompts.values[layer]
            for mine, theirs in zip(held, read, strict=True):
                mine[target, :, :length] = theirs[:, source].transpose(0, 1).float()

    def _grouped(self, running: int) -> _Groups:
        """Close the gaps between stored prompts, and group the first rows by prompt."""
        self._prompt_of[running:] = [None] * (len(self._prompt_of) - running)
        live = sorted({place for place in self._prompt_of if place is not None})
        late = [place for place in live if place >= len(live)]
        gaps = [place for place in range(len(live)) if place not in live]
        if late:
            self._prompts.move(torch.tensor(late), torch.tensor(gaps))
        now = dict(zip(late, gaps, strict=True))
        for source, target in now.items():
            self._held[target] = self._held[source]
        rows: list[list[int]] = [[] for _ in live]
        for row, place in enumerate(self._prompt_of[:running]):
            if place is not None:
                self._prompt_of[row] = now.get(place, place)
                rows[now.get(place, place)].append(row)
        return _Groups.of(rows, running, int(self._lengths[:running].max()))


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Running completions grouped by prompt: P prompts with at most m completions each."""

    running: int
    """Number of completions."""
    prompts: int
    """P."""
    rows: Tensor
    """Row of each completion [P · m], padded with the prompt's first row."""
    places: Tensor
    """Index into `rows` of each running row [running]."""
    longest: int
    """Tokens of the longest prompt."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], running: int, longest: int) -> _Groups:
        most = max(map(len, rows))
        padded = [[*each, *[each[0]] * (most - len(each))] for each in rows]
        places = torch.empty(running, dtype=torch.int64)
        for prompt, each in enumerate(rows):
            places[list(each)] = torch.arange(len(each)) + prompt * most
        return cls(running, len(rows), torch.tensor(padded).flatten(), places, longest)

    def together(self, by_row: Tensor) -> Tensor:
        """Reshape [running, kv_heads, g, n] to [P · kv_heads, m · g, n]."""
        _, heads, shared, last = by_row.shape
        grouped = by_row.index_select(0, self.rows).view(self.prompts, -1, heads, shared, last)
        return grouped.transpose(1, 2).reshape(self.prompts * heads, -1, last)

    def apart(self, by_prompt: Tensor, like: Tensor) -> Tensor:
        """Undo `together`; `like` gives kv_heads and g."""
        _, heads, shared, _ = like.shape
        grouped = by_prompt.view(self.prompts, heads, -1, shared, by_prompt.shape[-1])
        return grouped.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


class _Store:
    """Keys and values of some rows in every layer: `[rows, kv_heads, capacity, head_dim]` fp32."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.layers: dict[int, list[Tensor]] = {}

    def add_layer(self, layer: int, like: Tensor) -> None:
        """Add an empty layer whose keys are shaped as `like` [kv_heads, T, head_dim]."""
        if layer not in self.layers:
            heads, _, width = like.shape
            self.layers[layer] = [torch.empty(self._rows, heads, 0, width) for _ in range(2)]

    def reserve(self, rows: int, length: int, longest: int) -> None:
        """Make room for `rows` rows of `length` tokens; grow ahead, up to `longest`."""
        for held in self.layers.values():
            for part, mine in enumerate(held):
                old_rows, heads, old, width = mine.shape
                if rows <= old_rows and length <= old:
                    continue
                room = max(old, _grown(old, length, longest))
                # Zeros: masked positions are still multiplied by a weight of 0.
                held[part] = mine.new_zeros(max(rows, old_rows), heads, room, width)
                held[part][:old_rows, :, :old] = mine

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows `sources` over rows `targets`; no row is in both."""
        for held in self.layers.values():
            for mine in held:
                mine.index_copy_(0, targets, mine.index_select(0, sources))


class SharedStep:
    """One decoding step of a `SharedCache`; an `Attends`."""

    def __init__(
        self,
        prompts: _Store,
        own: _Store,
        groups: _Groups,
        lengths: Tensor,
        positions: Tensor,
        span: int,
    ) -> None:
        """Take the `lengths` [n] of the rows' prompts, and the `positions` [n] of their latest tokens after the prompt, below `span`."""
        self._prompts, self._own, self._groups = prompts.layers, own.layers, groups
        self._lengths, self._positions = lengths, positions
        self._rows = torch.arange(len(positions))
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
        """Append token i to row i and attend to its prompt and that row; see `Attends.attend`."""
        layer, groups = int(module.layer_idx), self._groups  # type: ignore[arg-type]
        for mine, latest in zip(self._own[layer], (key, value), strict=True):
            mine[self._rows, :, self._positions] = latest[0].transpose(0, 1).to(mine.dtype)
        shared = [
            part[: groups.prompts, :, : groups.longest].flatten(0, 1)
            for part in self._prompts[layer]
        ]
        own = [part[: groups.running, :, : self._span].flatten(0, 1) for part in self._own[layer]]
        kv_heads = key.shape[1]
        heads = query[0].transpose(0, 1).float() * scaling
        heads = heads.reshape(len(heads), kv_heads, -1, query.shape[-1])
        of_prompt = groups.apart(torch.bmm(groups.together(heads), shared[0].mT), heads)
        of_own = torch.bmm(heads.flatten(0, 1), own[0].mT).view(*heads.shape[:3], -1)
        scores = torch.cat((of_prompt, of_own), dim=-1).add_(self._bias(sliding_window))
        weights = scores.softmax(dim=-1)
        on_prompt, on_own = weights.tensor_split([groups.longest], dim=-1)
        output = groups.apart(torch.bmm(groups.together(on_prompt), shared[1]), heads)
        output = output.flatten(0, 1).baddbmm_(on_own.flatten(0, 1), own[1])
        return output.view(1, groups.running, -1, query.shape[-1]).to(query.dtype)

    def _bias(self, window: int | None) -> Tensor:
        """Return the mask [n, 1, 1, longest + span], fp32: 0 for visible columns of the prompt and the row, -inf for others."""
        if window not in self._biases:
            longest, now = self._groups.longest, (self._lengths + self._positions)[:, None]
            prompt, own = torch.arange(longest), torch.arange(self._span)
            hidden = torch.cat(
                (prompt >= self._lengths[:, None], own > self._positions[:, None]), dim=-1
            )
            if window is not None:
                at = torch.cat((prompt.expand(len(now), -1), own + self._lengths[:, None]), dim=-1)
                hidden |= now - at >= window
            bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self._biases[window] = bias[:, None, None]
        return self._biases[window]
