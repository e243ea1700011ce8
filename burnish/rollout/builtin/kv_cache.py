"""The KV cache: keys and values of prompts and completions, one slot per running completion.

`PromptCache` reads packed prompts. Each decoding step then appends one token to every row.
`SlotCache` copies the prompt into each row, which takes the fewest kernels. `SharedCache` stores
each prompt once, for CPUs without matrix units:

    softmax([Q Kp', Q Ko']) = [Wp, Wo],   output = Wp Vp + Wo Vo

All completions of a prompt read its Kp and Vp in one product. Ko and Vo are a completion's own.
Rows grow together. Left out: pages, and prefixes that prompts share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burnish.errors import IncompatibleError
from burnish.models.kernels.attention import Heads, PackedLayout

_GRAIN = 128
"""Rows grow by at least this many tokens."""
_SPAN_GRAIN = 8
"""Masks span a multiple of this many positions, as kernels require."""


class PromptCache:
    """Keys and values of packed prompts, filled as the model reads them."""

    def __init__(self, lengths: Sequence[int], device: torch.device, first: int = 0) -> None:
        """Take the prompts' lengths, and the first one's number among all prompts."""
        self.lengths = tuple(lengths)
        self.first = first
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of each layer, each [kv_heads, T, head_dim]."""
        self._layout = PackedLayout.of(lengths, device)

    def attend(self, layer: int, parts: Heads, scaling: float, window: int | None) -> Tensor:
        """Attend causally within each prompt; keep its keys and values. See `Attends.attend`."""
        if layer in self.layers:
            raise IncompatibleError(
                "the model attends twice in one layer",
                have=f"a second call in layer {layer}",
                want="keys and values once for each layer",
                do="train a model of another family",
            )
        # Copies: views would keep the queries beside them alive.
        self.layers[layer] = parts[1][0].contiguous(), parts[2][0].contiguous()
        return self._layout.attend(layer, parts, scaling, window)

    def rows(self, prompts: Sequence[int]) -> Tensor:
        """Return packed positions [n, longest] of prompts; shorter ones repeat their last token."""
        lengths = torch.tensor([self.lengths[prompt] for prompt in prompts])
        starts = torch.tensor([0, *self.lengths]).cumsum(0)[torch.tensor(prompts)]
        columns = torch.arange(int(lengths.max()))
        return starts[:, None] + columns.minimum(lengths[:, None] - 1)


class _Store:
    """Keys and values of rows, per layer `[rows, kv_heads, capacity, head_dim]`."""

    def __init__(self, longest: int, dtype: torch.dtype | None = None) -> None:
        self._longest, self._dtype = longest, dtype
        self.layers: dict[int, list[Tensor]] = {}

    def reserve(self, prompts: PromptCache | None, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens, in layers like `prompts`'; grow early."""
        for layer, parts in prompts.layers.items() if prompts else ():
            if layer not in self.layers:
                self.layers[layer] = [
                    part.new_empty((0, len(part), 0, part.shape[2]), dtype=self._dtype)
                    for part in parts
                ]
        for held in self.layers.values():
            for part, mine in enumerate(held):
                old_rows, heads, old, width = mine.shape
                room = old
                if length > old:  # an eighth more
                    room = max(length, min(old + max(_GRAIN, old // 8), self._longest))
                if room > old or rows > old_rows:
                    # Zeros: masked positions are still multiplied by a weight of 0.
                    held[part] = mine.new_zeros(max(rows, old_rows), heads, _rounded(room), width)
                    held[part][:old_rows, :, :old] = mine

    def read(self, prompts: PromptCache, which: Sequence[int], rows: Tensor) -> None:
        source = prompts.rows(which).to(rows.device, non_blocking=True)
        for layer, held in self.layers.items():
            for mine, theirs in zip(held, prompts.layers[layer], strict=True):
                read = theirs[:, source].transpose(0, 1).to(mine.dtype)
                mine[:, :, : source.shape[1]].index_copy_(0, rows, read)

    def append(self, layer: int, rows: Tensor, positions: Tensor, *latest: Tensor) -> None:
        """Write keys and values [1, kv_heads, n, head_dim] of one token to each of n rows."""
        for mine, each in zip(self.layers[layer], latest, strict=True):
            mine[rows, :, positions] = each[0].transpose(0, 1).to(mine.dtype)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows `sources` over rows `targets`; no row is in both."""
        for held in self.layers.values():
            for mine in held:
                mine.index_copy_(0, targets, mine.index_select(0, sources))


def _rounded(length: int) -> int:
    return -(-length // _SPAN_GRAIN) * _SPAN_GRAIN


class SlotCache:
    """One row per completion, in the model's dtype."""

    def __init__(self, slots: int, prompt: int, completion: int) -> None:
        """Allocate nothing yet; `prompt` and `completion` are the most tokens of each."""
        self._slots = slots
        self._store = _Store(prompt + completion)

    def place(self, rows: Tensor, prompts: PromptCache, which: Sequence[int]) -> None:
        """Start row `rows[i]` with prompt `which[i]`."""
        longest = max(prompts.lengths[index] for index in which)
        self._store.reserve(prompts, self._slots, longest)
        self._store.read(prompts, which, rows)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows `sources` over rows `targets`; no row is in both."""
        self._store.move(sources, targets)

    def step(self, positions: Tensor, span: int) -> DecodeStep:
        """Begin a decoding step of the first n rows and end all others.

        The latest tokens are at `positions` [n], all below `span`.
        """
        self._store.reserve(None, self._slots, span)
        return DecodeStep(self._store, positions, _rounded(span))


class DecodeStep:
    """One decoding step of a `SlotCache`; an `Attends`."""

    def __init__(self, store: _Store, positions: Tensor, span: int) -> None:
        self._store, self._positions, self._span = store, positions, span
        self._rows = torch.arange(len(positions), device=positions.device)
        self._biases: dict[int | None, Tensor] = {}

    def attend(self, layer: int, parts: Heads, scaling: float, window: int | None) -> Tensor:
        """Append token i to row i and attend to that row; see `Attends.attend`."""
        query, key, value = parts
        self._store.append(layer, self._rows, self._positions, key, value)
        keys, values = (
            part[: len(self._rows), :, : self._span] for part in self._store.layers[layer]
        )
        bias = self._bias(window, keys.dtype)
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
    """Attend with one token per row.

    From [n, heads, head_dim] to [n, kv_heads, heads per key head, width of values]. CPUs are fastest with
    one query per head. Other devices' kernels with a bias need as many key heads as query heads. So
    there, heads that share keys become the queries of one call.
    """
    grouped = query.view(len(query), keys.shape[1], -1, query.shape[-1])
    if query.device.type != "cpu":
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling)
    output = scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=bias, scale=scaling, enable_gqa=True
    )
    return output.view(*grouped.shape[:3], -1)


class SharedCache:
    """Slots whose completions share one stored copy of their prompt; products and memory are fp32."""

    def __init__(self, slots: int, prompt: int, completion: int) -> None:
        """Allocate nothing yet; see `SlotCache`."""
        self._prompts, self._own = (_Store(each, torch.float32) for each in (prompt, completion))
        self._stored: list[int] = []
        """The number of the prompt in each row of `_prompts`."""
        self._prompt_of: list[int | None] = [None] * slots
        self._lengths = torch.zeros(slots, dtype=torch.int64)
        self._groups: _Groups | None = None

    def place(self, rows: Tensor, prompts: PromptCache, which: Sequence[int]) -> None:
        """See `SlotCache.place`."""
        for row, index in zip(rows.tolist(), which, strict=True):
            self._prompt_of[row] = prompts.first + index
        self._lengths[rows] = torch.tensor([prompts.lengths[index] for index in which])
        self._own.reserve(prompts, len(self._lengths), 0)
        self._groups = None
        fresh = [i for i in dict.fromkeys(which) if prompts.first + i not in self._stored]
        if not fresh:
            return
        used = set(self._prompt_of)
        free = [place for place, number in enumerate(self._stored) if number not in used]
        free += range(len(self._stored), len(self._stored) + len(fresh))
        places = free[: len(fresh)]
        self._stored += [-1] * (max(places) + 1 - len(self._stored))
        for place, index in zip(places, fresh, strict=True):
            self._stored[place] = prompts.first + index
        longest = max(prompts.lengths[index] for index in fresh)
        self._prompts.reserve(prompts, len(self._stored), longest)
        self._prompts.read(prompts, fresh, torch.tensor(places))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """See `SlotCache.move`."""
        self._own.move(sources, targets)
        self._lengths[targets] = self._lengths[sources]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._prompt_of[target] = self._prompt_of[source]
        self._groups = None

    def step(self, positions: Tensor, span: int) -> SharedStep:
        """See `SlotCache.step`."""
        running = len(positions)
        if self._groups is None or self._groups.running != running:
            self._groups = self._grouped(running)
        lengths = self._lengths[:running]
        own = positions - lengths
        own_span = int(own.max()) + 1
        self._own.reserve(None, running, own_span)
        return SharedStep(self._prompts, self._own, self._groups, lengths, own, own_span)

    def _grouped(self, running: int) -> _Groups:
        """Close gaps between stored prompts; group the first rows by prompt."""
        self._prompt_of[running:] = [None] * (len(self._prompt_of) - running)
        live = set(self._prompt_of[:running])
        late = [p for p in range(len(live), len(self._stored)) if self._stored[p] in live]
        gaps = [p for p in range(len(live)) if self._stored[p] not in live]
        if late:
            self._prompts.move(torch.tensor(late), torch.tensor(gaps))
        for source, target in zip(late, gaps, strict=True):
            self._stored[target] = self._stored[source]
        del self._stored[len(live) :]
        places = {number: place for place, number in enumerate(self._stored)}
        rows: list[list[int]] = [[] for _ in live]
        for row, number in enumerate(self._prompt_of[:running]):
            if number is not None:
                rows[places[number]].append(row)
        return _Groups.of(rows, running, int(self._lengths[:running].max()))


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Running completions grouped by prompt: P prompts, at most m completions each."""

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
        """Take `lengths` [n] of the rows' prompts, and `positions` [n] of their latest tokens.

        Positions count from the end of the prompt and are below `span`.
        """
        self._prompts, self._own, self._groups = prompts, own, groups
        self._lengths, self._positions = lengths, positions
        self._rows = torch.arange(len(positions))
        self._span = span
        self._biases: dict[int | None, Tensor] = {}

    def attend(self, layer: int, parts: Heads, scaling: float, window: int | None) -> Tensor:
        """Append token i to row i; attend to its prompt and that row. See `Attends.attend`."""
        (query, key, value), groups = parts, self._groups
        self._own.append(layer, self._rows, self._positions, key, value)
        shared = [
            part[: groups.prompts, :, : groups.longest].flatten(0, 1)
            for part in self._prompts.layers[layer]
        ]
        own = [
            part[: groups.running, :, : self._span].flatten(0, 1)
            for part in self._own.layers[layer]
        ]
        kv_heads = key.shape[1]
        heads = query[0].transpose(0, 1).float() * scaling
        heads = heads.reshape(len(heads), kv_heads, -1, query.shape[-1])
        of_prompt = groups.apart(torch.bmm(groups.together(heads), shared[0].mT), heads)
        of_own = torch.bmm(heads.flatten(0, 1), own[0].mT).view(*heads.shape[:3], -1)
        scores = torch.cat((of_prompt, of_own), dim=-1).add_(self._bias(window))
        weights = scores.softmax(dim=-1)
        on_prompt, on_own = weights.tensor_split([groups.longest], dim=-1)
        output = groups.apart(torch.bmm(groups.together(on_prompt), shared[1]), heads)
        output = output.flatten(0, 1).baddbmm_(on_own.flatten(0, 1), own[1])
        return output.view(1, groups.running, -1, value.shape[-1]).to(query.dtype)

    def _bias(self, window: int | None) -> Tensor:
        """Return the mask [n, 1, 1, longest + span], fp32: 0 for visible columns, else -inf."""
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
