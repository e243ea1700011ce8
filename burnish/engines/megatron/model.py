"""Megatron's GPT model with packed tokens in; hidden states, log-probs and entropies, or values out.

`burnish.models.logprobs` computes logits in chunks from each rank's part of the vocabulary, so Megatron's own loss is not used. A
value head replaces the output layer, whole on every tensor rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from burnish.engines.megatron.attention import Packing
from burnish.models.kernels.fused import rotation_of
from burnish.models.logprobs import LogprobOptions, VocabularyPart, token_logprobs
from burnish.models.routing import Routing
from burnish.models.scorer import ScoringPlan
from burnish.models.value_head import state_values
from burnish.records import TokenOutputs


class PackedGPT(GPTModel):
    """A pipeline stage of the model; one of several of this rank where stages are virtual."""

    def __init__(
        self,
        *args: Any,
        rotary: nn.Module,
        tokens: int,
        padding: int | None,
        chunk: int,
        value_bias: bool | None = None,
        **options: Any,
    ) -> None:
        """Take transformers' module `rotary`, the vocabulary's real size `tokens`, the token `padding` whose embedding is not trained, the
        `chunk` of tokens per logits, and `value_bias`: whether a value head has a bias, None for a language model.
        """
        super().__init__(*args, position_embedding_type="none", **options)
        self.padding, self.chunk = padding, chunk
        self._rotary = [rotary]  # in a list, so that it is no part of this module
        group = self.pg_collection.tp
        rows = self.vocab_size // group.size()
        first = group.rank() * rows
        own = range(first, min(first + rows, tokens))
        self.part = VocabularyPart(own, group)
        """The tokens of this rank's rows of the embedding and the output layer; rows beyond them are padding."""
        self.score: nn.Linear | None = None
        """The value head, in the last stage of a model that has one."""
        if self.post_process and value_bias is not None:
            del self.output_layer
            self.score = _score_head(self.config, bias=value_bias)

    def forward(
        self, plan: ScoringPlan, temperature: float = 1.0, routing: Routing | None = None
    ) -> Tensor | TokenOutputs:
        """Return hidden states [C, 1, H] of this stage's tokens; the last stage returns the outputs of each token.

        Later stages take their input from `set_input_tensor`. `routing` instructs the routers, if given.
        """
        cos, sin = self._rotary[0](plan.positions.float(), plan.positions[None])
        packing = Packing(attends=plan.packing, rotation=rotation_of(cos, sin), routing=routing)
        hidden: Tensor = self.decoder(
            hidden_states=self._embedded(plan.input_ids) if self.pre_process else None,
            attention_mask=None,
            packed_seq_params=packing,
        )
        return self._scored(hidden, plan, temperature) if self.post_process else hidden

    def _embedded(self, ids: Tensor) -> Tensor:
        """Hidden states [C, 1, H] of tokens; that of padding gets no gradient, as in transformers."""
        hidden: Tensor = self.embedding(ids[None], None)
        if self.padding is not None and hidden.requires_grad:
            own = len(hidden) * self.part.group.rank() if self.config.sequence_parallel else 0
            filler = (ids == self.padding).narrow(0, own, len(hidden))
            hidden.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: gradient.masked_fill(filler[:, None, None], 0)
            )
        return hidden

    def _scored(self, hidden: Tensor, plan: ScoringPlan, temperature: float) -> TokenOutputs:
        if self.score is not None:
            values = state_values(hidden[:, 0], self.score)
            values = self.part.all_values(values) if self.config.sequence_parallel else values
            return TokenOutputs(values=plan.spread(plan.predictors.take(values)))
        logprobs, entropy = self._logprobs(hidden[:, 0], plan, temperature)
        return TokenOutputs(logprobs=plan.spread(logprobs), entropy=plan.spread(entropy))

    def _logprobs(
        self, states: Tensor, plan: ScoringPlan, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Of the plan's predictions [N], from the states [C, H] that this rank has."""
        part = None if self.part.group.size() == 1 else self.part
        if self.config.sequence_parallel:
            states = self.part.all_rows(states)
        elif part is not None:
            states = copy_to_tensor_model_parallel_region(states, group=self.part.group)
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        options = LogprobOptions(self.chunk, temperature)
        predictors = plan.predictors.take(states)
        return token_logprobs(
            predictors, weight[: len(self.part.tokens)], plan.targets, options, part
        )


def _score_head(config: TransformerConfig, *, bias: bool) -> nn.Linear:
    """A head with undefined weights, whose gradient is that of this rank's tokens, as a norm's is."""
    head: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear,
        config.hidden_size,
        1,
        bias=bias,
        device=torch.cuda.current_device(),
        dtype=config.params_dtype,
    )
    for parameter in head.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return head
