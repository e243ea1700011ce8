"""Decode turns of conversations: what was read of a conversation stays, and its next turn reads only what is new.

Keys and values of drawn tokens stay as decoding computed them. They differ in their last bits from those of a prompt that is read at
once, because the products have other shapes. So which conversations are kept follows from the requests alone, and repeats with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burnish.models.kernels.attention import Heads, Softmax
from burnish.records import Experts, TokenIds
from burnish.rollout.builtin.kv_cache import PromptCache, SlotCache

if TYPE_CHECKING:
    from burnish.rollout.builtin.decoding import SlotSequence

Key = tuple[int, int]
"""A conversation: its `prompt_key` and sample."""


class _Kept(NamedTuple):
    """What was read of a conversation."""

    token_ids: TokenIds
    """The T tokens that were read: all but the last that was drawn."""
    layers: Mapping[int, tuple[Tensor, ...]]
    """Keys and values of each layer, each [kv_heads, T, head_dim]."""
    experts: Experts | None
    version: int
    """The version of the weights."""


class TurnCache(PromptCache):
    """Prompts that continue conversations."""

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        first: int,
        kept: Sequence[_Kept | None],
    ) -> None:
        """`kept` has what was read of each prompt, from its first token on."""
        super().__init__(lengths, device, first)
        self._kept = kept
        self.known = tuple(0 if each is None else len(each.token_ids) for each in kept)

    def attend(self, layer: int, parts: Heads, softmax: Softmax) -> Tensor:
        """Attend within each prompt, with queries of its new tokens only."""
        sizes = [length - known for length, known in zip(self.lengths, self.known, strict=True)]
        queries, *new = (torch.split(part[0], sizes, dim=1) for part in parts)
        whole = [
            [
                part if kept is None else torch.cat((kept.layers[layer][which].to(part), part), 1)
                for part, kept in zip(new[which], self._kept, strict=True)
            ]
            for which in (0, 1)
        ]
        keys, values = (torch.cat(each, dim=1) for each in whole)
        self.layers[layer] = keys, values
        outputs = [
            _attend_last(*each, softmax) for each in zip(queries, whole[0], whole[1], strict=True)
        ]
        return torch.cat(outputs)[None]

    def with_known(self, experts: Sequence[Experts]) -> Sequence[Experts]:
        """See `PromptCache.with_known`."""
        return [
            part if kept is None or kept.experts is None else np.concatenate([kept.experts, part])
            for kept, part in zip(self._kept, experts, strict=bool(experts))
        ]


class KeptTurns:
    """What is kept of conversations: at most as many tokens as all slots hold.

    Conversations beyond, and those of models with states, are read again.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept] = {}
        self._key_of: dict[int, Key] = {}
        """The conversation of each running completion, by its id."""
        self._most = 0

    @property
    def nbytes(self) -> int:
        """Return the memory that it takes."""
        layers = [pair for kept in self._kept.values() for pair in kept.layers.values()]
        return sum(part.nbytes for pair in layers for part in pair)

    def begin(self, sequences: Sequence[SlotSequence], most: int) -> None:
        """Begin a call, and free the conversations that it does not continue. At most so many tokens are kept."""
        self._most = most
        self._key_of = {}
        self.add(sequences)
        first_samples = {sequence.prompt.key for sequence in sequences}
        self._kept = {key: each for key, each in self._kept.items() if key in first_samples}

    def add(self, sequences: Sequence[SlotSequence]) -> None:
        """Take in completions of this call, those of a prompt together."""
        samples: dict[int, int] = {}
        for sequence in sequences:
            prompt_key, first = sequence.prompt.key
            number = samples.get(id(sequence.prompt), 0)
            samples[id(sequence.prompt)] = number + 1
            self._key_of[id(sequence)] = (prompt_key, first + number)

    def keep(self, slots: Sequence[SlotSequence | None], cache: SlotCache, version: int) -> None:
        """Keep the completions that have ended, as far as there is room."""
        kept_tokens = sum(len(each.token_ids) for each in self._kept.values())
        for row, sequence in enumerate(slots):
            if sequence is None or sequence.reason is None or cache.states:
                continue
            own = sequence.own[sequence.prompt.drawn :]
            ids = np.concatenate([sequence.prompt.token_ids, own])[:-1]
            is_mixed = [number for number, _ in sequence.versions] != [version]
            if is_mixed or kept_tokens + len(ids) > self._most:
                continue
            kept_tokens += len(ids)
            experts = np.concatenate(sequence.experts) if sequence.experts else None
            kept = _Kept(ids, cache.copied(row, len(ids)), experts, version)
            self._kept[self._key_of[id(sequence)]] = kept

    def continued(
        self,
        prompts: Sequence[Any],
        version: int,
        lengths: Sequence[int],
        device: torch.device,
        first: int,
    ) -> TurnCache | None:
        """Return a cache for prompts, with what is kept of them; None if nothing is."""
        kept = [self._taken(prompt, version) for prompt in prompts]
        return TurnCache(lengths, device, first, kept) if any(kept) else None

    def _taken(self, prompt: Any, version: int) -> _Kept | None:
        """Take out what is kept of a prompt, if the prompt begins with it and has more."""
        turns = self._kept.pop(prompt.key, None)
        if turns is None or turns.version != version:
            return None
        known = len(turns.token_ids)
        continues = known < len(prompt.token_ids)
        return turns if continues and (prompt.token_ids[:known] == turns.token_ids).all() else None


def _attend_last(query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
    """Attend with the last n tokens of a sequence of L: [heads, n, d], [kv_heads, L, d] → [n, heads, width of values].

    In fp32 on a CPU, and with sinks and soft caps.
    """
    heads, count, width = query.shape
    kv_heads, length, _ = keys.shape
    tokens = torch.arange(length, device=query.device)
    distance = tokens[length - count :, None] - tokens
    hidden = distance < 0
    if softmax.window is not None:
        hidden |= distance >= softmax.window
    if query.device.type != "cpu" and softmax.is_plain:
        output = scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=~hidden,
            scale=softmax.scaling,
            enable_gqa=heads != kv_heads,
        )
        return output[0].transpose(0, 1)
    bias = torch.zeros(hidden.shape, device=query.device).masked_fill_(hidden, -torch.inf)
    rows = query.reshape(kv_heads, -1, count, width).transpose(1, 2).float() * softmax.scaling
    products = torch.bmm(rows.flatten(1, 2), keys.float().mT)
    # One query a row, as `Softmax.weights` wants them.
    products = products.view(kv_heads, count, -1, length).transpose(0, 1).contiguous()
    weights = softmax.weights(products, bias[:, None, None])
    weights = weights.transpose(0, 1).reshape(kv_heads, -1, length)
    output = torch.bmm(weights, values.float()).view(kv_heads, count, -1, values.shape[-1])
    return output.transpose(0, 1).flatten(1, 2).to(query.dtype)
