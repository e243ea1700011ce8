"""From scored groups to the batches of a step's updates: KL penalties, advantages, mini-batches.

Left out: the loss (`burnish.algorithms.loss`) and the updates themselves (`burnish.trainers.rl`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from burnish.algorithms.advantages import advantages
from burnish.algorithms.kl import kl_penalty
from burnish.config.schema import RunConfig
from burnish.data.batching import make_batch
from burnish.engines.base import Engine
from burnish.models.flops import ModelFlops
from burnish.parallel.collectives import gather_objects
from burnish.records import Batch, Example, Floats, Rollout, TokenOutputs

Groups = Sequence[Sequence[Rollout]]
"""The rollouts of a step, by prompt."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The model that learns, and what it is held to."""

    engine: Engine
    """The trained model."""
    reference: Callable[[Batch], list[TokenOutputs]] | None
    """Scores batches as `Engine.forward` does, by the model that training started from; None where no KL term wants it."""
    flops: ModelFlops
    """What its sequences cost."""


def token_advantages(groups: Groups, policy: Policy, config: RunConfig) -> list[Floats]:
    """The advantage of every completion token, one fp32 array per rollout, groups end to end. Collective."""
    rollouts = [rollout for group in groups for rollout in group]
    membership = [number for number, group in enumerate(groups) for _ in group]
    kl = config.algorithm.kl
    penalties = None
    if kl.coef > 0 and kl.place == "reward":
        penalties = _kl_penalties(rollouts, policy, config)
    return advantages(
        config.algorithm.advantage,
        [rollout.reward for rollout in rollouts],
        membership,
        [len(rollout.completion.token_ids) for rollout in rollouts],
        penalties,
    )


def minibatches(
    groups: Groups, by_token: Sequence[Floats], policy: Policy, config: RunConfig
) -> list[Batch]:
    """The batches of the step's updates, whole groups divided evenly among them. Collective.

    Rollouts without a completion token are left out, and a mini-batch of nothing else as well.
    Where several updates follow each other, the log-probs that the first one is measured against
    are computed here, before any of them. A single update is measured against itself.
    """
    rollouts = iter(zip((r for group in groups for r in group), by_token, strict=True))
    kept = config.algorithm.old_logprobs == "rollout"
    examples = [
        [_example(*next(rollouts), keep_old_logprobs=kept) for _ in group] for group in groups
    ]
    batches = []
    for part in np.array_split(np.arange(len(groups)), config.batch.minibatches):
        chosen = [e for number in part for e in examples[number] if e.loss_mask.any()]
        if chosen:
            batches.append(_batch(chosen, policy, config))
    if len(batches) > 1 and not kept:
        batches = [batch.with_old_logprobs(policy.engine.forward(batch)) for batch in batches]
    if policy.reference is not None and config.algorithm.kl.place == "loss":
        batches = [batch.with_ref_logprobs(policy.reference(batch)) for batch in batches]
    return batches


def _example(rollout: Rollout, by_token: Floats, *, keep_old_logprobs: bool) -> Example:
    example = to_example(rollout)
    prompt = len(rollout.prompt.token_ids)
    return replace(
        example,
        advantages=_behind(prompt, by_token),
        old_logprobs=_behind(prompt, rollout.completion.logprobs) if keep_old_logprobs else None,
    )


def to_example(rollout: Rollout) -> Example:
    """The sequence of a rollout; its completion is what is trained on."""
    prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids
    return Example(
        token_ids=np.concatenate([prompt, completion]),
        loss_mask=np.arange(len(prompt) + len(completion)) >= len(prompt),
    )


def _kl_penalties(rollouts: Sequence[Rollout], policy: Policy, config: RunConfig) -> list[Floats]:
    if policy.reference is None:
        raise ValueError("KL in the reward needs a reference model")
    answered = [i for i, rollout in enumerate(rollouts) if len(rollout.completion.token_ids)]
    penalties: list[Floats] = [np.zeros(0, dtype=np.float32) for _ in rollouts]
    if not answered:
        return penalties
    batch = _batch([to_example(rollouts[i]) for i in answered], policy, config)
    mine = _by_example(batch, policy.engine.forward(batch))
    theirs = _by_example(batch, policy.reference(batch))
    local = {
        number: kl_penalty(
            config.algorithm.kl.estimator, config.algorithm.kl.coef, mine[number], theirs[number]
        )
        for number in mine
    }
    for share in gather_objects(local, policy.engine.layout):
        for number, penalty in share.items():
            rollout = rollouts[answered[number]]
            penalties[answered[number]] = penalty[len(rollout.prompt.token_ids) :]
    return penalties


def _by_example(batch: Batch, outputs: Sequence[TokenOutputs]) -> dict[int, Floats]:
    """This rank's log-probs by index in the batch's example list."""
    found: dict[int, Floats] = {}
    for micro, numbers, output in zip(batch.microbatches, batch.examples, outputs, strict=True):
        logprobs = output.logprobs.cpu().numpy()
        ends = micro.cu_seqlens.tolist()
        for number, start, end in zip(numbers, ends[:-1], ends[1:], strict=True):
            if number >= 0:
                found[number] = logprobs[start:end]
    return found


def _batch(examples: Sequence[Example], policy: Policy, config: RunConfig) -> Batch:
    return make_batch(
        examples,
        policy.engine.layout,
        config.microbatch_tokens,
        policy.flops,
        temperature=config.rollout.temperature,
    )


def _behind(zeros: int, values: Floats) -> Floats:
    return np.concatenate([np.zeros(zeros, dtype=np.float32), values])
