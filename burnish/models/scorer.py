"""The model as the training engine sees it: packed tokens in, a log-prob and an entropy per token out.

Keeping the head inside one forward means that whoever shards this module gathers the head's weight
for it, tied or not. Router losses of mixture-of-experts models are not computed: post-training
runs without them, and the routers get the gradient of the loss alone.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from burnish.errors import IncompatibleError
from burnish.models.attention import Attends
from burnish.models.logprobs import LogitTransform, LogprobOptions, token_logprobs
from burnish.records import TokenOutputs

TESTED_FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "olmo2"}
)
"""`model_type`s whose log-probs and gradients the tests hold equal to plain transformers."""

_log = logging.getLogger(__name__)


class Scorer(nn.Module):
    """A causal language model that scores packed sequences."""

    def __init__(self, model: PreTrainedModel, chunk: int = 2048) -> None:
        """`chunk`: tokens whose logits exist at one time."""
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.transform = logit_transform(model.config)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise IncompatibleError(
                f"{type(model).__name__} has an output layer that Burnish does not compute",
                have=head,
                want="a linear layer without bias",
                do="train a model of another family",
            )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        packing: Attends,
        temperature: float = 1.0,
        rows: Tensor | None = None,
    ) -> TokenOutputs:
        """Score packed tokens: `input_ids` [T] at `positions` [T] (from 0 in every sequence).

        Entry t of the outputs [T] concerns the prediction of token t from the tokens before it.
        `temperature` divides the logits. Only the tokens `rows` [N] are scored where given (see
        `scored_tokens`), all that have a prediction where not; other entries hold 0.
        """
        if rows is None:
            rows = positions.nonzero()[:, 0]
        hidden = self.model.base_model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            packing=packing,
        ).last_hidden_state[0]
        head = self.model.get_output_embeddings().weight
        options = LogprobOptions(self.chunk, temperature, self.transform)
        found = token_logprobs(hidden.index_select(0, rows - 1), head, input_ids[rows], options)
        logprobs, entropy = (_spread(values, rows, len(input_ids)) for values in found)
        return TokenOutputs(logprobs=logprobs, entropy=entropy)


def scored_tokens(cu_seqlens: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Indices [N] int64 of the tokens that have a prediction and, where a mask [T] is given, are in it.

    The first token of every sequence has none. Call it on the host, so that no device waits.
    """
    starts, total = cu_seqlens[:-1].long(), int(cu_seqlens[-1])
    wanted = torch.ones(total, dtype=torch.bool) if loss_mask is None else loss_mask.clone()
    wanted[starts[starts < total]] = False
    return wanted.nonzero()[:, 0]


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """What this family does to its logits, from the configuration fields that transformers uses."""
    if config.model_type not in TESTED_FAMILIES:
        _log.warning(
            "model type %r is not among the families that Burnish tests (%s); its log-probs are "
            "computed as the output layer's, with logit_scale, logits_scaling and "
            "final_logit_softcapping where the configuration has them",
            config.model_type,
            ", ".join(sorted(TESTED_FAMILIES)),
        )
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitTransform(scale, None if softcap is None else float(softcap))


def _spread(values: Tensor, rows: Tensor, total: int) -> Tensor:
    """`values` [N] at `rows` of zeros [T]."""
    return values.new_zeros(total).index_copy(0, rows, values)
