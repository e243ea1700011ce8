"""Cache keys, values and states of prompts and completions, one slot per running completion.

A `SharedCache` is for CPUs, a `PagedCache` for GPUs, a `DenseCache` for others. Layers with state get transformers' own cache, whose
tensors are views of the slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from burnish.errors import IncompatibleError
from burnish.models.kernels.attention import Heads, Mixer, PackedLayout, Softmax
from burnish.records import Experts, to_device

_GRAIN = 128
"""Rows grow by at least this many tokens."""
_SPAN_GRAIN = 8
"""Masks span a multiple of this many positions, as kernels require."""


States = list[Tensor]
"""The states of n sequences in a layer: of its convolution, then of any recurrence, each [n, ...]."""


class PromptCache:
    """Keys and values, and states after the last token, of packed prompts."""

    def __init__(self, lengths: Sequence[int], device: torch.device, first: int = 0) -> None:
        """Take the prompts' lengths, and the first one's number among all."""
        self.lengths = tuple(lengths)
        self.known = (0,) * len(lengths)
        """How many of each prompt's tokens were read before."""
        self.first = first
        self.device = device
        self.has_softcap = False
        """Whether a layer bounds its scores."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of each layer, each [kv_heads, T, head_dim]."""
        self.states: dict[int, States] = {}
        """States of each layer, by prompt."""
        self._layout = PackedLayout.of(lengths, device)

    def attend(self, layer: int, parts: Heads, softmax: Softmax) -> Tensor:
        """Attend causally within each prompt."""
        if layer in self.layers:
            raise IncompatibleError(
                "the model attends twice in one layer",
                have=f"a second call in layer {layer}",
                want="keys and values once for each layer",
                do="train a model of another family",
            )
        self.has_softcap |= softmax.softcap is not None
        # Copies: views would keep the queries beside them alive.
        self.layers[layer] = parts[1][0].contiguous(), parts[2][0].contiguous()
        return self._layout.attend(layer, parts, softmax)

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Mix within each prompt. Prompts of one length share a call: padding would change their states."""
        from burnish.rollout.builtin.states import mix_prompts

        return mix_prompts(self, layer, mixer, hidden)

    def with_known(self, experts: Sequence[Experts]) -> Sequence[Experts]:
        """Put the experts of known tokens before those of the others."""
        return experts

    def rows(self, prompts: Sequence[int]) -> Tensor:
        """Return packed positions [n, longest] of prompts; shorter ones repeat their last token."""
        lengths = torch.tensor([self.lengths[prompt] for prompt in prompts])
        starts = torch.tensor([0, *self.lengths]).cumsum(0)[torch.tensor(prompts)]
        columns = torch.arange(int(lengths.max()))
        return starts[:, None] + columns.minimum(lengths[:, None] - 1)


SlotBytes = tuple[int, int, PromptCache]
"""A slot's bytes for each token, and for its logits and states, and the cache of one token."""


class RowStore:
    """Keys and values per layer, `[rows, kv_heads, capacity, head_dim]`."""

    def __init__(self, longest: int, dtype: torch.dtype | None = None) -> None:
        self._longest = longest
        self._dtype = dtype
        self.layers: dict[int, list[Tensor]] = {}
        self.states: dict[int, States] = {}
        """States of each layer, by row."""

    def reserve(self, prompts: PromptCache | None, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens, in layers like `prompts`'; grow early."""
        for layer, parts in prompts.layers.items() if prompts else ():
            if layer not in self.layers:
                self.layers[layer] = [
                    part.new_empty((0, len(part), 0, part.shape[2]), dtype=self._dtype)
                    for part in parts
                ]
        for pair in self.layers.values():
            for index, stored in enumerate(pair):
                old_rows, heads, old, width = stored.shape
                room = old
                if length > old:
                    # An eighth more, because each growth copies the whole tensor.
                    room = max(length, min(old + max(_GRAIN, old // 8), self._longest))
                if room > old or rows > old_rows:
                    # Zeros: masked positions are still multiplied by a weight of 0.
                    pair[index] = stored.new_zeros(
                        max(rows, old_rows), heads, to_grain(room), width
                    )
                    pair[index][:old_rows, :, :old] = stored

    def read(self, prompts: PromptCache, which: Sequence[int], rows: Sequence[int]) -> None:
        """Copy prompts `which` to these rows."""
        positions = to_device(prompts.rows(which), prompts.device)
        index = to_device(torch.tensor(rows), prompts.device)
        for layer, pair in self.layers.items():
            for stored, packed in zip(pair, prompts.layers[layer], strict=True):
                copied = packed[:, positions].transpose(0, 1).to(stored.dtype)
                stored[:, :, : positions.shape[1]].index_copy_(0, index, copied)

    def append(self, layer: int, positions: Tensor, *latest: Tensor) -> None:
        """Write keys and values [1, kv_heads, n, head_dim] of one token to the first n rows."""
        rows = torch.arange(len(positions), device=positions.device)
        for stored, part in zip(self.layers[layer], latest, strict=True):
            stored[rows, :, positions] = part[0].transpose(0, 1).to(stored.dtype)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows `sources` over rows `targets`; no row is in both."""
        tensors = [each for part in (self.layers, self.states) for x in part.values() for each in x]
        rows = torch.tensor([sources, targets])
        for tensor in tensors:
            index = to_device(rows, tensor.device)
            tensor.index_copy_(0, index[1], tensor.index_select(0, index[0]))

    def copied(self, row: int, length: int) -> dict[int, tuple[Tensor, ...]]:
        """Return keys and values of a row's first tokens by layer, each [kv_heads, length, head_dim]."""
        return {
            layer: tuple(part[row, :, :length].clone() for part in pair)
            for layer, pair in self.layers.items()
        }


def to_grain(length: int) -> int:
    """Return the next multiple of `_SPAN_GRAIN`."""
    return -(-length // _SPAN_GRAIN) * _SPAN_GRAIN


class SlotCache(RowStore, ABC):
    """One row per completion; the `PackedAttention` of the latest step."""

    def __init__(
        self, slots: int, prompt: int, completion: int, dtype: torch.dtype | None = None
    ) -> None:
        """Allocate nothing yet; `prompt` and `completion` are the most tokens."""
        super().__init__(prompt + completion, dtype)
        self._slots = slots
        self._positions = torch.empty(0)
        self._span = 0
        self._biases: dict[int | None, Tensor] = {}

    def place(self, rows: Sequence[int], prompts: PromptCache, which: Sequence[int]) -> None:
        """Start row `rows[i]` with prompt `which[i]`: copy its states here, and its keys and values in subclasses."""
        for layer, parts in prompts.states.items():
            prompt_rows = to_device(torch.tensor([which, rows]), prompts.device)
            if layer not in self.states:
                self.states[layer] = [
                    part.new_zeros(self._slots, *part.shape[1:]) for part in parts
                ]
            for stored, state in zip(self.states[layer], parts, strict=True):
                stored.index_copy_(0, prompt_rows[1], state.index_select(0, prompt_rows[0]))

    @abstractmethod
    def step(self, positions: Tensor, span: int) -> SlotCache:
        """Begin a step of the first n rows, with tokens at `positions` [n] below `span`; other rows have ended."""

    @abstractmethod
    def attend(self, layer: int, parts: Heads, softmax: Softmax) -> Tensor:
        """Append token i to row i and attend to it."""

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Continue row i with token i."""
        from burnish.rollout.builtin.states import cache_of

        states = [part[: hidden.shape[1]] for part in self.states[layer]]
        return mixer(hidden.transpose(0, 1), cache_of(layer, states)).transpose(0, 1)

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the mask [n, 1, 1, columns]: 0 where visible, -inf elsewhere."""
        if window not in self._biases:
            hidden = self._hidden(window)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._biases[window] = bias.masked_fill_(hidden, -torch.inf)[:, None, None]
        return self._biases[window]

    def _hidden(self, window: int | None) -> Tensor:
        """Return which columns [n, columns] the latest tokens do not see."""
        columns = torch.arange(self._span, device=self._positions.device)
        distance = self._positions[:, None] - columns
        return distance < 0 if window is None else (distance < 0) | (distance >= window)
