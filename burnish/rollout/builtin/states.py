"""Layers with state while prompts are read and completions go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from burnish.models.kernels.attention import Mixer
from burnish.records import to_device

if TYPE_CHECKING:
    from burnish.rollout.builtin.kv_cache import PromptCache, States


def mix_prompts(prompts: PromptCache, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
    """See `PromptCache.mix`."""
    output = torch.empty_like(hidden[0])
    parts = []
    order: list[int] = []
    for length in sorted(set(prompts.lengths)):
        alike = [prompt for prompt, own in enumerate(prompts.lengths) if own == length]
        rows = to_device(prompts.rows(alike), hidden.device)
        cache = cache_of(layer, [])
        output[rows] = mixer(hidden[0][rows], cache)
        layer_cache = cache.layers[layer]
        states = (layer_cache.conv_states[0], layer_cache.recurrent_states[0])
        parts.append([part for part in states if part is not None])
        order += alike
    back = to_device(torch.tensor(order).argsort(), hidden.device)
    prompts.states[layer] = [torch.cat(part)[back] for part in zip(*parts, strict=True)]
    return output[None]


def cache_of(layer: int, states: States) -> Cache:
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
