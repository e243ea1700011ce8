"""PPO's critic: a second trained model with a scalar head that learns the values of states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from burnish.algorithms.critic import value_loss_fn
from burnish.algorithms.schedule import learning_rate
from burnish.boxes.shards import Shard, ShardSource
from burnish.config.schema import LoraConfig, ModelConfig, RunConfig
from burnish.data.vocabularies import require_same_vocabulary, vocabulary_of
from burnish.engines.base import Engine
from burnish.engines.factory import settings_beside
from burnish.errors import UsageError
from burnish.methods.parts.policy_update import CRITIC
from burnish.models.heads import has_value_head
from burnish.models.loading import (
    FreshSource,
    read_model_config,
    require_embeddings,
    weights_source,
)
from burnish.models.meta_init import build_on_meta, count_flops
from burnish.models.names import tensor_specs
from burnish.models.value_head import value_config
from burnish.records import Batch
from burnish.runs.setup import Foundation, Learner, make_run_engine, prove_model, with_assets
from burnish.tracking.stats import Stats


def critic_foundation(policy: Foundation) -> Foundation:
    """Return the critic's start: `critic.path`, or the policy's backbone with a fresh head.

    Every weight is trained, even if the policy trains an adapter, or with `critic.lora_rank` an adapter and the head.
    """
    config = policy.config
    lora = _critic_lora(config)
    model = config.model
    if config.critic.path is not None:
        model = model.model_copy(update={"path": config.critic.path, "fresh": None})
        own = vocabulary_of(config.critic.path)
        if own is not None:
            tokens = policy.tokenizer.get_vocab()
            require_same_vocabulary(config.critic.path, "critic.path", tokens, own)
    hf_config = value_config(read_model_config(model))
    engine = settings_beside(hf_config, config.engine)
    optim = config.optim.model_copy(update={"lr": config.critic.lr})
    if lora is not None:
        if model.path is None:
            raise UsageError(
                "only the adapter of a new critic would be saved",
                have=f"critic.lora_rank: {lora.rank}, and no model.path",
                want="a model that the adapter belongs to",
                do="set critic.path or model.path, or critic.lora_rank=0",
            )
        model = model.model_copy(update={"lora": lora, "train": []})
        config = config.model_copy(update={"model": model})
    config = config.model_copy(update={"engine": engine, "optim": optim})
    critic = valued(replace(policy, config=config, card=""), model, hf_config)
    if lora is None:
        return critic
    from burnish.methods.parts.adapted_scorer import adapted_scorer

    is_beside = policy.adapter is not None and config.critic.path is None
    return adapted_scorer(critic, policy.adapter["base"] if policy.adapter and is_beside else None)


def _critic_lora(config: RunConfig) -> LoraConfig | None:
    """Return the adapter of `critic.lora_rank`, or None."""
    rank = config.critic.lora_rank
    own: dict[str, Any] = {"rank": rank, "alpha": "auto", "path": None, "modules_to_save": []}
    return config.model.lora.model_copy(update=own) if rank else None


def valued(foundation: Foundation, model: ModelConfig, hf_config: PretrainedConfig) -> Foundation:
    """Return a foundation with a scalar head, `hf_config`, on the backbone of `model`, whose every weight is trained."""
    require_embeddings(hf_config, foundation.tokenizer)
    engine = foundation.config.engine
    prove_model(hf_config, foundation.layout, foundation.device, engine=engine)
    source = value_source(model, hf_config, foundation.config.seed)
    return with_assets(
        replace(
            foundation,
            hf_config=hf_config,
            source=source,
            base=source,
            adapter=None,
            composite=None,
            flops=count_flops(hf_config),
            adapted=0,
        )
    )


@dataclass(frozen=True, slots=True)
class Critic(Learner):
    """The critic on this rank."""

    total_steps: int

    @classmethod
    def make(cls, policy: Foundation, total_steps: int, beside: Engine) -> Critic:
        """Make a critic without weights; `beside` is the policy's engine."""
        foundation = critic_foundation(policy)
        engine = make_run_engine(foundation, foundation.config.optim, beside)
        return cls(engine, foundation, total_steps)

    def update(self, batch: Batch, step: int) -> Stats:
        """Learn from a mini-batch with returns and old values. Collective."""
        config = self.foundation.config
        loss = value_loss_fn(
            config.algorithm.aggregation, config.critic.clip, config.rollout.max_response_length
        )
        lr = learning_rate(step, self.total_steps, config.optim)
        stats = self.engine.forward_backward(batch.without_experts(), loss)
        stats = stats.merge(self.engine.optim_step(lr))
        return stats.prefixed(f"{CRITIC}/")


def value_source(config: ModelConfig, hf_config: PretrainedConfig, seed: int) -> ShardSource:
    """Return the initial weights of a model with a value head. A language model gives the backbone only."""
    if config.path is None or has_value_head(backbone := read_model_config(config)):
        return weights_source(config, hf_config, seed)
    has = {spec.name for spec in tensor_specs(build_on_meta(backbone))}
    head = {spec.name for spec in tensor_specs(build_on_meta(hf_config))} - has
    read = weights_source(config, backbone, seed)
    fresh = FreshSource(hf_config, seed)
    return _PartlyFresh(read, fresh, frozenset(head))


@dataclass(frozen=True, slots=True)
class _PartlyFresh:
    read: ShardSource
    fresh: FreshSource
    names: frozenset[str]
    """The tensors that are initialized at random."""

    def fill(self, shards: Iterable[Shard]) -> None:
        shards = list(shards)
        self.read.fill(shard for shard in shards if shard.spec.name not in self.names)
        self.fresh.fill(shard for shard in shards if shard.spec.name in self.names)
