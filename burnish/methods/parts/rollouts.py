"""Turn prompts into scored rollouts.

`rollout.ahead` alone decides which weights draw a step's batch, never timing.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from torch.utils.data import Subset

from burnish.algorithms.dapo import has_variance, overlong_penalty, select_groups
from burnish.boxes.shards import Publication
from burnish.config.schema import RolloutConfig, RunConfig, SamplingConfig
from burnish.data.balance import by_share, inverse, share_evenly
from burnish.data.loader import Loader, State
from burnish.distributed.collectives import agree, from_main, gather_objects
from burnish.distributed.device import empty_cache
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine
from burnish.errors import BurnishError, UsageError
from burnish.records import Completion, Prompt, Request, Rollout
from burnish.records.rollout_table import Column, EncodedTable, RolloutTable
from burnish.rewards.overview import (
    LostRewards,
    RewardFailures,
    require_rewards,
    rollout_stats,
)
from burnish.rollout.base import Generator, Sampling
from burnish.runs.drawn_batch import DrawnBatch
from burnish.runs.signals import StopRequested
from burnish.tracking.progress import Progress
from burnish.tracking.stats import Max, Mean, Stats

if TYPE_CHECKING:
    from burnish.rollout.in_flight import PartialCompletions, SampleKey

T = TypeVar("T")
Prompts = Sequence[Prompt] | Subset[Prompt]
"""Prompts, or a subset of a data set, from which each rank reads only its share."""
Score = Callable[[Sequence[Rollout], Callable[[], None]], list[Rollout]]
"""Fills in the rewards of rollouts, in order. While it waits, it keeps calling its second argument, which may raise."""
Judge = Callable[[RolloutTable], RolloutTable]
"""Adds reward models' scores to the rewards in a table, which all ranks share. Collective."""
# Seconds between looks at a queue, and between signs of life to other ranks.
_POLL_SECONDS, _BEAT_SECONDS = 0.1, 1.0


@dataclass(frozen=True, slots=True)
class Collector:
    """Turns prompts into scored rollouts on this rank."""

    generator: Generator
    decode: Callable[[Sequence[int]], str]
    """Turns token ids into text, without special tokens."""
    score: Score
    layout: Layout
    check: Callable[[], None]
    """The generator calls it between decoding steps, and `score` while it waits. It may raise `StopRequested`."""
    progress: Progress
    failures: RewardFailures
    """Warns of failing reward functions."""
    judge: Judge | None = None
    stragglers: Any = None
    """A `burnish.runs.stragglers.Stragglers`, which gets each rank's seconds of generating and scoring; None with one rank."""
    offloads: Sequence[Engine] = ()
    """Engines that leave the device while completions are generated (`engine.offload_during_rollout`)."""
    shares_device: bool = False
    """Whether another process generates on this device and uses the memory that offloading frees."""
    partial: PartialCompletions | None = None
    """Tracks begun completions for saves; None without `rollout.in_flight`."""

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Keep the engines of `offloads` off the device inside the block. Collective."""
        with ExitStack() as stack:
            for engine in self.offloads:
                stack.enter_context(engine.offloaded())
            if self.offloads and self.shares_device:
                empty_cache()
            yield

    def collect(
        self, prompts: Prompts, first_key: int, samples: int, sampling: Sampling
    ) -> RolloutTable:
        """Return `samples` scored rollouts of each prompt, in the order of the prompts. Collective.

        Every rank gets tokens and texts of its own rollouts, and the numbers of all. Prompt i is drawn with
        key `first_key` + i. Raises `StopRequested` on all ranks if a signal reached any.
        """
        if self.generator.called_by_rank0 and self.layout.world > 1:

            def made(beat: Callable[[], None]) -> RolloutTable:
                main = replace(self.on_main, check=_both(self.check, beat))
                return main.collect(prompts, first_key, samples, sampling)

            return self.judged(_from_main(made, self.layout))
        if isinstance(prompts, Subset):
            lengths = cast(Any, prompts.dataset).lengths[prompts.indices]
        else:
            lengths = np.array([len(prompt.token_ids) for prompt in prompts])
        ranks = share_evenly(lengths, self.layout.data_size)
        mine = {i: prompts[i] for i in np.flatnonzero(ranks == self.layout.data_rank).tolist()}
        requests = [
            Request(first_key + i, each.token_ids, samples, prompt=each) for i, each in mine.items()
        ]
        stopped: int | None = None
        groups: list[list[Rollout]] = []
        began = generated = time.monotonic()
        try:
            completions = self._generated(requests, sampling)
            generated = time.monotonic()
            groups = self._scored([*mine.values()], completions)
        except StopRequested as request:
            stopped = request.signal_number
        seconds = {"generate": generated - began, "score": time.monotonic() - generated}
        took = {part: np.array([each]) for part, each in seconds.items()}
        own_table = RolloutTable.of(groups, self.layout.rank)
        share = stopped, own_table.encoded(), took
        [(stopped, told, took)] = gather_objects(share, self.layout, merged_shares)
        if stopped is not None:
            raise StopRequested(stopped)
        everything = RolloutTable.gathered([told], own_table)
        table = everything.take(inverse(by_share(ranks, self.layout.data_size)))
        self.failures.update(table)
        if self.stragglers is not None:
            self.stragglers.update(took)
        return self.judged(table)

    def judged(self, table: RolloutTable) -> RolloutTable:
        """Add the scores of reward models, if there are any. Collective."""
        return table if self.judge is None else self.judge(table)

    @property
    def on_main(self) -> Collector:
        """The collector of rank 0 alone, without reward models."""
        return replace(self, layout=Layout(), judge=None, offloads=())

    def _generated(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        total = sum(request.samples for request in requests)
        with self.progress.phase("rollout", total) as bar:

            def watch(ended: int) -> None:
                self.check()
                bar.advance(ended)

            if self.partial is not None:
                return self.partial.generate(self.generator, requests, sampling, watch)
            return self.generator.generate(requests, sampling, watch)

    def _scored(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> list[list[Rollout]]:
        rollouts = []
        for prompt, group in zip(prompts, completions, strict=True):
            for sample, made in enumerate(group):
                text = self.decode(made.token_ids.tolist()) if made.text is None else made.text
                rollouts.append(Rollout(prompt, sample, made, text))
        scored = iter(self.score(rollouts, self.check))
        return [[next(scored) for _ in group] for group in completions]


Share = tuple[int | None, EncodedTable, dict[str, Column]]
"""What some ranks report: a signal or None, their rollouts, and each rank's seconds by part of the work."""


def merged_shares(shares: Sequence[Share]) -> Share:
    """Join the shares of several ranks."""
    signals, tables, seconds = zip(*shares, strict=True)
    took = {part: np.concatenate([some[part] for some in seconds]) for part in seconds[0]}
    stopped = next((number for number in signals if number is not None), None)
    return stopped, RolloutTable.merged(tables), took


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Draws the groups of a step."""

    config: RunConfig
    collector: Collector
    dataset: Sequence[Prompt]
    loader: Loader

    def sample(self, step: int) -> DrawnBatch:
        """Draw the batch of a step with the generator's current weights. Collective.

        Dynamic sampling compares rewards before the overlong penalty. Raises `LostRewards` if too many rewards failed.
        """
        config, collect = self.config, self.collector.collect
        how = replace(
            sampling(config.rollout, config.rollout, config.seed, step),
            experts=config.algorithm.router_replay == "rollout",
        )
        dynamic = config.algorithm.dynamic_sampling
        limit, overlong = config.rollout.max_response_length, config.algorithm.overlong

        def shaped(table: RolloutTable) -> RolloutTable:
            penalties = overlong_penalty(table.lengths, limit, overlong)
            return table.with_rewards(table.rewards + penalties)

        groups = RolloutTable.of([])
        wanted, refills = config.batch.prompts, 0
        while True:
            first_key = self.loader.cursor
            with agree(self.collector.layout if config.data.streaming else Layout()):
                taken = self.loader.take(wanted)
                prompts: Prompts = Subset(cast(Any, self.dataset), taken)
                if config.data.streaming:
                    prompts = [self.dataset[index] for index in taken]
            collected = collect(prompts, first_key, config.rollout.n, how)
            if config.algorithm.advantage.name == "remax":
                greedy = collect(prompts, first_key, 1, replace(how, temperature=0.0))
                baselines = shaped(greedy).rewards[collected.groups]
                collected = _without_baseline(collected, greedy)
                collected = collected.with_rewards(collected.rewards, baselines)
            groups = RolloutTable.joined([groups, collected]) if refills else collected
            require_rewards(groups, config.reward)
            rewards, of_groups = compared_rewards(groups, dynamic.part, config.reward.part_names)
            varied = has_variance(rewards, of_groups, len(groups))
            known = np.bincount(of_groups, minlength=len(groups))[-len(taken) :] > 1
            alike = ~varied[-len(taken) :][known]
            self.loader.update(np.array(taken)[known].tolist(), alike.tolist())
            keep, wanted = select_groups(varied, config.batch.prompts, refills, dynamic)
            if wanted == 0:
                break
            refills += 1
        groups = shaped(groups) if overlong.buffer else groups
        left_out = np.delete(np.arange(len(groups)), keep)
        return DrawnBatch(step, groups.take(keep), groups.take(left_out))


class RolloutQueue:
    """Draws each batch `rollout.ahead` steps before it is taken, and publishes weights. Collective.

    With a generator that only rank 0 calls, a thread of rank 0 draws while training goes on. It finishes before new
    weights are published, unless `rollout.in_flight` is set.
    """

    def __init__(
        self,
        sampler: GroupSampler,
        total_steps: int,
        check: Callable[[int], None] | None = None,
    ) -> None:
        """`check` is called with the version of published weights."""
        self._sampler, self._check = sampler, check
        rollout = sampler.config.rollout
        self._ahead, self._in_flight = rollout.ahead, rollout.in_flight
        self._waiting = sampler.config.critic.warmup_steps
        self._total_steps = total_steps
        self._pending: deque[DrawnBatch] = deque()
        self._partial: PartialCompletions | None = None
        if self._in_flight:
            from burnish.rollout.in_flight import PartialCompletions

            self._partial = PartialCompletions({})
        self._taken = 0
        self._background: BackgroundSampler | None = None
        self._lost: LostRewards | None = None
        """Why no further batch is drawn. Raised before a step, because a save in its middle would lack its update."""
        self._waited = 0.0

    def publish(self, weights: Publication, version: int) -> None:
        """Give the generator new weights, by default after the old weights have drawn their batches."""
        count = self._left
        if self._in_flight and self._background is not None:
            count = from_main(self._background.ready(), self._sampler.collector.layout)
        self._take_over(count)
        self._sampler.collector.generator.load_weights(weights, version)
        if self._check is not None and self._left == 0:
            self._check(version)

    def take(self, step: int) -> DrawnBatch:
        """Draw the batches due before `step`, and return that of `step`. Take steps in order."""
        collector = self._sampler.collector
        last = min(step + self._ahead, self._total_steps - 1)
        if self._lost is not None:
            raise self._lost
        if not collector.generator.called_by_rank0:
            for number in range(step + len(self._pending), last + 1):
                with collector.offloaded():
                    self._pending.append(self._sampler.sample(number))
        else:
            if self._background is None:
                first = step + len(self._pending)
                self._background = BackgroundSampler(self._sampler, first, self._partial)
            self._background.go_on(last)
            if not self._pending:
                with collector.offloaded():
                    self._take_over(1, collector.check)
                if self._lost is not None:
                    raise self._lost
        if self._left == 0 and step >= self._waiting:  # this step publishes new weights
            collector.generator.release()
        self._taken = step + 1
        return self._pending.popleft()

    @property
    def _left(self) -> int:
        return 0 if self._background is None else self._background.left

    def _take_over(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        """Wait for batches that rank 0 draws, and share them with all ranks. Collective.

        It calls `check` meanwhile, which may raise only before an update: a save after one needs these batches.
        """
        drawing, collector, began = self._background, self._sampler.collector, time.monotonic()
        if drawing is None or count == 0 or self._lost is not None:
            return

        def taken(
            beat: Callable[[], None],
        ) -> tuple[list[tuple[DrawnBatch, State]], LostRewards | None]:
            found = list[tuple[DrawnBatch, State]]()
            try:
                while len(found) < count:
                    found.append(drawing.next(_both(check, beat)))
            except LostRewards as lost:
                return found, lost
            return found, None

        drawn, self._lost = _from_main(taken, collector.layout)
        drawing.left -= len(drawn)
        self._waited += time.monotonic() - began
        for batch, state in drawn:
            groups, left_out = map(collector.judged, (batch.groups, batch.left_out))
            try:
                require_rewards(
                    RolloutTable.joined([left_out, groups]), self._sampler.config.reward
                )
            except LostRewards as lost:
                self._lost = lost
                return
            self._sampler.loader.state = state
            self._pending.append(DrawnBatch(batch.step, groups, left_out))

    def idle(self) -> None:
        """Wait until drawing pauses."""
        self._take_over(self._left, self._sampler.collector.check)

    def pending(self) -> tuple[DrawnBatch, ...]:
        """Return the batches drawn and not taken; the loader's state is after them."""
        if self._partial is not None:
            self._partial.forget(self._taken + len(self._pending))
        return tuple(self._pending)

    def partial(self) -> Mapping[SampleKey, Completion]:
        """Return completions begun for later batches (`rollout.in_flight`). For rank 0."""
        generator = self._sampler.collector.generator
        return {} if self._partial is None else self._partial.so_far(generator)

    def close(self) -> None:
        """Stop drawing."""
        if self._background is not None:
            self._background.close()

    def restore(
        self, pending: Sequence[DrawnBatch], partial: Mapping[SampleKey, Completion]
    ) -> None:
        """Restore a save's batches and completions, except completions too old for `rollout.ahead`."""
        self._pending = deque(pending)
        if self._partial is not None:
            young = {
                key: each
                for key, each in partial.items()
                if self._age(key.step, each.weights_version) <= self._ahead
            }
            from burnish.rollout.in_flight import PartialCompletions

            self._partial = PartialCompletions(young)

    def _age(self, step: int, versions: Any) -> Any:
        """Count the policy's steps of learning between weight versions and a step."""
        return max(0, step - self._waiting) - np.maximum(0, versions - self._waiting)

    def stats(self, batch: DrawnBatch) -> Stats:
        """Return the statistics of a batch, with `rollout/staleness/...` in steps of learning if drawn ahead."""
        kept = batch.groups
        made = np.flatnonzero(kept.lengths > 0)
        ages = kept.by_kind(lambda kind: self._age(batch.step, kind.weights_version))[made]
        lags = ages.astype(np.float64)
        for place in np.flatnonzero(kept.by_kind(lambda kind: len(kind.later_versions))[made]):
            versions = kept.rollout(made[place]).completion.versions
            lags[place] = self._age(batch.step, versions).mean()
        stats = rollout_stats(RolloutTable.joined([batch.left_out, kept]))
        stragglers = self._sampler.collector.stragglers
        if stragglers is not None:
            stats |= stragglers.stats()
        if self._sampler.collector.generator.called_by_rank0:
            stats["perf/wait_seconds"] = Max(self._waited)
            self._waited = 0.0
        if len(made) and (self._ahead or lags.any()):
            stats["rollout/staleness/mean"] = Mean(float(lags.sum()), len(lags))
            stats["rollout/staleness/max"] = Max(int(ages.max()))
        return stats


class BackgroundSampler:
    """Batches that a thread of rank 0 draws; other ranks count them."""

    def __init__(
        self, sampler: GroupSampler, first: int, partial: PartialCompletions | None = None
    ) -> None:
        """Begin with batch `first`, once `go_on` lets it."""
        self.left = 0
        """Batches that the thread may draw or has drawn, and that nobody has taken over."""
        self._last, self._failed = first - 1, False
        self._may_draw: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        # Not a SimpleQueue, whose `get` can wait for ever if a signal arrives at the end of its time-out.
        self._drawn: queue.Queue[tuple[DrawnBatch, State] | BaseException] = queue.Queue()
        collector = sampler.collector
        if collector.layout.is_main:
            # The thread shows no progress and checks no signals, because training does both.
            unseen = Progress(False, moved=collector.progress.moved)
            main = replace(collector.on_main, progress=unseen, check=lambda: None)
            alone = replace(main, partial=partial)
            sampler = replace(sampler, collector=alone, loader=copy(sampler.loader))
            Thread(target=self._draw, args=(sampler,), daemon=True).start()

    def go_on(self, last: int) -> None:
        """Allow drawing up to batch `last`."""
        for number in range(self._last + 1, last + 1):
            self._may_draw.put(number)
            self.left += 1
        self._last = max(self._last, last)

    def ready(self) -> int:
        """Count the batches that are drawn and not taken over, excluding errors."""
        return max(0, self._drawn.qsize() - self._failed)

    def next(self, check: Callable[[], None]) -> tuple[DrawnBatch, State]:
        """Wait for the next batch and the loader's state after it. Raises what drawing or `check` raises. For rank 0."""
        drawn: tuple[DrawnBatch, State] | BaseException | None = None
        while drawn is None:
            check()
            with suppress(queue.Empty):
                drawn = self._drawn.get(timeout=_POLL_SECONDS)
        if isinstance(drawn, BaseException):
            raise drawn
        return drawn

    def close(self) -> None:
        """Stop drawing."""
        self._may_draw.put(None)

    def _draw(self, sampler: GroupSampler) -> None:
        while (number := self._may_draw.get()) is not None:
            try:
                self._drawn.put((sampler.sample(number), sampler.loader.state))
            except BaseException as error:  # noqa: BLE001 - `next` raises it
                self._failed = True
                self._drawn.put(error)
                return


def _both(check: Callable[[], None], beat: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        check()
        beat()

    return call


def _from_main(make: Callable[[Callable[[], None]], T], layout: Layout) -> T:
    """Return rank 0's result of `make`, or raise its error, on all ranks; on others its pickle. Collective.

    `make` keeps calling its argument, so that it may outlast the time-out of a collective.
    """
    told: tuple[T | None, StopRequested | BurnishError | None] | None = None
    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        if time.monotonic() - last >= _BEAT_SECONDS:
            from_main(None, layout)
            last = time.monotonic()

    if layout.is_main:
        try:
            told = make(beat), None
        except (StopRequested, BurnishError) as raised:
            told = None, raised
        told = from_main(told, layout)
    while told is None:
        told = from_main(told, layout)
    made, error = told
    if isinstance(error, BurnishError):
        error.printed_by_main = layout.world > 1
    if error is not None:
        raise error
    return cast(T, made)


def _without_baseline(table: RolloutTable, greedy: RolloutTable) -> RolloutTable:
    """Drop the rollouts of a prompt whose greedy completion has no reward."""
    if greedy.is_scored.all():
        return table
    numbers = np.flatnonzero(~greedy.is_scored[table.groups]).tolist()
    return table.without_baseline(
        {n: f"greedy completion: {greedy.rollout(table.groups[n]).reward_error}" for n in numbers}
    )


def compared_rewards(
    table: RolloutTable, part: str | None, names: Sequence[str]
) -> tuple[Column, Column]:
    """Return the values that dynamic sampling compares, the reward or its `part`, and their groups, without dropped rollouts.

    Raises `UsageError` if this part is neither in `names` nor in any completion.
    """
    if part is None:
        return table.rewards[table.is_scored], table.groups[table.is_scored]
    answered = [set(kind.parts) for kind in table.kinds if kind.error is None]
    known = set[str]().union(*answered)
    if answered and part not in known | {*names}:
        raise UsageError(
            "algorithm.dynamic_sampling.part is no part of any reward",
            have=f"algorithm.dynamic_sampling.part: {part}",
            want=f"one of {', '.join(sorted(known))}",
            do="set algorithm.dynamic_sampling.part to one of them, or remove it",
        )
    values, there = table.part(part)
    there &= table.is_scored
    return values[there], table.groups[there]


def sampling(rollout: RolloutConfig, how: SamplingConfig, seed: int, step: int) -> Sampling:
    """Return parameters of `how`, with the run's length limit and stops."""
    return Sampling(
        max_tokens=rollout.max_response_length,
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
        min_p=how.min_p,
        stop_token_ids=tuple(rollout.stop_token_ids),
        stop_strings=tuple(rollout.stop),
        seed=seed,
        step=step,
    )
