"""Turn scored groups into the batches of a step's updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.algorithms.base import (
    BY_TOKEN,
    Advantage,
    ScoredRollouts,
    advantages,
    check_finite,
    fixed,
    selects_tokens,
)
from burnish.algorithms.kl import kl_estimates
from burnish.config.algorithm import GAESettings
from burnish.config.schema import RewardConfig, RunConfig
from burnish.data.batching import Outlines, make_batch
from burnish.data.loader import order
from burnish.distributed.collectives import gather_objects, gather_rows
from burnish.engines.base import Engine
from burnish.errors import BurnishError
from burnish.models.flops import ModelFlops
from burnish.records import Batch, Example, Experts, Floats, Rollout, TokenOutputs
from burnish.records.rollout_table import Column, RolloutTable
from burnish.records.samples import Turn
from burnish.records.seeds import derive_seed
from burnish.tracking.stats import Stats

Forward = Callable[[Batch], list[TokenOutputs]]
"""Scores a batch, as `Engine.forward` does."""
CRITIC = "critic"
"""The critic's role in a checkpoint, and the prefix of its metrics."""


@dataclass(frozen=True, slots=True)
class StepAdvantages:
    """Advantages, and a critic's targets, of completions."""

    batches: list[Batch]
    """The step's mini-batches, with advantages and targets filled in."""
    advantages: Floats
    """[N] how much better each rollout was than expected: the mean over its tokens."""
    by_token: Mapping[str, Mapping[int, Floats]]
    """Arrays over the tokens that the model drew, by field of `Example` and then by rollout, for this rank's micro-batches."""
    stats: Stats
    """The critic's `critic/...` metrics; empty without a critic."""
    kl: float = 0.0
    """Mean KL over all tokens, in nats, if KL is in the reward."""


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """Turns a step's groups into advantages and mini-batches."""

    engine: Engine
    reference: Forward | None
    """Scores with the model that training started from; None without a KL term."""
    critic: Any
    """A `burnish.methods.parts.critic.Critic`; None without one."""
    costs: ModelFlops
    """FLOPs of sequences in an update, by which batches are balanced."""
    config: RunConfig
    advantage: Advantage | None
    """The function that `algorithm.advantage` names; None if critic or tokens decide."""
    teachers: Any = None
    """A `burnish.methods.parts.distillation.Teachers`; None without distillation."""
    in_pairs: bool = False
    """Whether a group's rollouts are a pair that shares a micro-batch, the better one first."""

    def minibatches(self, table: RolloutTable) -> list[Batch]:
        """Divide the groups evenly into the step's mini-batches. Collective.

        Rollouts without a reward or without a trained token are left out, and so are mini-batches that would be empty.
        """
        trained = np.flatnonzero(self._trained(table))
        if self.in_pairs:
            trained = trained[np.lexsort((-table.rewards[trained], table.groups[trained]))]
        # Groups are divided, not rollouts: the rollouts of a group share a prompt, which a micro-batch computes once.
        groups = np.unique(table.groups[table.is_scored])
        parts = np.array_split(groups, self.config.batch.minibatches)
        first_groups = [part[0] for part in parts[1:] if len(part)]
        cuts = np.searchsorted(table.groups[trained], first_groups)
        is_old = self.config.algorithm.old_logprobs == "rollout"
        column = "old_logprobs" if is_old else "sampled_logprobs"
        return [
            self._batch(table, numbers, column, self.in_pairs)
            for numbers in np.split(trained, cuts)
            if len(numbers)
        ]

    def assign_credit(
        self, table: RolloutTable, batches: Sequence[Batch], kl_coef: float | None = None
    ) -> StepAdvantages:
        """Return advantages, and a critic's targets, of these mini-batches. Collective.

        `kl_coef` replaces an adaptive `algorithm.kl.coef`.
        """
        kind = self.config.algorithm.advantage.name
        kl = self.config.algorithm.kl
        kl_in_reward = kl.coef > 0 and kl.place == "reward"
        lengths = _scored_lengths(table)
        scored = list(batches)
        if kl_in_reward or kind in BY_TOKEN:
            # Truncated rollouts are not trained on. They are scored all the same, because an advantage compares with them.
            untrained = np.flatnonzero((lengths > 0) & ~self._trained(table))
            if len(untrained):
                scored.append(self._batch(table, untrained))
        rewards = table.rewards
        penalties: dict[int, Floats] | None = None
        mean_kl = 0.0
        if kl_in_reward:
            weight = kl.coef if kl_coef is None else kl_coef
            estimates = self._kl_estimates(table, scored)
            own_sums = {n: tokens.sum(dtype=float) for n, tokens in estimates.items()}
            sums = self._gather(table, own_sums)
            penalties = {n: np.float32(weight) * tokens for n, tokens in estimates.items()}
            mean_kl = float(sums.sum()) / max(int(lengths.sum()), 1)
            rewards = rewards - weight * table.summed(sums)
        check_finite(rewards[table.is_scored])
        stats = Stats()
        if kind in BY_TOKEN:
            means, columns, stats = self._estimates(table, scored, penalties)
        else:
            means, by_token = self._advantages(table, rewards, penalties)
            own = {
                n: np.full(lengths[n], means[n]) if by_token is None else by_token[n]
                for n in _rollouts_of(scored)
            }
            columns = {"advantages": own}
        filled = [batch.with_columns(columns) for batch in scored[: len(batches)]]
        return StepAdvantages(filled, np.where(lengths > 0, means, 0), columns, stats, mean_kl)

    def _trained(self, table: RolloutTable) -> Column:
        trained: Column = _scored_lengths(table) > 0
        if self.config.algorithm.mask_truncated:
            trained &= table.by_kind(lambda kind: kind.stop_reason != "length") > 0
        return trained

    def _advantages(
        self, table: RolloutTable, rewards: Column, penalties: Mapping[int, Floats] | None
    ) -> tuple[Floats, Sequence[Floats] | None]:
        """Return each rollout's mean advantage, and those of tokens if the function gives them; 0 without a reward."""
        if self.advantage is None:
            raise ValueError("advantages of rollouts need a function")
        # Every rank calls the function with all rollouts of the step and gets the same numbers, so nothing is sent
        # back. Only penalties of tokens are spread over ranks, and are gathered if the function asks for them.
        numbers = np.flatnonzero(table.is_scored & (table.rows["branch"] == 0))
        branches = [table.branches(number) for number in numbers.tolist()]
        no_tokens = np.zeros(0, np.float32)

        def gathered_penalties() -> list[Floats]:
            own = penalties if self.engine.layout.is_first_peer else {}
            of_all = dict[int, Floats]()
            for share in gather_objects(own, self.engine.layout):
                of_all |= share or {}
            return [
                np.concatenate([of_all.get(number, no_tokens) for number in each])
                for each in branches
            ]

        def gathered_turns() -> list[tuple[Turn, ...]]:
            of_all = self._turns(table)
            return [of_all[number] for number in numbers.tolist()]

        parts = {name: table.part(name) for name in self.config.reward.part_names}
        greedy = table.greedy_rewards[numbers]
        scored = ScoredRollouts(
            fixed(rewards[numbers]),
            fixed(table.groups[numbers]),
            fixed(table.summed(table.lengths)[numbers]),
            None if penalties is None else gathered_penalties,
            parts={
                name: np.where(is_given, values, np.nan)[numbers]
                for name, (values, is_given) in parts.items()
            },
            weights=_part_weights(self.config.reward),
            turns_of_all=gathered_turns if _has_conversations(table) else None,
            greedy_rewards=None if np.isnan(greedy).any() else greedy,
        )
        result = advantages(self.advantage, scored)
        means = np.zeros(len(rewards), np.float32)
        if isinstance(result, np.ndarray):
            means[numbers] = result
            return means[table.firsts], None
        by_token = [no_tokens] * len(rewards)
        for of_one, tokens in zip(branches, result, strict=True):
            ends = table.lengths[of_one].cumsum()
            for number, own in zip(of_one, np.split(tokens, ends[:-1]), strict=True):
                by_token[number] = own
                means[number] = own.mean() if len(own) else 0
        return means, by_token

    def _estimates(
        self,
        table: RolloutTable,
        batches: Sequence[Batch],
        penalties: Mapping[int, Floats] | None,
    ) -> tuple[Floats, dict[str, dict[int, Floats]], Stats]:
        """Estimate advantages of tokens, from a critic's values if there is one.

        Returns all rollouts' mean advantages, arrays of the rollouts in this rank's `batches`, and statistics. Collective.
        """
        from burnish.algorithms import critic as of_critic

        lengths = _scored_lengths(table)
        own = _rollouts_of(batches)
        formula = self.config.algorithm.advantage
        has_critic = formula.name == "gae"
        settings = (
            formula.settings_as(GAESettings) if has_critic else GAESettings(gamma=1.0, lam=1.0)
        )
        values = self._values(table, batches) if has_critic else {}
        turns = self._turns(table) if _has_conversations(table) else {}
        estimates = of_critic.gae(
            table.rewards[own],
            [values.get(n, np.zeros(lengths[n], np.float32)) for n in own],
            [penalties[n] for n in own] if penalties else None,
            gamma=settings.gamma,
            lam=settings.lam,
            turns=[turns[n] for n in own] if turns else None,
        )
        # Whitening needs mean and variance over all ranks' tokens. Six sums per rollout are sent, and no tokens.
        own_sums = dict(zip(own, estimates.sums, strict=True))
        sums = self._gather(table, own_sums, estimates.sums.shape[1])
        means, whitened = estimates.whitened(sums, lengths)
        columns = {"advantages": dict(zip(own, whitened, strict=True))}
        if not has_critic:
            return means, columns, Stats()
        columns["returns"] = dict(zip(own, estimates.returns, strict=True))
        columns["old_values"] = values
        return means, columns, of_critic.value_stats(sums, lengths).prefixed(f"{CRITIC}/")

    def _turns(self, table: RolloutTable) -> dict[int, tuple[Turn, ...]]:
        """Return the turns of all rollouts, which are conversations, by rollout. Collective."""
        layout = self.engine.layout
        own = {number: table.rollout(number).turns for number in table.of_rank(layout.rank)}
        of_all = dict[int, tuple[Turn, ...]]()
        for share in gather_objects(own, layout):
            of_all |= share
        return of_all

    def _values(self, table: RolloutTable, batches: Sequence[Batch]) -> dict[int, Floats]:
        """Return the critic's values of completion tokens, by rollout. Collective."""
        values = dict[int, Floats]()
        for batch in batches:
            outputs = self.critic.engine.forward(batch.without_experts())
            rows = [_to_numpy(output.values) for output in outputs]
            values |= batch.by_trained_tokens(rows)
        return values

    def with_logprobs(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """Add the old and reference log-probs that the loss needs. Collective.

        The old log-probs of a single update equal the new ones. Several updates need old log-probs, and with
        `algorithm.router_replay=recompute` experts.
        """
        algorithm = self.config.algorithm
        batches = list(batches)
        has_old = all(m.old_logprobs is not None for batch in batches for m in batch.microbatches)
        replays = algorithm.router_replay == "recompute"
        # With one update per step the policy that is trained is the old policy. The loss then takes its own log-probs,
        # without gradient, and a forward pass over the step is saved.
        several = len(batches) * self.config.batch.epochs > 1
        selects = selects_tokens(algorithm)
        if selects or (several and (replays or not has_old)):
            for number, batch in enumerate(batches):
                outputs = self.engine.forward(batch, experts=replays and several)
                if several and not has_old:
                    batch = batch.with_logprobs("old_logprobs", outputs)
                if several and replays:
                    batch = batch.with_experts(outputs)
                if selects:
                    seed = derive_seed(self.config.seed, "selected tokens", step, number)
                    batch = self._with_selected(batch, outputs, seed)
                batches[number] = batch
        if self.reference is not None and algorithm.kl.place == "loss":
            # Another model routes tokens to experts of its own.
            batches = [
                batch.with_logprobs("ref_logprobs", self.reference(batch.without_experts()))
                for batch in batches
            ]
        return batches

    def in_epochs(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """Return a mini-batch for each update; later epochs draw their order from (seed, step, epoch)."""
        ordered = list(batches)
        for epoch in range(1, self.config.batch.epochs):
            seed = derive_seed(self.config.seed, "mini-batches", step)
            ordered += [batches[i] for i in order(seed, epoch, len(batches))]
        return ordered

    def _with_selected(self, batch: Batch, outputs: Sequence[TokenOutputs], seed: int) -> Batch:
        """Mark the tokens, among those of all ranks, that the policy loss treats differently. Collective."""
        micros = batch.microbatches
        masks = [micro.loss_mask.cpu().numpy() for micro in micros]
        examples = [
            np.repeat(numbers, micro.cu_seqlens.diff().numpy())
            for numbers, micro in zip(batch.examples, micros, strict=True)
        ]

        def trained(arrays: Iterable[Any]) -> Any:
            return np.concatenate([array[mask] for array, mask in zip(arrays, masks, strict=True)])

        from burnish.algorithms.token_selection import select_tokens

        chosen = select_tokens(
            trained(_to_numpy(output.logprobs) for output in outputs),
            trained(_to_numpy(output.entropy) for output in outputs),
            trained(_to_numpy(micro.advantages) for micro in micros),
            trained(examples),
            self.config.algorithm,
            seed,
            self.engine.layout,
        )
        ends = np.cumsum([mask.sum() for mask in masks])
        marks = []
        for micro, mask, part in zip(micros, masks, np.split(chosen, ends[:-1]), strict=True):
            selected = np.zeros_like(mask)
            selected[mask] = part
            marks.append(torch.from_numpy(selected).to(micro.loss_mask.device))
        return batch.with_field("selected", marks)

    def _example(self, rollout: Rollout, column: str | None) -> Example:
        """Return a rollout's sequence, with the generator's log-probs in `column`."""
        prompt = rollout.prompt.token_ids
        completion = rollout.completion
        is_old = column == "old_logprobs"
        logprobs = completion.logprobs if is_old else completion.sampled_logprobs
        zeros = np.zeros(len(prompt), dtype=np.float32)
        arrays: dict[str, Any] = {column: np.concatenate([zeros, logprobs])} if column else {}
        return Example(
            token_ids=np.concatenate([prompt, completion.token_ids]),
            loss_mask=np.concatenate([np.zeros(len(prompt), np.bool_), completion.drawn]),
            experts=_to_the_end(completion.experts) if self._replays_rollout else None,
            **arrays,
        )

    @property
    def _replays_rollout(self) -> bool:
        return self.config.algorithm.router_replay == "rollout"

    def _kl_estimates(self, table: RolloutTable, batches: list[Batch]) -> dict[int, Floats]:
        """Return the KL estimates of tokens, by rollout; for several updates, add old log-probs to `batches`."""
        if self.reference is None:
            raise ValueError("KL in the reward needs a reference model")
        algorithm = self.config.algorithm
        updates = self.config.batch.minibatches * self.config.batch.epochs
        estimates = dict[int, Floats]()
        for place, batch in enumerate(batches):
            policy = self.engine.forward(batch)
            reference = self.reference(batch.without_experts())
            if updates > 1 and algorithm.old_logprobs == "recompute":
                batches[place] = batch.with_logprobs("old_logprobs", policy)
            rows = [
                kl_estimates(
                    algorithm.kl.estimator, _to_numpy(ours.logprobs), _to_numpy(theirs.logprobs)
                )
                for ours, theirs in zip(policy, reference, strict=True)
            ]
            estimates |= batch.by_trained_tokens(rows)
        return estimates

    def disagreement(self, table: RolloutTable, large: float) -> Column:
        """Compare the engine's log-probs with the generator's, at temperature 1. Collective.

        Returns by rollout [N, 4] the sum of the absolute differences, how many are above `large`, the largest one and its token.
        """
        answered = np.flatnonzero(table.lengths)
        if not len(answered):
            return np.zeros((len(table.owners), 4))
        batch = self._batch(table, answered, "old_logprobs")
        micros = tuple(replace(micro, temperature=1.0) for micro in batch.microbatches)
        outputs = self.engine.forward(replace(batch, microbatches=micros))
        rows = [
            np.abs(_to_numpy(output.logprobs) - _to_numpy(micro.old_logprobs))
            for output, micro in zip(outputs, micros, strict=True)
        ]
        own = {
            number: (apart.sum(dtype=float), (apart > large).sum(), apart.max(), apart.argmax())
            for number, apart in batch.by_trained_tokens(rows).items()
        }
        return self._gather(table, own, columns=4)

    def _gather(
        self, table: RolloutTable, own: Mapping[int, Any], columns: int | None = None
    ) -> Column:
        """Gather fp64 numbers of all rollouts, [N] or [N, `columns`]. Collective."""
        shape = () if columns is None else (columns,)
        of_all = np.zeros((len(table.owners), *shape))
        own_rows = np.array([*own.values()], np.float64).reshape(-1, *shape)
        numbers, rows = gather_rows([*own], own_rows, self.engine.layout)
        of_all[numbers] = rows
        return of_all

    def outlines(self, table: RolloutTable, numbers: Column, column: str | None) -> Outlines:
        """Return the outlines of some rollouts' `_example`s, which every rank can compute."""
        prompts = table.groups[numbers]
        starts = table.prompt_lengths[numbers]
        trained = table.lengths[numbers]
        # The first 8 of each digest's 16 bytes, as `outlines_of` takes them of tokens.
        digests = np.frombuffer(table.prompts["digest"].tobytes(), np.int64)[::2]
        columns: dict[str, tuple[int, ...]] = {column: ()} if column else {}
        if self._replays_rollout:
            columns["experts"] = _experts_of_a_token(table, numbers)
        lengths = table.sequence_lengths[numbers]
        return Outlines(lengths, starts, trained, digests[prompts], columns)

    def _batch(
        self,
        table: RolloutTable,
        numbers: Column,
        column: str | None = None,
        in_pairs: bool = False,
    ) -> Batch:
        """Return this rank's part of a batch of rollouts. Collective."""
        layout = self.engine.layout
        owners = table.owners[numbers]
        outlines = self.outlines(table, numbers, column)  # raises on all ranks or on none
        own = np.flatnonzero((owners < 0) | (owners == layout.rank)).tolist()
        batch = make_batch(
            {i: self._example(table.rollout(numbers[i]), column) for i in own},
            layout,
            self.config.microbatch_tokens,
            self.costs,
            temperature=self.config.rollout.temperature,
            outlines=outlines,
            owners=owners,
            together=[2] * (len(numbers) // 2) if in_pairs else None,
        )
        rollout_of = np.append(numbers, -1)  # number examples as their rollouts; filler stays -1
        examples = tuple(tuple(rollout_of[[*micro]].tolist()) for micro in batch.examples)
        return replace(batch, examples=examples)


def _has_conversations(table: RolloutTable) -> bool:
    return any(kind.end for kind in table.kinds)


def _scored_lengths(table: RolloutTable) -> Column:
    """[N] tokens that the model drew in each completion, 0 if it has no reward."""
    return np.where(table.is_scored, table.lengths, 0)


def _rollouts_of(batches: Iterable[Batch]) -> list[int]:
    """The rollouts in this rank's micro-batches."""
    return [n for batch in batches for numbers in batch.examples for n in numbers if n >= 0]


def _part_weights(config: RewardConfig) -> dict[str, float]:
    weights = [part.weight for part in config.functions]
    weights += [part.weight for part in config.models]
    return dict(zip(config.part_names, weights, strict=True))


def policy_stats(learned: Stats) -> Stats:
    """Prefix `mismatch_...` of the generator with `rollout/`, all else with `actor/`."""
    names = {name: "rollout/" if name.startswith("mismatch_") else "actor/" for name in learned}
    return Stats({names[name] + name: metric for name, metric in learned.items()})


def _experts_of_a_token(table: RolloutTable, numbers: Column) -> tuple[int, ...]:
    """Return the shape of one token's experts. Raises `BurnishError` if any but the last token's are missing."""
    shapes = [kind.experts and kind.experts[0] for kind in table.kinds]
    of_kind = table.by_kind(lambda kind: -1 if kind.experts is None else kind.experts[0][0])
    reported = of_kind[numbers]
    tokens = table.sequence_lengths[numbers]
    for place in np.flatnonzero(reported != tokens - 1)[:1]:
        index = table.rollout(numbers[place]).prompt.index
        raise BurnishError(
            f"the generator did not report the experts of the tokens of prompt {index}",
            have="none" if reported[place] < 0 else f"those of {reported[place]} tokens",
            want=f"those of all {tokens[place]} tokens but the last",
            do="set algorithm.router_replay=recompute, which asks the engine for them, or none",
        )
    return next(shape[1:] for shape in shapes if shape)


def _to_the_end(experts: Any) -> Experts:
    """Repeat the experts for the last token, which predicts nothing."""
    return np.concatenate([experts, experts[-1:]])


def _to_numpy(tensor: Tensor | None) -> Floats:
    if tensor is None:
        raise ValueError("a micro-batch or its outputs lack an array that an RL update needs")
    return tensor.float().cpu().numpy()
