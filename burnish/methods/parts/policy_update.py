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
from burnish.config.schema import GAESettings, RewardConfig, RunConfig
from burnish.data.batching import Outlines, make_batch
from burnish.data.loader import order
from burnish.distributed.collectives import gather_objects, gather_rows
from burnish.engines.base import Engine
from burnish.errors import BurnishError
from burnish.models.flops import ModelFlops
from burnish.records import Batch, Example, Experts, Floats, Rollout, TokenOutputs
from burnish.records.rollout_table import Column, RolloutTable
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
    """Arrays over completion tokens, by field of `Example` and then by rollout, for this rank's micro-batches."""
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

    def minibatches(self, table: RolloutTable) -> list[Batch]:
        """Divide the groups evenly into the step's mini-batches. Collective.

        Rollouts without a reward or without a trained token are left out, and so are mini-batches that would be empty.
        """
        trained = np.flatnonzero(self._trained(table))
        parts = np.array_split(
            np.unique(table.groups[table.is_scored]), self.config.batch.minibatches
        )
        firsts = [part[0] for part in parts[1:] if len(part)]
        some = filter(len, np.split(trained, np.searchsorted(table.groups[trained], firsts)))
        of_rollout = self.config.algorithm.old_logprobs == "rollout"
        column = "old_logprobs" if of_rollout else "sampled_logprobs"
        return [self._batch(table, numbers, column) for numbers in some]

    def assign_credit(
        self, table: RolloutTable, batches: Sequence[Batch], kl_coef: float | None = None
    ) -> StepAdvantages:
        """Return advantages, and a critic's targets, of these mini-batches. Collective.

        `kl_coef` replaces an adaptive `algorithm.kl.coef`.
        """
        kind, kl = self.config.algorithm.advantage.name, self.config.algorithm.kl
        scored, lengths = list(batches), _scored_lengths(table)
        in_reward = kl.coef > 0 and kl.place == "reward"
        if in_reward or kind in BY_TOKEN:
            untrained = np.flatnonzero((lengths > 0) & ~self._trained(table))
            if len(untrained):
                scored.append(self._batch(table, untrained))
        rewards, penalties, measured = table.rewards, dict[int, Floats](), 0.0
        if in_reward:
            weight = kl.coef if kl_coef is None else kl_coef
            estimates = self._kl_estimates(table, scored)
            sums = self._gather(table, {n: each.sum(dtype=float) for n, each in estimates.items()})
            penalties = {n: np.float32(weight) * each for n, each in estimates.items()}
            measured = float(sums.sum()) / max(int(lengths.sum()), 1)
            rewards = rewards - weight * sums
        check_finite(rewards[table.is_scored])
        columns, stats = dict[str, dict[int, Floats]](), Stats()
        if kind in BY_TOKEN:
            numbers, columns, stats = self._estimates(table, scored, penalties)
        else:
            numbers, by_token = self._advantages(table, rewards, penalties if in_reward else None)
            rows = dict[int, Floats]()
            for n in _rollouts_of(scored):
                rows[n] = np.full(lengths[n], numbers[n]) if by_token is None else by_token[n]
            columns["advantages"] = rows
        filled = [batch.with_columns(columns) for batch in scored[: len(batches)]]
        return StepAdvantages(filled, np.where(lengths > 0, numbers, 0), columns, stats, measured)

    def _trained(self, table: RolloutTable) -> Column:
        trained: Column = _scored_lengths(table) > 0
        if self.config.algorithm.mask_truncated:
            trained &= table.by_kind(lambda kind: kind.stop_reason != "length") > 0
        return trained

    def _advantages(
        self, table: RolloutTable, rewards: Column, penalties: Mapping[int, Floats] | None
    ) -> tuple[Floats, Sequence[Floats] | None]:
        """Return each rollout's mean advantage, and those of tokens if the function gives them; 0 without a reward."""
        numbers = np.flatnonzero(table.is_scored)
        no_tokens = np.zeros(0, np.float32)

        def of_all() -> list[Floats]:
            found = dict[int, Floats]()
            mine = penalties if self.engine.layout.is_first_peer else {}
            for share in gather_objects(mine, self.engine.layout):
                found |= share or {}
            return [found.get(number, no_tokens) for number in numbers.tolist()]

        parts = {name: table.part(name) for name in self.config.reward.part_names}
        greedy = table.greedy_rewards[numbers]
        scored = ScoredRollouts(
            fixed(rewards[numbers]),
            fixed(table.groups[numbers]),
            fixed(table.lengths[numbers]),
            None if penalties is None else of_all,
            parts={
                name: np.where(there, values, np.nan)[numbers]
                for name, (values, there) in parts.items()
            },
            weights=_part_weights(self.config.reward),
            greedy_rewards=None if np.isnan(greedy).any() else greedy,
        )
        if self.advantage is None:
            raise ValueError("advantages of rollouts need a function")
        found, means = advantages(self.advantage, scored), np.zeros(len(rewards), np.float32)
        if isinstance(found, np.ndarray):
            means[numbers] = found
            return means, None
        means[numbers] = [each.mean() if len(each) else 0 for each in found]
        by_token = [no_tokens] * len(rewards)
        for number, each in zip(numbers.tolist(), found, strict=True):
            by_token[number] = each
        return means, by_token

    def _estimates(
        self, table: RolloutTable, batches: Sequence[Batch], penalties: Mapping[int, Floats]
    ) -> tuple[Floats, dict[str, dict[int, Floats]], Stats]:
        """Return all rollouts' mean advantages, this rank's arrays, and statistics."""
        from burnish.algorithms import critic as of_critic

        lengths = _scored_lengths(table)
        numbers = _rollouts_of(batches)
        formula = self.config.algorithm.advantage
        settings = GAESettings(gamma=1.0, lam=1.0)
        values = {n: np.zeros(lengths[n], np.float32) for n in numbers}
        has_values = formula.name == "gae"
        if has_values:
            settings = formula.settings_as(GAESettings)
            for batch in batches:
                outputs = self.critic.engine.forward(batch.without_experts())
                values |= _cut_prompts(table, batch, [_to_numpy(each.values) for each in outputs])
        found = of_critic.gae(
            table.rewards[numbers],
            [values[n] for n in numbers],
            [penalties[n] for n in numbers] if penalties else None,
            settings.gamma,
            settings.lam,
        )
        sums = self._gather(table, dict(zip(numbers, found.sums, strict=True)), found.sums.shape[1])
        means, whitened = found.whitened(sums, lengths)
        columns = {"advantages": dict(zip(numbers, whitened, strict=True))}
        stats = Stats()
        if has_values:
            columns["returns"] = dict(zip(numbers, found.returns, strict=True))
            columns["old_values"] = values
            stats = of_critic.value_stats(sums, lengths).prefixed(f"{CRITIC}/")
        return means, columns, stats

    def with_logprobs(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """Add the old and reference log-probs that the loss needs. Collective.

        The old log-probs of a single update equal the new ones. Several updates need old log-probs, and with
        `algorithm.router_replay=recompute` experts.
        """
        algorithm, batches = self.config.algorithm, list(batches)
        has_old = all(m.old_logprobs is not None for batch in batches for m in batch.microbatches)
        replayed = algorithm.router_replay == "recompute"
        several = len(batches) * self.config.batch.epochs > 1
        selecting = selects_tokens(algorithm)
        if selecting or (several and (replayed or not has_old)):
            for number, batch in enumerate(batches):
                outputs = self.engine.forward(batch, experts=replayed and several)
                if several and not has_old:
                    batch = batch.with_logprobs("old_logprobs", outputs)
                if several and replayed:
                    batch = batch.with_experts(outputs)
                if selecting:
                    seed = derive_seed(self.config.seed, "selected tokens", step, number)
                    batch = self._with_selected(batch, outputs, seed)
                batches[number] = batch
        if self.reference is not None and algorithm.kl.place == "loss":
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
            return np.concatenate([each[mask] for each, mask in zip(arrays, masks, strict=True)])

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
        ends, marks = np.cumsum([mask.sum() for mask in masks]), []
        for micro, mask, part in zip(micros, masks, np.split(chosen, ends[:-1]), strict=True):
            selected = np.zeros_like(mask)
            selected[mask] = part
            marks.append(torch.from_numpy(selected).to(micro.loss_mask.device))
        return batch.with_field("selected", marks)

    def _example(self, rollout: Rollout, column: str | None) -> Example:
        """Return a rollout's sequence, with the generator's log-probs in `column`."""
        prompt, made = rollout.prompt.token_ids, rollout.completion
        values = made.logprobs if column == "old_logprobs" else made.sampled_logprobs
        zeros = np.zeros(len(prompt), dtype=np.float32)
        arrays: dict[str, Any] = {column: np.concatenate([zeros, values])} if column else {}
        return Example(
            token_ids=np.concatenate([prompt, made.token_ids]),
            loss_mask=np.arange(len(prompt) + len(made.token_ids)) >= len(prompt),
            experts=_to_the_end(made.experts) if self._replayed else None,
            **arrays,
        )

    @property
    def _replayed(self) -> bool:
        return self.config.algorithm.router_replay == "rollout"

    def _kl_estimates(self, table: RolloutTable, batches: list[Batch]) -> dict[int, Floats]:
        """Return the KL estimates of tokens, by rollout; for several updates, add old log-probs to `batches`."""
        if self.reference is None:
            raise ValueError("KL in the reward needs a reference model")
        algorithm, found = self.config.algorithm, dict[int, Floats]()
        updates = self.config.batch.minibatches * self.config.batch.epochs
        for place, batch in enumerate(batches):
            mine, theirs = self.engine.forward(batch), self.reference(batch.without_experts())
            if updates > 1 and algorithm.old_logprobs == "recompute":
                batches[place] = batch.with_logprobs("old_logprobs", mine)
            rows = [
                kl_estimates(
                    algorithm.kl.estimator, _to_numpy(own.logprobs), _to_numpy(other.logprobs)
                )
                for own, other in zip(mine, theirs, strict=True)
            ]
            found |= _cut_prompts(table, batch, rows)
        return found

    def disagreement(self, table: RolloutTable, large: float) -> Column:
        """Compare the engine's log-probs with the generator's, at temperature 1. Collective.

        Returns by rollout [N, 4] the sum of the absolute differences, how many are above `large`, the largest one and its token.
        """
        answered = np.flatnonzero(table.lengths)
        if not len(answered):
            return np.zeros((len(table.owners), 4))
        batch = self._batch(table, answered, "old_logprobs")
        plain = tuple(replace(micro, temperature=1.0) for micro in batch.microbatches)
        outputs = self.engine.forward(replace(batch, microbatches=plain))
        apart = [
            np.abs(_to_numpy(output.logprobs) - _to_numpy(micro.old_logprobs))
            for output, micro in zip(outputs, plain, strict=True)
        ]
        found = {
            number: (each.sum(dtype=float), (each > large).sum(), each.max(), each.argmax())
            for number, each in _cut_prompts(table, batch, apart).items()
        }
        return self._gather(table, found, columns=4)

    def _gather(
        self, table: RolloutTable, own: Mapping[int, Any], columns: int | None = None
    ) -> Column:
        """Gather fp64 numbers of all rollouts, [N] or [N, `columns`]. Collective."""
        shape = () if columns is None else (columns,)
        found = np.zeros((len(table.owners), *shape))
        rows = np.array([*own.values()], np.float64).reshape(-1, *shape)
        numbers, everything = gather_rows([*own], rows, self.engine.layout)
        found[numbers] = everything
        return found

    def outlines(self, table: RolloutTable, numbers: Column, column: str | None) -> Outlines:
        """Return the outlines of some rollouts' `_example`s, which every rank can compute."""
        found, prompts = np.empty((4, len(numbers)), np.int64), table.groups[numbers]
        names = np.frombuffer(table.prompts["digest"].tobytes(), np.int64)[::2]
        found[1], found[2] = table.prompts["length"][prompts], table.rows["length"][numbers]
        found[0], found[3] = found[1] + found[2], names[prompts]
        columns: dict[str, tuple[int, ...]] = {column: ()} if column else {}
        if self._replayed:
            columns["experts"] = _experts_of_a_token(table, numbers)
        return found, columns

    def _batch(self, table: RolloutTable, numbers: Column, column: str | None = None) -> Batch:
        """Return this rank's part of a batch of rollouts. Collective."""
        layout, owners = self.engine.layout, table.owners[numbers]
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
        )
        names = np.append(numbers, -1)  # number examples as their rollouts
        return replace(batch, examples=tuple(tuple(names[[*e]].tolist()) for e in batch.examples))


def _scored_lengths(table: RolloutTable) -> Column:
    """[N] tokens of each completion, 0 if it has no reward."""
    return np.where(table.is_scored, table.lengths, 0)


def _rollouts_of(batches: Iterable[Batch]) -> list[int]:
    return [n for batch in batches for some in batch.examples for n in some if n >= 0]


def _cut_prompts(table: RolloutTable, batch: Batch, rows: Sequence[Floats]) -> dict[int, Floats]:
    """Cut the completions' tokens out of rows over whole sequences."""
    starts = table.prompt_lengths
    return {n: row[starts[n] :] for n, row in batch.by_example(rows).items()}


def _part_weights(config: RewardConfig) -> dict[str, float]:
    weights = [each.weight for each in config.functions] + [each.weight for each in config.models]
    return dict(zip(config.part_names, weights, strict=True))


def policy_stats(learned: Stats) -> Stats:
    """Prefix `mismatch_...` of the generator with `rollout/`, all else with `actor/`."""
    names = {name: "rollout/" if name.startswith("mismatch_") else "actor/" for name in learned}
    return Stats({names[name] + name: metric for name, metric in learned.items()})


def _experts_of_a_token(table: RolloutTable, numbers: Column) -> tuple[int, ...]:
    """Return the shape of one token's experts. Raises `BurnishError` if any but the last token's are missing."""
    shapes = [kind.experts and kind.experts[0] for kind in table.kinds]
    told = table.by_kind(lambda kind: -1 if kind.experts is None else kind.experts[0][0])[numbers]
    tokens = (table.prompt_lengths + table.lengths)[numbers]
    for place in np.flatnonzero(told != tokens - 1)[:1]:
        index = table.rollout(numbers[place]).prompt.index
        raise BurnishError(
            f"the generator did not report the experts of the tokens of prompt {index}",
            have="none" if told[place] < 0 else f"those of {told[place]} tokens",
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
