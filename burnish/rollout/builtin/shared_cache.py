"""Keys and values of what has been read so far, with each prompt once for all completions that continue it.

Decoding waits for memory: each step reads every key and value there is. Here a prompt's are read once for
all its completions, and lie there once:

    softmax([Q Kp', Q Ko']) = [Wp, Wo],   output = Wp Vp + Wo Vo

where Kp, Vp are those of a prompt, multiplied with the queries of all its completions, and Ko, Vo a completion's own.
Products, softmax and memory are fp32. For CPUs that have no units for bf16, on which batched products are as fast as
attention's own kernel; it takes a dozen operations for that one. Left out: prompts that begin alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from burnish.rollout.builtin.cache import PromptCache, grown


class SharedCache:
    """A `Cache` of `slots` completions, each of which refers to its prompt."""

    def __init__(self, slots: int, longest: int) -> None:
        """`longest` is the most tokens of a completion; memory comes as rows need it."""
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
        """Which of these prompts lies in a place, if any."""
        held = self._held[place]
        return held[1] if held is not None and held[0]() is prompts else None

    def _read(self, prompts: PromptCache, which: list[int], places: list[int]) -> None:
        """Copy prompts to their places."""
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
        """The first rows by their prompts, which are brought together before."""
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
    """Running completions by their prompts, P of them with at most m completions each."""

    running: int
    """How many completions."""
    prompts: int
    """P."""
    rows: Tensor
    """[P · m], the row of each, the first of a prompt also where there are no more."""
    places: Tensor
    """[running], where each row is among those."""
    longest: int
    """Tokens of the longest prompt."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], running: int, longest: int) -> _Groups:
        """From the rows of each prompt."""
        most = max(map(len, rows))
        padded = [[*each, *[each[0]] * (most - len(each))] for each in rows]
        places = torch.empty(running, dtype=torch.int64)
        for prompt, each in enumerate(rows):
            places[list(each)] = torch.arange(len(each)) + prompt * most
        return cls(running, len(rows), torch.tensor(padded).flatten(), places, longest)

    def together(self, by_row: Tensor) -> Tensor:
        """From [running, kv_heads, g, n] to [P · kv_heads, m · g, n]."""
        _, heads, shared, last = by_row.shape
        grouped = by_row.index_select(0, self.rows).view(self.prompts, -1, heads, shared, last)
        return grouped.transpose(1, 2).reshape(self.prompts * heads, -1, last)

    def apart(self, by_prompt: Tensor, like: Tensor) -> Tensor:
        """Back, to as many heads and g as `like` has."""
        _, heads, shared, _ = like.shape
        grouped = by_prompt.view(self.prompts, heads, -1, shared, by_prompt.shape[-1])
        return grouped.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


class _Store:
    """Keys and values of some rows in every layer: `[rows, kv_heads, capacity, head_dim]` fp32."""

    def __init__(self, rows: int) -> None:
        """`rows` that there are from the beginning."""
        self._rows = rows
        self.layers: dict[int, list[Tensor]] = {}

    def add_layer(self, layer: int, like: Tensor) -> None:
        """Have room for no token yet of a layer whose keys are `like` [kv_heads, T, head_dim]."""
        if layer not in self.layers:
            heads, _, width = like.shape
            self.layers[layer] = [torch.empty(self._rows, heads, 0, width) for _ in range(2)]

    def reserve(self, rows: int, length: int, longest: int) -> None:
        """Make room for so many rows of so many tokens, and for more of them to come, up to `longest`."""
        for held in self.layers.values():
            for part, mine in enumerate(held):
                old_rows, heads, old, width = mine.shape
                if rows <= old_rows and length <= old:
                    continue
                room = max(old, grown(old, length, longest))
                # Zeros, for what is hidden is multiplied by 0 all the same.
                held[part] = mine.new_zeros(max(rows, old_rows), heads, room, width)
                held[part][:old_rows, :, :old] = mine

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows over others; none is in both."""
        for held in self.layers.values():
            for mine in held:
                mine.index_copy_(0, targets, mine.index_select(0, sources))


class SharedStep:
    """One token for each of the first n rows of a `SharedCache`; an `Attends`."""

    def __init__(
        self,
        prompts: _Store,
        own: _Store,
        groups: _Groups,
        lengths: Tensor,
        positions: Tensor,
        span: int,
    ) -> None:
        """`lengths` of each row's prompt and `positions` of its latest token after that, [n] each, below `span`."""
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
        """See `Attends.attend`: token i joins row i and sees its prompt and that row up to itself."""
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
        """[n, 1, 1, longest + span] fp32: 0 where the row's token sees a column of its prompt or of its own, -inf where not."""
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
