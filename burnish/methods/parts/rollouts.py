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
from functools import partial
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
_POLL_SECONDS = 0.1
_BEAT_SECONDS = 1.0


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
    conversations: Any = None
    """A `burnish.methods.parts.conversations.Conversations`; None: the model gives one answer to each prompt."""
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
            return self.judged(self._collected_by_rank0(prompts, first_key, samples, sampling))
        # Every rank computes from the lengths who answers which prompt. So no rank has to hand out work.
        ranks = share_evenly(_prompt_lengths(prompts), self.layout.data_size)
        places = np.flatnonzero(ranks == self.layout.data_rank).tolist()
        own = {place: prompts[place] for place in places}
        # The key is the prompt's place in the order of data. So the draws do not depend on the layout.
        requests = [
            Request(first_key + place, prompt.token_ids, samples, prompt=prompt)
            for place, prompt in own.items()
        ]
        stopped, groups, seconds = self._answered([*own.values()], requests, sampling)
        own_table = RolloutTable.of(groups, self.layout.rank)
        share = stopped, own_table.encoded(), seconds
        [(stopped, encoded, seconds)] = gather_objects(share, self.layout, merged_shares)
        if stopped is not None:
            raise StopRequested(stopped)
        by_rank = RolloutTable.gathered([encoded], own_table)
        table = by_rank.take(inverse(by_share(ranks, self.layout.data_size)))
        self.failures.update(table)
        if self.stragglers is not None:
            self.stragglers.update(seconds)
        return self.judged(table)

    def _collected_by_rank0(
        self, prompts: Prompts, first_key: int, samples: int, sampling: Sampling
    ) -> RolloutTable:
        """Let rank 0 collect all rollouts, and return the table on all ranks. Collective."""

        def collect(beat: Callable[[], None]) -> RolloutTable:
            alone = replace(self.on_main, check=_both(self.check, beat))
            return alone.collect(prompts, first_key, samples, sampling)

        return _from_main(collect, self.layout)

    def _answered(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], sampling: Sampling
    ) -> tuple[int | None, list[list[Rollout]], dict[str, Column]]:
        """Return this rank's scored groups, and the seconds of each part.

        If a signal arrives, return its number and no groups instead of raising, because the other ranks wait for this rank's share.
        """
        stopped: int | None = None
        groups: list[list[Rollout]] = []
        began = time.monotonic()
        generated = began
        try:
            rollouts = self._drawn(prompts, requests, sampling)
            generated = time.monotonic()
            alone = [each for group in rollouts for each in group if each.branch == 0]
            scored = iter(self.score(alone, self.check))
            groups = [rewarded(group, scored) for group in rollouts]
        except StopRequested as request:
            stopped = request.signal_number
        seconds = {"generate": generated - began, "score": time.monotonic() - generated}
        return stopped, groups, {part: np.array([took]) for part, took in seconds.items()}

    def judged(self, table: RolloutTable) -> RolloutTable:
        """Add the scores of reward models, if there are any. Collective."""
        if self.judge is None:
            return table
        judged = self.judge(table)
        return judged.with_rewards(judged.rewards[judged.firsts])

    @property
    def on_main(self) -> Collector:
        """The collector of rank 0 alone, without reward models."""
        return replace(self, layout=Layout(), judge=None, offloads=())

    def _drawn(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], sampling: Sampling
    ) -> list[list[Rollout]]:
        total = sum(request.samples for request in requests)
        with self.progress.phase("rollout", total) as bar:

            def watch(ended: int) -> None:
                self.check()
                bar.advance(ended)

            if self.conversations is not None:
                how = replace(sampling, keeps=True)
                turn = partial(self.generator.generate, sampling=how, watch=lambda _: self.check())
                played: list[list[Rollout]] = self.conversations.play(
                    prompts, requests, sampling, turn, self.check, bar.advance
                )
                self.generator.forget()
                return played
            if self.partial is not None:
                completions = self.partial.generate(self.generator, requests, sampling, watch)
            else:
                completions = self.generator.generate(requests, sampling, watch)
        return [
            [
                Rollout(prompt, sample, completion, self._text_of(completion))
                for sample, completion in enumerate(group)
            ]
            for prompt, group in zip(prompts, completions, strict=True)
        ]

    def _text_of(self, completion: Completion) -> str:
        if completion.text is not None:
            return completion.text
        return self.decode(completion.token_ids.tolist())


def rewarded(group: Sequence[Rollout], scored: Iterator[Rollout]) -> list[Rollout]:
    """Return a group with rewards. A branch of a conversation has those of the scored rollout before it."""
    rollouts = list[Rollout]()
    for rollout in group:
        first = rollouts[-1] if rollout.branch else next(scored)
        error = first.reward_error
        parts = first.reward_parts
        same = replace(rollout, reward=first.reward, reward_parts=parts, reward_error=error)
        rollouts.append(same if rollout.branch else first)
    return rollouts


Share = tuple[int | None, EncodedTable, dict[str, Column]]
"""What some ranks report: a signal or None, their rollouts, and each rank's seconds by part of the work."""


def merged_shares(shares: Sequence[Share]) -> Share:
    """Join the shares of several ranks."""
    signals, tables, seconds = zip(*shares, strict=True)
    stopped = next((number for number in signals if number is not None), None)
    of_ranks = {part: np.concatenate([share[part] for share in seconds]) for part in seconds[0]}
    return stopped, RolloutTable.merged(tables), of_ranks


def _prompt_lengths(prompts: Prompts) -> Any:
    """[N] tokens of each prompt. A data set knows them without reading its rows."""
    if isinstance(prompts, Subset):
        return cast(Any, prompts.dataset).lengths[prompts.indices]
    return np.array([len(prompt.token_ids) for prompt in prompts])


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
        config = self.config
        dynamic = config.algorithm.dynamic_sampling
        how = replace(
            sampling(config.rollout, config.rollout, config.seed, step),
            experts=config.algorithm.router_replay == "rollout",
        )
        groups = RolloutTable.of([])
        wanted = config.batch.prompts
        refills = 0
        while True:
            rows, collected = self._collected(wanted, how)
            groups = RolloutTable.joined([groups, collected]) if refills else collected
            require_rewards(groups, config.reward)
            rewards, of_groups = compared_rewards(groups, dynamic.part, config.reward.part_names)
            varied = has_variance(rewards, of_groups, len(groups))
            # Of a group with a single reward nobody knows whether its prompt is too easy or too hard.
            is_known = np.bincount(of_groups, minlength=len(groups))[-len(rows) :] > 1
            alike = ~varied[-len(rows) :][is_known]
            self.loader.update(np.array(rows)[is_known].tolist(), alike.tolist())
            chosen, wanted = select_groups(varied, config.batch.prompts, refills, dynamic)
            if wanted == 0:
                break
            refills += 1
        # After the choice: groups are chosen by what the reward says of the answers, and not by their lengths.
        groups = self._shaped(groups) if config.algorithm.overlong.buffer else groups
        left_out = np.delete(np.arange(len(groups)), chosen)
        return DrawnBatch(step, groups.take(chosen), groups.take(left_out))

    def _collected(self, count: int, how: Sampling) -> tuple[list[int], RolloutTable]:
        """Take the next `count` rows, and return them and their rollouts. Collective."""
        config = self.config
        collect = self.collector.collect
        first_key = self.loader.cursor
        # Ranks may see different errors in files that are read only now.
        with agree(self.collector.layout if config.data.streaming else Layout()):
            rows = self.loader.take(count)
            prompts: Prompts = Subset(cast(Any, self.dataset), rows)
            if config.data.streaming:
                prompts = [self.dataset[row] for row in rows]
        collected = collect(prompts, first_key, config.rollout.n, how)
        if config.algorithm.advantage.name == "remax":
            greedy = collect(prompts, first_key, 1, replace(how, temperature=0.0))
            greedy = greedy.without_branches()
            baselines = self._shaped(greedy).rewards[collected.groups]
            collected = _without_baseline(collected, greedy)
            collected = collected.with_rewards(collected.rewards, baselines)
        return rows, collected

    def _shaped(self, table: RolloutTable) -> RolloutTable:
        """Add the penalty for long completions to the rewards."""
        limit = self.config.rollout.max_response_length
        penalties = overlong_penalty(
            table.summed(table.lengths), limit, self.config.algorithm.overlong
        )
        return table.with_rewards(table.rewards + penalties)


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
        self._sampler = sampler
        self._check = check
        self._ahead = sampler.config.rollout.ahead
        self._in_flight = sampler.config.rollout.in_flight
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
        # Batches that old weights are to draw come first. So the configuration decides which weights draw a batch, and not
        # how fast the generator is. In flight, only batches that are ready already are taken over.
        count = self._left
        if self._in_flight and self._background is not None:
            count = from_main(self._background.ready(), self._sampler.collector.layout)
        self._take_over(count)
        self._sampler.collector.generator.load_weights(weights, version)
        if self._check is not None and self._left == 0:
            self._check(version)

    def take(self, step: int) -> DrawnBatch:
        """Draw the batches due before `step`, and return that of `step`. Take steps in order."""
        if self._lost is not None:
            raise self._lost
        generator = self._sampler.collector.generator
        first = step + len(self._pending)
        last = min(step + self._ahead, self._total_steps - 1)
        if generator.called_by_rank0:
            self._draw_in_background(first, last)
        else:
            self._draw_now(first, last)
        if self._left == 0 and step >= self._waiting:
            # This step publishes new weights, and nothing is drawn before. Until then training may use the old ones' memory.
            generator.release()
        self._taken = step + 1
        return self._pending.popleft()

    def _draw_now(self, first: int, last: int) -> None:
        """Draw batches on all ranks."""
        for step in range(first, last + 1):
            with self._sampler.collector.offloaded():
                self._pending.append(self._sampler.sample(step))

    def _draw_in_background(self, first: int, last: int) -> None:
        """Let rank 0 draw up to `last`, and wait only if no batch is pending. `first` is the next to draw, if none is begun."""
        collector = self._sampler.collector
        if self._background is None:
            self._background = BackgroundSampler(self._sampler, first, self._partial)
        self._background.go_on(last)
        if self._pending:
            return
        with collector.offloaded():
            self._take_over(1, collector.check)
        if self._lost is not None:
            raise self._lost

    @property
    def _left(self) -> int:
        return 0 if self._background is None else self._background.left

    def _take_over(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        """Wait for batches that rank 0 draws, and share them with all ranks. Collective.

        It calls `check` meanwhile, which may raise only before an update: a save after one needs these batches.
        """
        background = self._background
        if background is None or count == 0 or self._lost is not None:
            return
        collector = self._sampler.collector
        began = time.monotonic()

        def receive(
            beat: Callable[[], None],
        ) -> tuple[list[tuple[DrawnBatch, State]], LostRewards | None]:
            received = list[tuple[DrawnBatch, State]]()
            try:
                while len(received) < count:
                    received.append(background.next(_both(check, beat)))
            except LostRewards as lost:
                return received, lost
            return received, None

        drawn, self._lost = _from_main(receive, collector.layout)
        background.left -= len(drawn)
        self._waited += time.monotonic() - began
        for batch, state in drawn:
            groups = collector.judged(batch.groups)
            left_out = collector.judged(batch.left_out)
            try:
                require_rewards(
                    RolloutTable.joined([left_out, groups]), self._sampler.config.reward
                )
            except LostRewards as lost:
                self._lost = lost
                return
            # A save has the loader's state after the last pending batch. The thread's own loader may be further.
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
        groups = batch.groups
        answered = np.flatnonzero(groups.lengths > 0)
        ages = groups.by_kind(lambda kind: self._age(batch.step, kind.weights_version))[answered]
        mean_ages = ages.astype(np.float64)
        is_mixed = groups.by_kind(lambda kind: len(kind.later_versions))[answered]
        for place in np.flatnonzero(is_mixed):
            versions = groups.rollout(answered[place]).completion.versions
            mean_ages[place] = self._age(batch.step, versions).mean()
        stats = rollout_stats(RolloutTable.joined([batch.left_out, groups]))
        stragglers = self._sampler.collector.stragglers
        if stragglers is not None:
            stats |= stragglers.stats()
        if self._sampler.collector.generator.called_by_rank0:
            stats["perf/wait_seconds"] = Max(self._waited)
            self._waited = 0.0
        if len(answered) and (self._ahead or mean_ages.any()):
            stats["rollout/staleness/mean"] = Mean(float(mean_ages.sum()), len(mean_ages))
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
        self._last = first - 1
        self._failed = False
        self._may_draw: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        # Not a SimpleQueue, whose `get` can wait for ever if a signal arrives at the end of its time-out.
        self._drawn: queue.Queue[tuple[DrawnBatch, State] | BaseException] = queue.Queue()
        collector = sampler.collector
        if collector.layout.is_main:
            # The thread takes part in no collective, which would mix with those of training. It shows no progress and checks
            # no signals, because training does both. Its loader is its own, because a save needs the state of the other.
            alone = replace(
                collector.on_main,
                progress=Progress(False, moved=collector.progress.moved),
                check=lambda: None,
                partial=partial,
                conversations=collector.conversations and collector.conversations.apart(),
            )
            own_sampler = replace(sampler, collector=alone, loader=copy(sampler.loader))
            # A daemon, so that a process that ends does not wait for answers.
            Thread(target=self._draw, args=(own_sampler,), daemon=True).start()

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

    `make` keeps calling its argument, so that it may outlast the time-out of a collective: other ranks wait in one, and each second
    rank 0 completes it with None.
    """
    outcome: tuple[T | None, StopRequested | BurnishError | None] | None = None
    last_beat = time.monotonic()

    def beat() -> None:
        nonlocal last_beat
        if time.monotonic() - last_beat >= _BEAT_SECONDS:
            from_main(None, layout)
            last_beat = time.monotonic()

    if layout.is_main:
        try:
            outcome = make(beat), None
        except (StopRequested, BurnishError) as raised:
            outcome = None, raised
        outcome = from_main(outcome, layout)
    while outcome is None:
        outcome = from_main(None, layout)
    result, error = outcome
    if isinstance(error, BurnishError):
        error.printed_by_main = layout.world > 1
    if error is not None:
        raise error
    return cast(T, result)


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
    table = table.without_branches()
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
    values, is_given = table.part(part)
    is_given &= table.is_scored
    return values[is_given], table.groups[is_given]


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
