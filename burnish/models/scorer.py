"""Score tokens by a model: a log-prob and an entropy, or a value, for each.

The head runs inside `Scorer.forward`, so a sharded `Scorer` gathers the head's weight, tied or not. A head of its own may be sharded apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig, PreTrainedModel

from burnish.errors import IncompatibleError
from burnish.families import family_of
from burnish.models.flops import Passed
from burnish.models.heads import has_value_head
from burnish.models.kernels.attention import PackedAttention, PackedLayout
from burnish.models.logprobs import LogitTransform, LogprobOptions, token_logprobs
from burnish.models.meta_init import position_limit
from burnish.models.packing import Indices, PrefixTree, RowMap, TokenSharing, host_tensor
from burnish.records import TokenOutputs, plan_on_device


class Scorer(nn.Module):
    """A model with a language or value head, which scores packed sequences."""

    def __init__(self, model: PreTrainedModel, chunk: int = 2048) -> None:
        """`chunk`: tokens whose logits exist at one time."""
        super().__init__()
        self.model = model
        self.chunk = chunk
        self._position_limit = position_limit(model.config)
        self._has_hooks = False  # of `burnish.models.routing`
        self.vocabulary: Any = None
        """This rank's part of the vocabulary, a `burnish.models.parts.VocabularyPart`; None: all of it."""
        self.rows: Any = None
        """Fetches rows of the embeddings, a `burnish.engines.torch.embedding_rows.EmbeddingRows`; None: this rank has them all."""
        self.scores_values = has_value_head(model.config)
        if self.scores_values:
            return
        self.transform = logit_transform(model.config)
        head = model.get_output_embeddings()
        # PEFT wraps an output layer that is trained beside an adapter.
        own = getattr(head, "original_module", head)
        if not isinstance(own, nn.Linear) or own.bias is not None:
            raise IncompatibleError(
                f"{type(model).__name__} has an output layer that Burnish does not compute",
                have=head,
                want="a linear layer without bias",
                do="train a model of another family",
            )
        if own is head:
            model.set_output_embeddings(OutputLayer(own))

    def forward(
        self,
        plan: ScoringPlan,
        temperature: float = 1.0,
        routing: Any = None,
        probe: Any = None,
    ) -> TokenOutputs:
        """Score the plan's tokens; `temperature` divides the logits, `routing` instructs the routers, `probe` reads the states.

        Entry t of the outputs [T] is for the prediction of token t, and 0 if the plan does not score it.
        """
        part = self.vocabulary
        longest = max(plan.passed.attended, default=0)
        if self._position_limit is not None and longest > self._position_limit:
            raise IncompatibleError(
                "a sequence is too long to be packed with others",
                have=f"{longest} tokens",
                want=f"at most {self._position_limit}, the original length of the model's rope_type: a longer one changes the positions of the others",
                do="lower data.max_length, or data.max_prompt_length and rollout.max_response_length",
            )
        if routing is not None and not self._has_hooks:
            from burnish.models.routing import hook_routers

            hook_routers(self.model)
            self._has_hooks = True
        if self.rows is not None:
            self.rows.begin(plan.fetched)
        inputs = {"input_ids": plan.input_ids[None]}
        if part is not None:
            embedding = self.model.get_input_embeddings()
            inputs = {"inputs_embeds": part.embed(embedding, plan.input_ids)[None]}
        hidden = self.model.base_model(
            **inputs,
            position_ids=plan.positions[None],
            use_cache=False,
            packing=plan.packing,
            routing=routing,
        ).last_hidden_state.squeeze(0)  # [0] would have zeros in its backward pass
        if self.scores_values:
            from burnish.models.value_head import state_values, value_head

            values = state_values(hidden, value_head(self.model))
            values = values if part is None else part.all_values(values)
            return TokenOutputs(values=plan.spread(plan.predictors.take(values)))
        # Only states that predict a trained token go through the head. A prompt's tokens would cost logits over the whole
        # vocabulary, and nobody reads them.
        states = plan.predictors.take(hidden if part is None else part.all_rows(hidden))
        options = LogprobOptions(self.chunk, temperature, self.transform)
        head = self.model.get_output_embeddings()
        how = (plan, options, part, probe)
        if isinstance(head, OutputLayer):
            logprobs, entropy, *probed = head.score(states, *how)
        else:
            logprobs, entropy, *probed = score_states(head.weight, states, *how)
        outputs = TokenOutputs(logprobs=logprobs, entropy=entropy)
        return replace(outputs, probed=probed[0]) if probed else outputs


class OutputLayer(nn.Linear):
    """A linear output layer without bias, whose `score` makes no whole logits. FSDP2 can gather its weight for that alone."""

    def __init__(self, layer: nn.Linear) -> None:
        """Take the weight of `layer`."""
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = layer.weight
        self.register_parameter("bias", None)

    def score(self, states: Tensor, *how: Any) -> tuple[Any, ...]:
        """Return `score_states` of this layer's weight."""
        return score_states(self.weight, states, *how)


def score_states(
    weight: Tensor,
    states: Tensor,
    plan: ScoringPlan,
    options: LogprobOptions,
    part: Any,
    probe: Any,
) -> tuple[Any, ...]:
    """Return log-probs [T], entropies [T] and, given a probe, what it reads of states [N, H] and the output layer's weight [V, H]."""
    states = states.to(weight.dtype)  # Mamba 2's last norm returns fp32
    found = token_logprobs(states, weight, plan.targets, options, part, plan.learned)
    logprobs, entropy = (plan.spread(values) for values in found)
    probed = () if probe is None else (probe.read(states, weight, plan, options, part),)
    return logprobs, entropy, *probed


@dataclass(frozen=True, slots=True, eq=False)
class ScoringPlan:
    """A forward pass over packed sequences on this rank, with tensors on the model's device.

    Of T packed tokens this rank computes C (`burnish.models.packing`) and scores N predictions.
    """

    input_ids: Tensor
    """[C] int64."""
    positions: Tensor
    """[C] int64, from 0 in every sequence."""
    packing: PackedAttention
    """Attention between computed tokens."""
    predictors: RowMap
    """[N], the computed token from which each prediction is made."""
    targets: Tensor
    """[N] int64, the token that is predicted."""
    predicted: Tensor
    """[N] int64, the place of each predicted token among the computed tokens of all ranks."""
    results: RowMap
    """[M], the place of each scored token among the computed tokens of all ranks."""
    scored: Tensor
    """[M] int64, the tokens that are scored."""
    tree: PrefixTree
    """Which computed token stands for each of the T."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    deal: TokenSharing
    """The computed tokens of each rank."""
    passed: Passed
    """Counts over all ranks that share these tokens."""
    fetched: Any = None
    """The rows of the embeddings that come from other ranks; None: this rank has them all."""
    learned: Tensor | None = None
    """[K] int64, which of the N predictions may have a gradient; None: all. The host knows, so that no pass waits for the device."""

    @classmethod
    def of(  # noqa: PLR0913
        cls,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        loss_mask: Tensor | None = None,
        device: torch.device | None = None,
        group: ProcessGroup | None = None,
        multiple: int = 1,
        *,
        shares: bool = True,
        rows: Any = None,
        learned: Tensor | None = None,
    ) -> ScoringPlan:
        """Plan on the host, where `input_ids` [T] and `cu_seqlens` [S + 1] lie, for a model on `device`.

        Tokens in `loss_mask` [T], or all, are scored. Those in `learned` [T], or all, may have a gradient. The ranks of `group` share
        the tokens; each gets a multiple of `multiple`. Unless it `shares` prefixes, all tokens are computed. Collective if there are
        `rows`, the scorer's.
        """
        device = device or input_ids.device
        lengths = cu_seqlens.diff().tolist()
        ids = input_ids.numpy()
        tree = PrefixTree.of(ids, lengths, shares=shares)
        deal = TokenSharing.of(len(tree.computed), group, multiple)
        packing = PackedLayout.of_tree(tree, lengths, device)
        scored = scored_tokens(cu_seqlens, loss_mask).numpy()
        predicted, first = np.unique(tree.rows[scored], return_index=True)
        predictors = tree.rows[scored[first] - 1]
        own = deal.owner(predictors) == deal.rank
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = (np.arange(len(ids)) - starts)[tree.computed]
        targets = ids[tree.computed[predicted]]
        own_ids = deal.mine(ids[tree.computed])
        plan = cls(
            input_ids=host_tensor(own_ids),
            positions=host_tensor(deal.mine(positions)),
            packing=packing,
            predictors=RowMap.of(deal.place(predictors[own]), device),
            targets=host_tensor(targets[own]),
            predicted=host_tensor(predicted[own]),
            results=RowMap.of(tree.rows[scored], device),
            scored=host_tensor(scored),
            tree=tree,
            lengths=tuple(lengths),
            deal=deal,
            passed=Passed(len(tree.computed), len(predicted), packing.lengths, packing.begun),
            fetched=None if rows is None else rows.plan(own_ids),
            learned=None
            if learned is None
            else _learned_places(tree, scored, predicted[own], learned),
        )
        plan = plan_on_device(plan, device)
        return replace(plan, packing=attention_of_part(plan.packing, deal))

    def spread(self, values: Tensor) -> Tensor:
        """Return values [T] of all tokens, 0 if not scored, from this rank's predictions [N]. Collective if ranks share tokens."""
        if self.deal.group is None and len(self.tree.computed) == len(self.tree.rows):
            # No sequences share tokens, so predictions have the order of the scored tokens.
            return values.new_zeros(len(self.tree.rows)).index_copy(0, self.scored, values)
        predictions = values.new_zeros(self.deal.count).index_copy(0, self.predicted, values)
        if self.deal.group is not None:
            from burnish.distributed.tensor_collectives import all_reduce_replicated

            predictions = all_reduce_replicated(predictions, self.deal.group)
        by_token = self.results.take(predictions)
        return values.new_zeros(len(self.tree.rows)).index_copy(0, self.scored, by_token)


def _learned_places(
    tree: PrefixTree, scored: Indices, predicted: Indices, learned: Tensor
) -> Tensor | None:
    # Sequences with the same beginning share predictions. One has a gradient if it has it in any of them.
    reached = tree.rows[scored[learned.numpy()[scored]]]
    places = np.flatnonzero(np.isin(predicted, reached))
    return None if len(places) == len(predicted) else host_tensor(places)


def attention_of_part(packing: PackedAttention, deal: TokenSharing) -> PackedAttention:
    """Return attention for this rank's tokens from that for all."""
    if deal.group is None and deal.rows == deal.count:
        return packing
    from burnish.models.kernels.ulysses import Ulysses

    return Ulysses(packing, deal)


def scored_tokens(cu_seqlens: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Return the indices [M] int64, on the host, of tokens in `loss_mask` [T] or all, without each sequence's first."""
    starts = cu_seqlens[:-1].long()
    total = int(cu_seqlens[-1])
    is_scored = torch.ones(total, dtype=torch.bool) if loss_mask is None else loss_mask.clone()
    is_scored[starts[starts < total]] = False
    return is_scored.nonzero()[:, 0]


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """Return the model's transform of its logits."""
    text = config.get_text_config()
    family = family_of(text.model_type)
    scale = float(getattr(text, "logit_scale", None) or 1.0)
    scaling = float(getattr(text, "logits_scaling", None) or 1.0)
    scale *= scaling if family.multiplies_logits_scaling else 1 / scaling
    scale *= float(getattr(text, "lm_head_multiplier", None) or 1.0)
    softcap = getattr(text, "final_logit_softcapping", None)
    return LogitTransform(scale, None if softcap is None else float(softcap))
