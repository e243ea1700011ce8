"""From prompts to scored rollouts. Every rank generates and scores its share; all ranks get all rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from burnish.data.balance import share_evenly
from burnish.distributed.collectives import gather_objects
from burnish.distributed.layout import Layout
from burnish.records import Completion, Prompt, Request, Rollout
from burnish.rewards.overview import Complaints
from burnish.rollout.base import Generator, Sampling
from burnish.tracking.progress import Progress
from burnish.train.reward_models import Judge
from burnish.train.signals import Stopper, StopRequested

Score = Callable[[Sequence[Rollout], Callable[[], None]], list[Rollout]]
"""Fills in the rewards of rollouts, in order. Calls what it is given again and again while it waits: it may raise."""


@dataclass(frozen=True, slots=True)
class Collector:
    """What it takes to turn prompts into scored rollouts on this rank."""

    generator: Generator
    """Where completions come from."""
    decode: Callable[[Sequence[int]], str]
    """Token ids to text, special tokens removed."""
    score: Score
    """The rewards."""
    layout: Layout
    """Which share of the prompts is this rank's."""
    stopper: Stopper
    """Asked whether to stop between decoding steps, and while rewards are waited for."""
    progress: Progress
    """Shows how many completions are done."""
    complaints: Complaints
    """Hears of what reward functions fail at."""
    judge: Judge = list
    """Adds what reward models say, of which there are none otherwise."""

    def collect(
        self, prompts: Sequence[Prompt], first_key: int, samples: int, sampling: Sampling
    ) -> list[list[Rollout]]:
        """Return `samples` scored rollouts of each prompt, in the order of the prompts, the same on every rank. Collective.

        Prompt i is drawn with key `first_key` + i. Raises `StopRequested` on all ranks if a signal reached any, and `BurnishError`
        if reward functions fail for all rollouts, round after round.
        """
        shared = share_evenly(
            np.array([len(prompt.token_ids) for prompt in prompts]), self.layout.data_size
        )
        mine = shared[self.layout.data_rank]
        requests = [Request(first_key + i, prompts[i].token_ids, samples=samples) for i in mine]
        stopped: int | None = None
        groups: list[list[Rollout]] = []
        try:
            completions = self._generated(requests, sampling)
            groups = self._scored([prompts[i] for i in mine], completions)
        except StopRequested as request:
            stopped = request.signal_number
        shares = gather_objects((stopped, groups), self.layout)
        for signal_number, _ in shares:
            if signal_number is not None:
                raise StopRequested(signal_number)
        by_prompt = {
            number: group
            for numbers, (_, theirs) in zip(shared, shares, strict=True)
            for number, group in zip(numbers, theirs, strict=True)
        }
        ordered = [rollout for number in range(len(prompts)) for rollout in by_prompt[number]]
        self.complaints.hear(ordered)
        judged = iter(self.judge(ordered))
        return [[next(judged) for _ in by_prompt[number]] for number in range(len(prompts))]

    def _generated(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        total = sum(request.samples for request in requests)
        with self.progress.phase("rollout", total) as bar:

            def watch(ended: int) -> None:
                self.stopper.check()
                bar.advance(ended)

            return self.generator.generate(requests, sampling, watch)

    def _scored(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> list[list[Rollout]]:
        rollouts = [
            Rollout(prompt, sample, completion, self.decode(completion.token_ids.tolist()))
            for prompt, group in zip(prompts, completions, strict=True)
            for sample, completion in enumerate(group)
        ]
        scored = iter(self.score(rollouts, self.stopper.check))
        return [[next(scored) for _ in group] for group in completions]
