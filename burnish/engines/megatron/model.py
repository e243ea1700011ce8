"""Megatron's GPT model, made to run a scoring plan: packed tokens in, hidden states or a log-prob and an entropy per token out.

The output layer's logits are computed in chunks by `burnish.models.logprobs`, of each rank's part of the
vocabulary, so Megatron's own loss is not used. Left out: a value head.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from burnish.engines.megatron.attention import Packing
from burnish.models.fused import rotation_of
from burnish.models.logprobs import LogprobOptions, token_logprobs
from burnish.models.routing import Routing
from burnish.models.scorer import ScoringPlan
from burnish.models.vocabulary import VocabularyPart


class PackedGPT(GPTModel):
    """A pipeline stage of the model; one of several of this rank where stages are virtual."""

    def __init__(
        self,
        *args: Any,
        rotary: nn.Module,
        tokens: int,
        padding: int | None,
        chunk: int,
        **options: Any,
    ) -> None:
        """`rotary`: transformers' module of rotary positions; `tokens`: the real size of the vocabulary; `padding`: the token whose embedding is not trained; `chunk`: tokens whose logits exist at one time."""
        super().__init__(*args, position_embedding_type="none", **options)
        self.padding, self.chunk = padding, chunk
        self._rotary = [rotary]  # in a list, so that it is no part of this module
        group = self.pg_collection.tp
        rows = self.vocab_size // group.size()
        first = group.rank() * rows
        own = range(first, min(first + rows, tokens))
        self.part = VocabularyPart(own, group)
        """The tokens of this rank's rows of the embedding and the output layer; rows beyond them are padding."""

    def forward(
        self, plan: ScoringPlan, temperature: float = 1.0, routing: Routing | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Hidden states [C, 1, H] of this stage's tokens; in the last stage log-probs and entropies [N] of the plan's predictions.

        All but the first stage take their input from `set_input_tensor`. `routing` says what the
        routers do, where they are not left alone.
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

    def _scored(
        self, hidden: Tensor, plan: ScoringPlan, temperature: float
    ) -> tuple[Tensor, Tensor]:
        states, part = hidden[:, 0], None if self.part.group.size() == 1 else self.part
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
