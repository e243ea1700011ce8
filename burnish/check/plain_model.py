"""Score a sequence with plain transformers, and measure the distance of two tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burnish.models.heads import has_value_head
from burnish.records import Example, TokenOutputs


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor's distance from the plain one, or from another rank's copy."""

    what: str
    """The tensor, such as "gradient of model.norm.weight"."""
    error: float
    """2-norm of the difference over that of the plain tensor or copy."""


def plain_outputs(model: PreTrainedModel, example: Example, temperature: float) -> TokenOutputs:
    """Return a sequence's log-probs and entropies [T], or values; 0 for untrained tokens."""
    ids = torch.from_numpy(example.token_ids)
    mask = torch.from_numpy(example.loss_mask)
    zero = torch.zeros(1)
    # A sequence classifier's own forward pass returns only the last token's value.
    if has_value_head(model.config):
        from burnish.models.value_head import value_head

        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        values = value_head(model)(hidden)[:, 0]
        return TokenOutputs(values=torch.cat((zero, values)).where(mask, 0.0))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    scores = (logits.float() / temperature).log_softmax(-1)
    chosen = scores.gather(1, ids[1:, None])[:, 0]
    entropy = -(scores.exp() * scores).sum(-1)
    return TokenOutputs(
        logprobs=torch.cat((zero, chosen)).where(mask, 0.0),
        entropy=torch.cat((zero, entropy)).where(mask, 0.0),
    )


def difference(
    what: str, tensor: Tensor | None, expected: Tensor, least: float = 0.0
) -> Difference:
    """Return the tensors' distance, relative to the expected one's norm or at least to `least`."""
    if tensor is None or tensor.shape != expected.shape:
        return Difference(what, math.inf)
    norm = max(float(expected.double().norm()), least)
    error = float((tensor.double() - expected.double()).norm())
    return Difference(what, error / norm if norm else error)
