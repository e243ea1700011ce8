"""Cache keys, values and states of prompts and completions, one slot per running completion.

A `SlotCache` copies the prompt into each row, which takes the fewest kernels. Layers with state get transformers' own cache, whose
tensors are views of the slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, LinearAttentionLayer

from burnish.errors import IncompatibleError
from burnish.models.kernels.attention import Heads, Mixer, PackedAttention, PackedLayout, Softmax
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
        # Copies: views would keep the queries beside them alive.
        self.layers[layer] = parts[1][0].contiguous(), parts[2][0].contiguous()
        return self._layout.attend(layer, parts, softmax)

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Mix within each prompt. Prompts of one length share a call: padding would change their states."""
        output = torch.empty_like(hidden[0])
        parts = []
        order: list[int] = []
        for length in sorted(set(self.lengths)):
            alike = [prompt for prompt, own in enumerate(self.lengths) if own == length]
            rows = to_device(self.rows(alike), hidden.device)
            cache = _cache_of(layer, [])
            output[rows] = mixer(hidden[0][rows], cache)
            layer_cache = cache.layers[layer]
            states = (layer_cache.conv_states[0], layer_cache.recurrent_states[0])
            parts.append([part for part in states if part is not None])
            order += alike
        back = to_device(torch.tensor(order).argsort(), hidden.device)
        self.states[layer] = [torch.cat(part)[back] for part in zip(*parts, strict=True)]
        return output[None]

    def with_known(self, experts: Sequence[Experts]) -> Sequence[Experts]:
        """Put the experts of known tokens before those of the others."""
        return experts

    def rows(self, prompts: Sequence[int]) -> Tensor:
        """Return packed positions [n, longest] of prompts; shorter ones repeat their last token."""
        lengths = torch.tensor([self.lengths[prompt] for prompt in prompts])
        starts = torch.tensor([0, *self.lengths]).cumsum(0)[torch.tensor(prompts)]
        columns = torch.arange(int(lengths.max()))
        return starts[:, None] + columns.minimum(lengths[:, None] - 1)


def _cache_of(layer: int, states: States) -> Cache:
    """Return a cache for one call of a layer, which continues from `states`, if any, in place."""
    layer_cache = LinearAttentionLayer()
    for tensors, initialized, state in zip(
        (layer_cache.conv_states, layer_cache.recurrent_states),
        (layer_cache.is_conv_states_initialized, layer_cache.is_recurrent_states_initialized),
        states,
        strict=False,
    ):
        tensors[0] = state
        initialized[0] = True
    if states:
        layer_cache.has_previous_state[0] = True
        layer_cache.conv_kernel_size[0] = states[0].shape[-1]
    # The layer looks up its part by its number.
    return Cache(layers=[layer_cache] * (layer + 1))


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
                        max(rows, old_rows), heads, _rounded(room), width
                    )
                    pair[index][:old_rows, :, :old] = stored

    def read(self, prompts: PromptCache, which: Sequence[int], rows: Tensor) -> None:
        """Copy prompts `which` to these rows."""
        positions = to_device(prompts.rows(which), rows.device)
        for layer, pair in self.layers.items():
            for stored, packed in zip(pair, prompts.layers[layer], strict=True):
                copied = packed[:, positions].transpose(0, 1).to(stored.dtype)
                stored[:, :, : positions.shape[1]].index_copy_(0, rows, copied)

    def append(self, layer: int, positions: Tensor, *latest: Tensor) -> None:
        """Write keys and values [1, kv_heads, n, head_dim] of one token to the first n rows."""
        rows = torch.arange(len(positions), device=positions.device)
        for stored, part in zip(self.layers[layer], latest, strict=True):
            stored[rows, :, positions] = part[0].transpose(0, 1).to(stored.dtype)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows `sources` over rows `targets`; no row is in both."""
        for tensors in (*self.layers.values(), *self.states.values()):
            for tensor in tensors:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def _rounded(length: int) -> int:
    return -(-length // _SPAN_GRAIN) * _SPAN_GRAIN


class SlotCache(RowStore):
    """One row per completion, in the model's dtype; the `PackedAttention` of the latest step."""

    def __init__(
        self, slots: int, prompt: int, completion: int, dtype: torch.dtype | None = None
    ) -> None:
        """Allocate nothing yet; `prompt` and `completion` are the most tokens."""
        super().__init__(prompt + completion, dtype)
        self._slots = slots
        self._positions = torch.empty(0)
        self._span = 0
        self._biases: dict[int | None, Tensor] = {}

    def place(self, rows: Tensor, prompts: PromptCache, which: Sequence[int]) -> None:
        """Start row `rows[i]` with prompt `which[i]`."""
        longest = max(prompts.lengths[index] for index in which)
        self.reserve(prompts, self._slots, longest)
        self.read(prompts, which, rows)
        self.start(prompts, which, rows)

    def start(self, prompts: PromptCache, which: Sequence[int], rows: Tensor) -> None:
        """Copy the states after prompts `which` to these rows."""
        prompt_rows = to_device(torch.tensor(which), rows.device)
        for layer, parts in prompts.states.items():
            if layer not in self.states:
                self.states[layer] = [
                    part.new_zeros(self._slots, *part.shape[1:]) for part in parts
                ]
            for stored, state in zip(self.states[layer], parts, strict=True):
                stored.index_copy_(0, rows, state.index_select(0, prompt_rows))

    def copied(self, row: int, length: int) -> dict[int, tuple[Tensor, ...]]:
        """Return keys and values of a row's first tokens by layer, each [kv_heads, length, head_dim]."""
        return {
            layer: tuple(part[row, :, :length].clone() for part in pair)
            for layer, pair in self.layers.items()
        }

    def step(self, positions: Tensor, span: int) -> PackedAttention:
        """Begin a step of the first n rows, with tokens at `positions` [n] below `span`; other rows have ended."""
        self.reserve(None, self._slots, span)
        self._positions = positions
        self._span = _rounded(span)
        self._biases = {}
        return self

    def attend(self, layer: int, parts: Heads, softmax: Softmax) -> Tensor:
        """Append token i to row i and attend to it."""
        query, key, value = parts
        running = len(self._positions)
        self.append(layer, self._positions, key, value)
        keys, values = (part[:running, :, : self._span] for part in self.layers[layer])
        bias = self._bias(softmax.window, keys.dtype)
        output = _attend_one(query[0].transpose(0, 1), keys, values, bias, softmax)
        return output.flatten(1, 2)[None]

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Continue row i with token i."""
        running = hidden.shape[1]
        states = [part[:running] for part in self.states[layer]]
        return mixer(hidden.transpose(0, 1), _cache_of(layer, states)).transpose(0, 1)

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


def _attend_one(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, softmax: Softmax
) -> Tensor:
    """Attend with a token per row, [n, heads, head_dim] → [n, kv_heads, heads per key head, width of values].

    CPUs are fastest with one query per head. Other devices' kernels with a bias need as many key heads as query heads, so heads
    that share keys become queries. Sinks and soft caps are computed in fp32.
    """
    grouped = query.view(len(query), keys.shape[1], -1, query.shape[-1])
    scaling = softmax.scaling
    if not softmax.is_plain:
        products = torch.matmul(grouped.float() * scaling, keys.float().mT)
        weights = softmax.weights(products, bias)
        return torch.matmul(weights, values.float()).to(query.dtype)
    if query.device.type != "cpu":
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling)
    output = scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=bias, scale=scaling, enable_gqa=True
    )
    return output.view(*grouped.shape[:3], -1)
