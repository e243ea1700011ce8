"""The KV cache of CPUs without matrix units: all completions share their prompt's.

    softmax([Q Kp', Q Ko']) = [Wp, Wo],   output = Wp Vp + Wo Vo

Completions of one prompt read its Kp and Vp in one product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burnish.models.kernels.attention import Heads, Softmax
from burnish.rollout.builtin.kv_cache import PromptCache, RowStore, SlotCache


class SharedCache(SlotCache):
    """Slots whose completions share their prompt; products and memory are fp32."""

    def __init__(self, slots: int, prompt: int, completion: int) -> None:
        super().__init__(slots, 0, completion, torch.float32)
        self._prompts = RowStore(prompt, torch.float32)
        self._stored: list[int] = []
        """The number of the prompt in each row of `_prompts`."""
        self._prompt_of: list[int | None] = [None] * slots
        self._lengths = torch.zeros(slots, dtype=torch.int64)
        self._groups: _Groups | None = None

    def place(self, rows: Sequence[int], prompts: PromptCache, which: Sequence[int]) -> None:
        """See `SlotCache.place`."""
        for row, index in zip(rows, which, strict=True):
            self._prompt_of[row] = prompts.first + index
        self._lengths[list(rows)] = torch.tensor([prompts.lengths[index] for index in which])
        self.reserve(prompts, len(self._lengths), 0)
        self._groups = None
        super().place(rows, prompts, which)
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
        self._prompts.read(prompts, fresh, places)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `RowStore.move`."""
        super().move(sources, targets)
        self._lengths[list(targets)] = self._lengths[list(sources)]
        for source, target in zip(sources, targets, strict=True):
            self._prompt_of[target] = self._prompt_of[source]
        self._groups = None

    def copied(self, row: int, length: int) -> dict[int, tuple[Tensor, ...]]:
        """See `RowStore.copied`."""
        prompt = int(self._lengths[row])
        own = super().copied(row, length - prompt)
        place = self._stored.index(self._prompt_of[row] or 0)
        return {
            layer: tuple(
                torch.cat((shared[place, :, :prompt], part), dim=1)
                for shared, part in zip(self._prompts.layers[layer], parts, strict=True)
            )
            for layer, parts in own.items()
        }

    def step(self, positions: Tensor, span: int) -> SharedCache:
        """See `SlotCache.step`. Positions and span count from the end of the prompt."""
        running = len(positions)
        if self._groups is None or self._groups.running != running:
            self._groups = self._grouped(running)
        own = positions - self._lengths[:running]
        self._positions = own
        self._span = int(own.max()) + 1
        self._biases = {}
        self.reserve(None, running, self._span)
        return self

    def attend(self, layer: int, parts: Heads, softmax: Softmax) -> Tensor:
        """Append token i to row i; attend to its prompt and that row."""
        query, key, value = parts
        groups = self._groups
        assert groups is not None  # a step has begun
        self.append(layer, self._positions, key, value)
        shared = [
            part[: groups.prompts, :, : groups.longest].flatten(0, 1)
            for part in self._prompts.layers[layer]
        ]
        own = [part[: groups.running, :, : self._span].flatten(0, 1) for part in self.layers[layer]]
        kv_heads = key.shape[1]
        heads = query[0].transpose(0, 1).float() * softmax.scaling
        heads = heads.reshape(len(heads), kv_heads, -1, query.shape[-1])
        of_prompt = groups.apart(torch.bmm(groups.together(heads), shared[0].mT), heads)
        of_own = torch.bmm(heads.flatten(0, 1), own[0].mT).view(*heads.shape[:3], -1)
        products = torch.cat((of_prompt, of_own), dim=-1)
        weights = softmax.weights(products, self._bias(softmax.window, torch.float32))
        on_prompt, on_own = weights.tensor_split([groups.longest], dim=-1)
        output = groups.apart(torch.bmm(groups.together(on_prompt), shared[1]), heads)
        output = output.flatten(0, 1).baddbmm_(on_own.flatten(0, 1), own[1])
        return output.view(1, groups.running, -1, value.shape[-1]).to(query.dtype)

    def _hidden(self, window: int | None) -> Tensor:
        """See `SlotCache._hidden`; the prompt's columns come first."""
        lengths = self._lengths[: len(self._positions), None]
        prompt = torch.arange(int(lengths.max()))
        own = torch.arange(self._span)
        positions = self._positions[:, None]
        hidden = torch.cat((prompt >= lengths, own > positions), dim=-1)
        if window is not None:
            absolute = torch.cat((prompt.expand(len(lengths), -1), own + lengths), dim=-1)
            hidden |= lengths + positions - absolute >= window
        return hidden

    def _grouped(self, running: int) -> _Groups:
        """Close gaps between stored prompts; group the first rows by prompt."""
        self._prompt_of[running:] = [None] * (len(self._prompt_of) - running)
        live = set(self._prompt_of[:running])
        late = [p for p in range(len(live), len(self._stored)) if self._stored[p] in live]
        gaps = [p for p in range(len(live)) if self._stored[p] not in live]
        if late:
            self._prompts.move(late, gaps)
        for source, target in zip(late, gaps, strict=True):
            self._stored[target] = self._stored[source]
        del self._stored[len(live) :]
        places = {number: place for place, number in enumerate(self._stored)}
        rows: list[list[int]] = [[] for _ in live]
        for row, number in enumerate(self._prompt_of[:running]):
            if number is not None:
                rows[places[number]].append(row)
        return _Groups(rows, running, int(self._lengths[:running].max()))


class _Groups:
    """Running completions by prompt: P prompts, at most m completions each."""

    def __init__(self, rows: Sequence[Sequence[int]], running: int, longest: int) -> None:
        largest = max(map(len, rows))
        self.running = running
        self.longest = longest
        """Number of completions, and tokens of the longest prompt."""
        self.prompts = len(rows)
        padded = [[*members, *[members[0]] * (largest - len(members))] for members in rows]
        self.rows = torch.tensor(padded).flatten()
        """Row of each completion [P · m], padded with the prompt's first row."""
        self.places = torch.empty(running, dtype=torch.int64)
        """Index into `rows` of each running row [running]."""
        for prompt, members in enumerate(rows):
            self.places[list(members)] = torch.arange(len(members)) + prompt * largest

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
