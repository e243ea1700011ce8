"""From scored groups to the batches of a step's updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.algorithms.base import (
    ScoredRollouts,
    advantages,
    load_advantage,
    selects_tokens,
)
from burnish.algorithms.kl import kl_penalty
from burnish.config.schema import RewardConfig, RunConfig
from burnish.data.batching import Outlines, make_batch
from burnish.data.loader import order
from burnish.distributed.collectives import gather_objects
from burnish.engines.base import Engine
from burnish.errors import BurnishError
from burnish.models.flops import ModelFlops
from burnish.records import OUTLINE, Batch, Example, Experts, Floats, Rollout, TokenOutputs
from burnish.records.rollout_table import Column, Groups, RolloutTable
from burnish.records.seeds import derive_seed
from burnish.tracking.stats import Stats

Forward = Callable[[Batch], list[TokenOutputs]]
"""Scores a batch, as `Engine.forward` does."""
CRITIC = "critic"
"""The critic's role in a checkpoint, and the prefix of its metrics."""
_CRITIC = "burnish.algorithms.critic"


@dataclass(frozen=True, slots=True)
class Credit:
    """What each completion token is trained towards: one fp32 array per rollout."""

    advantages: list[Floats]
    """How much better it was than expected."""
    returns: list[Floats] | None = None
    """With a critic: what that is to learn of the state before it."""
    values: list[Floats] | None = None
    """With a critic: what that said of this state."""
    logprobs: list[Floats] | None = None
    """With KL in the reward: the policy's log-probs before the updates."""
    kl: float = 0.0
    """With KL in the reward: its mean over all tokens, in nats."""

    @property
    def stats(self) -> Stats:
        """The critic's `critic/...`; nothing without one."""
        if self.values is None or self.returns is None:
            return Stats()
        stats: Stats = import_module(_CRITIC).value_stats(self.values, self.returns)
        return stats.prefixed(f"{CRITIC}/")

    def by_name(self) -> dict[str, list[Floats]]:
        """The arrays that there are, by their names in an `Example`."""
        arrays = {"advantages": self.advantages, "returns": self.returns, "old_values": self.values}
        return {name: each for name, each in arrays.items() if each is not None}


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """Turns a step's groups into advantages and mini-batches."""

    engine: Engine
    reference: Forward | None
    """Scores by the model that training started from; None where no KL term wants it."""
    critic: Any
    """A `burnish.train.critic.Critic`; None without one."""
    costs: ModelFlops
    """What sequences cost in an update, by which batches are balanced."""
    config: RunConfig

    def assign_credit(self, groups: Groups, kl_coef: float | None = None) -> Credit:
        """Return every completion token's advantage, and a critic's targets. Collective.

        `kl_coef` replaces `algorithm.kl.coef` where it adapts.
        """
        table = RolloutTable.of(groups)
        kind, kl = self.config.algorithm.advantage, self.config.algorithm.kl
        penalties = logprobs = None
        measured = 0.0
        if kl.coef > 0 and kl.place == "reward":
            weight = kl.coef if kl_coef is None else kl_coef
            estimates, logprobs = self._kl_estimates(table)
            penalties = [np.float32(weight) * each for each in estimates]
            measured = float(np.concatenate([np.zeros(0), *estimates]).sum())
            measured /= max(sum(map(len, estimates)), 1)
        if kind == "gae":
            values = self._values(table)
            critic = self.config.critic
            gae = import_module(_CRITIC).gae
            found = gae(table.rewards, values, penalties, critic.gamma, critic.lam)
            return Credit(found.advantages, found.returns, values, logprobs, measured)
        scored = ScoredRollouts.of(
            table.rewards,
            table.groups,
            table.lengths,
            penalties,
            parts={name: table.part(name)[0] for name in self.config.reward.part_names},
            weights=_part_weights(self.config.reward),
            greedy_rewards=None if np.isnan(table.greedy_rewards).any() else table.greedy_rewards,
        )
        found_advantages = advantages(load_advantage(kind), scored)
        return Credit(found_advantages, logprobs=logprobs, kl=measured)

    def minibatches(self, groups: Groups, credit: Credit) -> list[Batch]:
        """Return the step's mini-batches, among which groups are divided evenly. Collective.

        Rollouts without a trained token, and mini-batches of nothing else, are left out.
        """
        columns = credit.by_name()
        updates = self.config.batch.minibatches * self.config.batch.epochs
        recomputed = self.config.algorithm.old_logprobs == "recompute"
        if recomputed and credit.logprobs is not None and updates > 1:
            columns["old_logprobs"] = credit.logprobs
        table, batches = RolloutTable.of(groups), []
        trained = table.lengths > 0
        if self.config.algorithm.mask_truncated:
            trained &= table.by_kind(lambda kind: kind.stop_reason != "length") > 0
        for part in np.array_split(np.arange(len(table)), self.config.batch.minibatches):
            numbers = np.flatnonzero(np.isin(table.groups, part) & trained)
            if len(numbers):
                batch = self._batch(table, numbers, logprobs=True)
                own = {name: [each[n] for n in numbers.tolist()] for name, each in columns.items()}
                batches.append(batch.with_columns(own))
        return batches

    def with_logprobs(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """Add the log-probs that the policy's updates are measured against. Collective.

        A single update is measured against itself. Several need the policy's log-probs, and with
        `algorithm.router_replay=recompute` its experts. KL in the loss needs the reference's log-probs.
        """
        algorithm, batches = self.config.algorithm, list(batches)
        kept = all(m.old_logprobs is not None for batch in batches for m in batch.microbatches)
        replayed = algorithm.router_replay == "recompute"
        several = len(batches) * self.config.batch.epochs > 1
        selecting = selects_tokens(algorithm)
        if selecting or (several and (replayed or not kept)):
            for number, batch in enumerate(batches):
                outputs = self.engine.forward(batch, experts=replayed and several)
                if several and not kept:
                    batch = batch.with_old_logprobs(outputs)
                if several and replayed:
                    batch = batch.with_experts(outputs)
                if selecting:
                    seed = derive_seed(self.config.seed, "selected tokens", step, number)
                    batch = self._with_selected(batch, outputs, seed)
                batches[number] = batch
        if self.reference is not None and algorithm.kl.place == "loss":
            batches = [
                batch.with_ref_logprobs(self.reference(batch.without_experts()))
                for batch in batches
            ]
        return batches

    def in_epochs(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """Return the mini-batches by update; later epochs draw their order from (seed, step, epoch)."""
        ordered = list(batches)
        for epoch in range(1, self.config.batch.epochs):
            seed = derive_seed(self.config.seed, "mini-batches", step)
            ordered += [batches[i] for i in order(seed, epoch, len(batches))]
        return ordered

    def _with_selected(self, batch: Batch, outputs: Sequence[TokenOutputs], seed: int) -> Batch:
        """Add the tokens that the policy loss treats apart, of all ranks' batches. Collective."""
        columns = [
            np.stack(
                [*map(_numbers, (out.logprobs, out.entropy, micro.advantages, micro.loss_mask))],
                axis=-1,
            )
            for micro, out in zip(batch.microbatches, outputs, strict=True)
        ]
        shares = gather_objects(batch.by_example(columns), self.engine.layout)
        rows = {number: row for share in shares for number, row in share.items()}
        rows = dict(sorted(rows.items()))
        table = np.concatenate([np.zeros((0, 4), np.float32), *rows.values()])
        trained = table[:, 3] > 0
        chosen = np.zeros(len(table), dtype=bool)
        logprobs, entropies, advantages_of = table[trained, :3].T
        select = import_module("burnish.algorithms.token_selection").select_tokens
        chosen[trained] = select(logprobs, entropies, advantages_of, self.config.algorithm, seed)
        ends = np.cumsum([len(row) for row in rows.values()])
        by_number = dict(zip(rows, np.split(chosen, ends[:-1]), strict=True)) if rows else {}
        microbatches = []
        for micro, numbers in zip(batch.microbatches, batch.examples, strict=True):
            sizes = micro.cu_seqlens.diff().tolist()
            parts = [
                by_number.get(number, np.zeros(size, dtype=bool))
                for number, size in zip(numbers, sizes, strict=True)
            ]
            selected = torch.from_numpy(np.concatenate(parts)).to(micro.loss_mask.device)
            microbatches.append(replace(micro, selected=selected))
        return replace(batch, microbatches=tuple(microbatches))

    def _example(self, rollout: Rollout, logprobs: bool) -> Example:
        """Return a rollout's sequence; with `logprobs`, those of the generator too."""
        prompt, made = rollout.prompt.token_ids, rollout.completion
        kept = self.config.algorithm.old_logprobs == "rollout"
        name, values = ("old_", made.logprobs) if kept else ("sampled_", made.sampled_logprobs)
        zeros = np.zeros(len(prompt), dtype=np.float32)
        arrays: dict[str, Any] = {f"{name}logprobs": np.concatenate([zeros, values])}
        return Example(
            token_ids=np.concatenate([prompt, made.token_ids]),
            loss_mask=np.arange(len(prompt) + len(made.token_ids)) >= len(prompt),
            experts=_to_the_end(made.experts) if self._replayed else None,
            **(arrays if logprobs else {}),
        )

    @property
    def _replayed(self) -> bool:
        return self.config.algorithm.router_replay == "rollout"

    def _kl_estimates(self, table: RolloutTable) -> tuple[list[Floats], list[Floats]]:
        """Return the KL estimate and the policy's log-prob of each completion token. Collective."""
        if self.reference is None:
            raise ValueError("KL in the reward needs a reference model")
        reference, kl = self.reference, self.config.algorithm.kl

        def both(batch: Batch) -> list[Floats]:
            mine, theirs = self.engine.forward(batch), reference(batch.without_experts())
            return [
                np.stack([_numbers(own.logprobs), _numbers(other.logprobs)], axis=-1)
                for own, other in zip(mine, theirs, strict=True)
            ]

        found = [pair.reshape(-1, 2) for pair in self._of_completions(table, both)]
        logprobs = [np.ascontiguousarray(pair[:, 0]) for pair in found]
        estimates = [
            kl_penalty(kl.estimator, 1.0, own, np.ascontiguousarray(pair[:, 1]))
            for own, pair in zip(logprobs, found, strict=True)
        ]
        return estimates, logprobs

    def raw_logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        """Return the engine's log-probs of each completion token at temperature 1, by rollout. Collective."""

        def compute(batch: Batch) -> list[Floats]:
            plain = tuple(replace(micro, temperature=1.0) for micro in batch.microbatches)
            outputs = self.engine.forward(replace(batch, microbatches=plain))
            return [_numbers(output.logprobs) for output in outputs]

        return self._of_completions(RolloutTable.of([[each] for each in rollouts]), compute)

    def _values(self, table: RolloutTable) -> list[Floats]:
        if self.critic is None:
            raise ValueError("generalized advantage estimation needs a critic")
        engine: Engine = self.critic.learner.engine

        def values(batch: Batch) -> list[Floats]:
            return [_numbers(output.values) for output in engine.forward(batch.without_experts())]

        return self._of_completions(table, values)

    def _of_completions(
        self, table: RolloutTable, compute: Callable[[Batch], list[Floats]]
    ) -> list[Floats]:
        """Return one row per completion token, by rollout, on every rank. Collective.

        `compute` returns the rows of all tokens of this rank's micro-batches.
        """
        answered, starts = np.flatnonzero(table.lengths), table.prompt_lengths
        found: list[Floats] = [np.zeros(0, dtype=np.float32)] * len(starts)
        if not len(answered):
            return found
        batch = self._batch(table, answered)
        mine = batch.by_example(compute(batch))
        for share in gather_objects(mine, self.engine.layout):
            for number, values in share.items():
                found[answered[number]] = values[starts[answered[number]] :]
        return found

    def outlines(self, table: RolloutTable, numbers: Column, *, logprobs: bool) -> Outlines:
        """Return what all ranks know of the `_example`s of some rollouts."""
        found = np.zeros(len(numbers), OUTLINE)
        found["start"], found["trained"] = table.prompt_lengths[numbers], table.lengths[numbers]
        found["length"], found["beginning"] = (
            found["start"] + found["trained"],
            table.digests[numbers],
        )
        kept = self.config.algorithm.old_logprobs == "rollout"
        name = "old_logprobs" if kept else "sampled_logprobs"
        columns: dict[str, tuple[int, ...]] = {name: ()} if logprobs else {}
        if self._replayed:
            columns["experts"] = _experts_of_a_token(table, numbers)
        return found, columns

    def _batch(self, table: RolloutTable, numbers: Column, *, logprobs: bool = False) -> Batch:
        """Return this rank's part of a batch of rollouts that have completions. Collective."""
        layout, owners = self.engine.layout, table.owners[numbers]
        own = np.flatnonzero((owners < 0) | (owners == layout.rank)).tolist()
        outlines = self.outlines(table, numbers, logprobs=logprobs)
        return make_batch(
            {i: self._example(table.rollout(numbers[i]), logprobs) for i in own},
            layout,
            self.config.microbatch_tokens,
            self.costs,
            temperature=self.config.rollout.temperature,
            outlines=outlines,
            owners=owners,
        )


def _part_weights(config: RewardConfig) -> dict[str, float]:
    weights = [each.weight for each in config.functions] + [each.weight for each in config.models]
    return dict(zip(config.part_names, weights, strict=True))


def policy_stats(learned: Stats) -> Stats:
    """Prefix `mismatch_...` of the generator with `rollout/`, all else with `actor/`."""
    names = {name: "rollout/" if name.startswith("mismatch_") else "actor/" for name in learned}
    return Stats({names[name] + name: metric for name, metric in learned.items()})


def _experts_of_a_token(table: RolloutTable, numbers: Column) -> tuple[int, ...]:
    """Return the shape of a token's experts. Raises `BurnishError` if any but the last token's are missing."""
    shapes = [kind.experts and kind.experts[0] for kind in table.kinds]
    told = table.by_kind(lambda kind: -1 if kind.experts is None else kind.experts[0][0])[numbers]
    tokens = (table.prompt_lengths + table.lengths)[numbers]
    for place in np.flatnonzero(told != tokens - 1)[:1]:
        index = table.rollout(numbers[place]).prompt.index
        raise BurnishError(
            f"the generator has not said which experts the tokens of prompt {index} went to",
            have="none" if told[place] < 0 else f"those of {told[place]} tokens",
            want=f"those of all {tokens[place]} tokens but the last",
            do="set algorithm.router_replay=recompute, which asks the engine for them, or none",
        )
    return next(shape[1:] for shape in shapes if shape)


def _to_the_end(experts: Any) -> Experts:
    """Repeat the experts for the last token, which predicts nothing."""
    whole: Experts = np.concatenate([experts, experts[-1:]])
    return whole


def _numbers(tensor: Tensor | None) -> Floats:
    if tensor is None:
        raise ValueError("a micro-batch of reinforcement learning has advantages")
    found: Floats = tensor.float().cpu().numpy()
    return found
