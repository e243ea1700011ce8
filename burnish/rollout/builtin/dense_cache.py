"""The KV cache of devices that cannot read blocks: each row holds its prompt too, which takes the fewest kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burnish.models.kernels.attention import Heads, Softmax
from burnish.rollout.builtin.kv_cache import PromptCache, SlotCache, to_grain


class DenseCache(SlotCache):
    """Rows of equal length, in the model's dtype."""

    def place(self, rows: Sequence[int], prompts: PromptCache, which: Sequence[int]) -> None:
        """See `SlotCache.place`."""
        longest = max(prompts.lengths[index] for index in which)
        self.reserve(prompts, self._slots, longest)
        self.read(prompts, which, rows)
        super().place(rows, prompts, which)

    def step(self, positions: Tensor, span: int) -> DenseCache:
        """See `SlotCache.step`."""
        self.reserve(None, self._slots, span)
        self._positions = positions
        self._span = to_grain(span)
        self._biases = {}
        return self

    def attend(self, layer: int, parts: Heads, softmax: Softmax) -> Tensor:
        """See `SlotCache.attend`."""
        query, key, value = parts
        running = len(self._positions)
        self.append(layer, self._positions, key, value)
        keys, values = (part[:running, :, : self._span] for part in self.layers[layer])
        bias = self._bias(softmax.window, keys.dtype)
        output = attend_one(query[0].transpose(0, 1), keys, values, bias, softmax)
        return output.flatten(1, 2)[None]


def attend_one(
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
