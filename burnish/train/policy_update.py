"""From scored groups to the batches of a step's updates: KL penalties, values, advantages, mini-batches.

Left out: the loss (`burnish.algorithms.loss`) and the updates themselves (`burnish.train.rl`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from burnish.algorithms.advantages import ScoredRollouts, advantages, load_advantage
from burnish.algorithms.gae import gae, value_stats
from burnish.algorithms.kl import kl_penalty
from burnish.config.parts import part_names
from burnish.config.schema import RewardConfig, RunConfig
from burnish.data.batching import make_batch
from burnish.data.loader import order
from burnish.distributed.collectives import gather_objects
from burnish.engines.base import Engine
from burnish.errors import BurnishError
from burnish.models.flops import ModelFlops
from burnish.records import Batch, Example, Experts, Floats, Rollout, TokenOutputs
from burnish.records.seeds import derive_seed
from burnish.tracking.stats import Stats
from burnish.train.critic import CRITIC, Critic

Groups = Sequence[Sequence[Rollout]]
"""The rollouts of a step, by prompt."""
Forward = Callable[[Batch], list[TokenOutputs]]
"""Scores a batch, as `Engine.forward` does."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The model that learns, and what it is held to."""

    engine: Engine
    """The trained model."""
    reference: Forward | None
    """Scores by the model that training started from; None where no KL term wants it."""
    costs: ModelFlops
    """What its sequences cost in an update, by which its batches are balanced."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What every completion token is held to: one fp32 array per rollout, groups end to end."""

    advantages: list[Floats]
    """How much better it was than expected."""
    returns: list[Floats] | None = None
    """With a critic: what that is to learn of the state before it."""
    values: list[Floats] | None = None
    """With a critic: what that said of this state."""
    logprobs: list[Floats] | None = None
    """With KL in the reward: the policy's log-probs before the updates."""

    @property
    def means(self) -> list[float]:
        """Each rollout's mean advantage; 0 of an empty one."""
        return [float(each.mean()) if len(each) else 0.0 for each in self.advantages]

    @property
    def stats(self) -> Stats:
        """How good the critic was, as `critic/...`; nothing without one."""
        if self.values is None or self.returns is None:
            return Stats()
        return value_stats(self.values, self.returns).prefixed(f"{CRITIC}/")

    def by_name(self) -> dict[str, list[Floats]]:
        """The arrays by their names in an `Example`, those that there are."""
        arrays = {
            "advantages": self.advantages,
            "returns": self.returns,
            "old_values": self.values,
        }
        return {name: each for name, each in arrays.items() if each is not None}


def assign_credit(
    groups: Groups, policy: Policy, critic: Critic | None, config: RunConfig
) -> Credit:
    """Advantages of every completion token, and what the critic is to learn, where there is one. Collective."""
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts]
    kind, kl = config.algorithm.advantage, config.algorithm.kl
    penalties = logprobs = None
    if kl.coef > 0 and kl.place == "reward":
        penalties, logprobs = _kl_penalties(rollouts, policy, config)
    if kind == "gae":
        values = _values(rollouts, policy, critic, config)
        found = gae(rewards, values, penalties, config.critic.gamma, config.critic.lam)
        return Credit(found.advantages, found.returns, values, logprobs)
    scored = ScoredRollouts.of(
        rewards,
        [number for number, group in enumerate(groups) for _ in group],
        [len(rollout.completion.token_ids) for rollout in rollouts],
        penalties,
        **_reward_parts(rollouts, config.reward),
        greedy_rewards=_greedy_rewards(rollouts),
    )
    return Credit(advantages(load_advantage(kind), scored), logprobs=logprobs)


def _reward_parts(rollouts: Sequence[Rollout], config: RewardConfig) -> dict[str, Any]:
    """Return `parts` and `weights` of `ScoredRollouts`."""
    weights = [each.weight for each in config.functions] + [each.weight for each in config.models]
    names = part_names(config)
    parts = {
        name: np.array([rollout.reward_parts.get(name, 0.0) for rollout in rollouts])
        for name in names
    }
    return {"parts": parts, "weights": dict(zip(names, weights, strict=True))}


def _greedy_rewards(rollouts: Sequence[Rollout]) -> Any:
    found = [rollout.greedy_reward for rollout in rollouts]
    return None if None in found else np.array(found, dtype=np.float64)


def minibatches(groups: Groups, credit: Credit, policy: Policy, config: RunConfig) -> list[Batch]:
    """The batches of the step's updates, whole groups divided evenly among them.

    Rollouts without a completion token are left out, and a mini-batch of nothing else as well.
    """
    arrays = credit.by_name()
    completions = [rollout.completion for group in groups for rollout in group]
    if config.algorithm.old_logprobs == "rollout":
        arrays["old_logprobs"] = [each.logprobs for each in completions]
    else:
        arrays["sampled_logprobs"] = [each.sampled_logprobs for each in completions]
        if credit.logprobs is not None and config.batch.minibatches * config.batch.epochs > 1:
            arrays["old_logprobs"] = credit.logprobs
    rows = iter(zip(*arrays.values(), strict=True))
    examples = [
        [_example(rollout, dict(zip(arrays, next(rows), strict=True)), config) for rollout in group]
        for group in groups
    ]
    batches = []
    for part in np.array_split(np.arange(len(groups)), config.batch.minibatches):
        chosen = [e for number in part for e in examples[number] if e.loss_mask.any()]
        if chosen:
            batches.append(_batch(chosen, policy, config))
    return batches


def with_logprobs(batches: Sequence[Batch], policy: Policy, config: RunConfig) -> list[Batch]:
    """The batches with what the policy's updates are measured against. Collective.

    Where several updates follow each other, in mini-batches or `batch.epochs`, the policy's log-probs are computed here, before any of
    them, and so are the experts that tokens go to where routers are replayed
    (`algorithm.router_replay`: recompute). A single update is measured against itself. With KL in the loss
    the reference's log-probs come from here too. A critic needs none of this.
    """
    algorithm, batches = config.algorithm, list(batches)
    kept = all(m.old_logprobs is not None for batch in batches for m in batch.microbatches)
    replayed = algorithm.router_replay == "recompute"
    if len(batches) * config.batch.epochs > 1 and (replayed or not kept):
        batches = [_as_before(batch, policy, replayed, kept) for batch in batches]
    if policy.reference is not None and algorithm.kl.place == "loss":
        batches = [
            batch.with_ref_logprobs(policy.reference(batch.without_experts())) for batch in batches
        ]
    return batches


def in_epochs(batches: Sequence[Batch], config: RunConfig, step: int) -> list[Batch]:
    """The mini-batches in the order of a step's updates: as they are in the first of `batch.epochs`, in an order drawn from (seed, step, epoch) in each further one."""
    ordered = list(batches)
    for epoch in range(1, config.batch.epochs):
        seed = derive_seed(config.seed, "mini-batches", step)
        ordered += [batches[i] for i in order(seed, epoch, len(batches))]
    return ordered


def policy_stats(learned: Stats) -> Stats:
    """What updates of the policy said, by its names in a step's line: `rollout/mismatch_...` of the generator, the rest as `actor/...`."""
    names = {name: "rollout/" if name.startswith("mismatch_") else "actor/" for name in learned}
    return Stats({names[name] + name: metric for name, metric in learned.items()})


def _as_before(batch: Batch, policy: Policy, replayed: bool, kept: bool) -> Batch:
    """The batch with what the policy does before any update: its log-probs unless they are `kept`, its experts where `replayed`."""
    outputs = policy.engine.forward(batch, experts=replayed)
    batch = batch if kept else batch.with_old_logprobs(outputs)
    return batch.with_experts(outputs) if replayed else batch


def _example(rollout: Rollout, arrays: Mapping[str, Floats], config: RunConfig) -> Example:
    """The sequence of a rollout with `arrays`, which have an entry per completion token."""
    zeros = np.zeros(len(rollout.prompt.token_ids), dtype=np.float32)
    whole: dict[str, Any] = {name: np.concatenate([zeros, a]) for name, a in arrays.items()}
    example = replace(to_example(rollout, config), **whole)
    if config.algorithm.mask_truncated and rollout.completion.stop_reason == "length":
        return replace(example, loss_mask=np.zeros_like(example.loss_mask))
    return example


def to_example(rollout: Rollout, config: RunConfig) -> Example:
    """The sequence of a rollout; its completion is what is trained on.

    Raises `BurnishError` where its tokens are to go to the generator's experts and that has not said which they were.
    """
    replayed = config.algorithm.router_replay == "rollout"
    prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids
    return Example(
        token_ids=np.concatenate([prompt, completion]),
        loss_mask=np.arange(len(prompt) + len(completion)) >= len(prompt),
        experts=_experts(rollout) if replayed and len(completion) else None,
    )


def _experts(rollout: Rollout) -> Experts:
    """Of all tokens. The last one's, which predicts nothing, are those of the one before it."""
    experts = rollout.completion.experts
    tokens = len(rollout.prompt.token_ids) + len(rollout.completion.token_ids)
    if experts is None or len(experts) != tokens - 1:
        raise BurnishError(
            f"the generator has not said which experts the tokens of prompt {rollout.prompt.index} went to",
            have="none" if experts is None else f"those of {len(experts)} tokens",
            want=f"those of all {tokens} tokens but the last",
            do="set algorithm.router_replay=recompute, which asks the engine for them, or none",
        )
    whole: Experts = np.concatenate([experts, experts[-1:]])
    return whole


def _kl_penalties(
    rollouts: Sequence[Rollout], policy: Policy, config: RunConfig
) -> tuple[list[Floats], list[Floats]]:
    """Return the penalty of each completion token, and the policy's log-probs that it was computed from."""
    if policy.reference is None:
        raise ValueError("KL in the reward needs a reference model")
    reference, kl = policy.reference, config.algorithm.kl

    def both(batch: Batch) -> list[Floats]:
        mine, theirs = policy.engine.forward(batch), reference(batch.without_experts())
        return [
            np.stack([_numbers(own.logprobs), _numbers(other.logprobs)], axis=-1)
            for own, other in zip(mine, theirs, strict=True)
        ]

    found = [pair.reshape(-1, 2) for pair in _of_completions(rollouts, both, policy, config)]
    logprobs = [np.ascontiguousarray(pair[:, 0]) for pair in found]
    penalties = [
        kl_penalty(kl.estimator, kl.coef, own, np.ascontiguousarray(pair[:, 1]))
        for own, pair in zip(logprobs, found, strict=True)
    ]
    return penalties, logprobs


def _values(
    rollouts: Sequence[Rollout], policy: Policy, critic: Critic | None, config: RunConfig
) -> list[Floats]:
    if critic is None:
        raise ValueError("generalized advantage estimation needs a critic")
    engine = critic.learner.engine

    def values(batch: Batch) -> list[Floats]:
        return [_numbers(output.values) for output in engine.forward(batch.without_experts())]

    return _of_completions(rollouts, values, policy, config)


def _of_completions(
    rollouts: Sequence[Rollout],
    compute: Callable[[Batch], list[Floats]],
    policy: Policy,
    config: RunConfig,
) -> list[Floats]:
    """Return one row per completion token, by rollout, the same on every rank. Collective.

    `compute` returns them for the tokens of each micro-batch of this rank.
    """
    answered = [i for i, rollout in enumerate(rollouts) if len(rollout.completion.token_ids)]
    found: list[Floats] = [np.zeros(0, dtype=np.float32) for _ in rollouts]
    if not answered:
        return found
    batch = _batch([to_example(rollouts[i], config) for i in answered], policy, config)
    mine = batch.by_example(compute(batch))
    for share in gather_objects(mine, policy.engine.layout):
        for number, values in share.items():
            rollout = rollouts[answered[number]]
            found[answered[number]] = values[len(rollout.prompt.token_ids) :]
    return found


def _numbers(tensor: Tensor) -> Floats:
    found: Floats = tensor.float().cpu().numpy()
    return found


def _batch(examples: Sequence[Example], policy: Policy, config: RunConfig) -> Batch:
    return make_batch(
        examples,
        policy.engine.layout,
        config.microbatch_tokens,
        policy.costs,
        temperature=config.rollout.temperature,
    )
