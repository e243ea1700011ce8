"""Completions that are under way at a save: they go on where they were, and none is older than `rollout.ahead`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws
from support.runs.collectors import Collected

from burnish.boxes.shards import Publication
from burnish.checkpoint.manifest import Commit, Manifest
from burnish.checkpoint.steps import CommittedStep
from burnish.config.schema import RewardConfig
from burnish.data.loader import Loader
from burnish.methods.parts.rollouts import RolloutQueue
from burnish.records import Completion, Prompt, Request, Rollout
from burnish.records.completion_parts import joined_completions
from burnish.records.rollout_table import RolloutTable
from burnish.records.samples import digest_of
from burnish.rollout.base import RunningRequest, Sampling
from burnish.rollout.in_flight import PartialCompletions, SampleKey
from burnish.runs.drawn_batch import DrawnBatch
from burnish.runs.pending_batches import ahead_files, read_ahead

NOTHING = Publication([])
PROMPTS, SAMPLES, MOST = 2, 2, 7


PROMPT = np.array([5, 6])


def key_of(step: int, prompt_key: int, sample: int, *, greedy: bool) -> SampleKey:
    return SampleKey(step, prompt_key, sample, greedy, digest_of(PROMPT).hex())


def whole(key: SampleKey) -> list[int]:
    """The tokens of a completion, whoever draws it and in however many parts."""
    drawn = random.Random(str(key))
    return [drawn.randrange(1000) for _ in range(drawn.randint(1, MOST))]


@dataclass
class Ticking:
    """A generator whose completions get their tokens one by one, in any order, with the weights that it has then."""

    order: random.Random
    pause: float
    version: int = -1
    called_by_rank0: bool = True
    begun: dict[SampleKey, int] = field(default_factory=dict)
    """How many tokens each had when it was asked for."""
    lock: Any = field(default_factory=threading.Lock)
    running: list[tuple[Request, list[list[tuple[int, int]]], Sampling]] = field(
        default_factory=list
    )

    def load_weights(self, weights: Publication, version: int) -> None:
        with self.lock:
            self.version = version

    def release(self) -> None:
        pass

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Any = None
    ) -> list[list[Completion]]:
        with self.lock:
            self.running = [(r, [[] for _ in range(r.samples)], sampling) for r in requests]
        left = []
        for request, made, _ in self.running:
            for number, tokens in enumerate(made, request.first_sample):
                greedy = sampling.temperature == 0
                key = key_of(sampling.step, request.prompt_key, number, greedy=greedy)
                assert key not in self.begun
                self.begun[key] = request.drawn
                before = request.token_ids[len(request.token_ids) - request.drawn :].tolist()
                assert before == whole(key)[: request.drawn]
                left.append((tokens, whole(key)[request.drawn :]))
                assert left[-1][1]
        while left:
            tokens, coming = self.order.choice(left)
            with self.lock:
                tokens.append((coming.pop(0), self.version))
            left = [each for each in left if each[1]]
            time.sleep(self.pause * self.order.random())
        return [each.completions for each in self.now()]

    def so_far(self) -> list[RunningRequest]:
        """As servers tell it: of one that ends meanwhile how far it was, too, in any order."""
        before = self.now()
        time.sleep(self.pause * len(before))
        told = [*before, *self.now()]
        return told if self.version % 2 else told[::-1]

    def now(self) -> list[RunningRequest]:
        with self.lock:
            return [
                RunningRequest(sampling, request, [self.made(request, sampling, *each) for each in enumerate(made, request.first_sample)])
                for request, made, sampling in self.running
            ]  # fmt: skip

    def made(
        self, request: Request, sampling: Sampling, number: int, drawn: list[tuple[int, int]]
    ) -> Completion:
        greedy = sampling.temperature == 0
        key = key_of(sampling.step, request.prompt_key, number, greedy=greedy)
        tokens = np.array([token for token, _ in drawn], np.int64)
        spans = [(v, i) for i, (_, v) in enumerate(drawn) if i == 0 or v != drawn[i - 1][1]]
        return Completion(
            tokens,
            -tokens.astype(np.float32),
            -tokens.astype(np.float32) / 3,
            "stop" if request.drawn + len(tokens) == len(whole(key)) else None,
            spans[0][0] if spans else 0,
            later_versions=tuple(spans[1:]),
        )


@dataclass
class Sampled:
    """Stands for `GroupSampler`: two rounds of prompts, of which the second is greedy."""

    config: Any
    collector: Collected
    loader: Any

    def sample(self, step: int) -> DrawnBatch:
        first, groups = self.loader.cursor, []
        self.loader.cursor += PROMPTS
        assert first == step * PROMPTS  # prompts in the order of the data
        assert self.collector.partial is not None
        for samples, temperature in ((SAMPLES, 1.0), (1, 0.0)):
            requests = [Request(first + i, PROMPT, samples) for i in range(PROMPTS)]
            how = Sampling(MOST, temperature=temperature, step=step)
            made = self.collector.partial.generate(self.collector.generator, requests, how)
            for request, group in zip(requests, made, strict=True):
                prompt = Prompt(request.prompt_key, request.token_ids, "a", None, 5, "sums", {})
                groups.append([Rollout(prompt, i, each, "x") for i, each in enumerate(group)])
                for number, each in enumerate(group):
                    key = key_of(step, request.prompt_key, number, greedy=temperature == 0)
                    assert each.token_ids.tolist() == whole(key)
                    assert (
                        each.logprobs.tolist() == (-each.token_ids.astype(np.float32) / 3).tolist()
                    )
                    assert each.stop_reason == "stop"
        return DrawnBatch(step, RolloutTable.of(groups), RolloutTable.of([]))


def stored(
    step: int, pending: Sequence[DrawnBatch], partial: Mapping[SampleKey, Completion]
) -> tuple[tuple[DrawnBatch, ...], dict[SampleKey, Completion]]:
    """What a save and a resumption make of it."""
    commit = Commit("0.1", "ab", step, "", 0, healthy=True)
    state = {"ahead": len(pending)}
    place = CommittedStep(Path("step"), commit, Manifest("ab", step, 1, {}), state)
    return read_ahead(place, ahead_files(pending, partial))


@draws(60, deadline=None)
@given(
    st.integers(2, 8),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.booleans()), max_size=4),
    st.lists(st.sampled_from([0.0, 0.001, 0.003]), min_size=1),
    st.sampled_from([0.0, 0.0003]),
    st.integers(0, 1 << 30),
)
def test_a_killed_run_goes_on_with_what_was_begun(
    total: int,
    starts: list[tuple[int, int, bool]],
    learns: list[float],
    pause: float,
    order: int,
) -> None:
    """In whatever order completions end, and wherever the save and the kill are."""
    step = 0
    pending, partial = tuple[DrawnBatch, ...](), dict[SampleKey, Completion]()
    for steps, ahead, killed_later in [*starts, (total, 2, False)]:
        rollout = SimpleNamespace(ahead=ahead, in_flight=True)
        critic, reward = SimpleNamespace(warmup_steps=0), RewardConfig()
        config = SimpleNamespace(rollout=rollout, critic=critic, reward=reward)
        generator = Ticking(random.Random(order), pause)
        loader = Loader(1, 0, shuffle=False, cursor=(step + len(pending)) * PROMPTS)
        queue = RolloutQueue(Sampled(config, Collected(generator), loader), total)  # type: ignore[arg-type]
        with closing(queue):
            queue.restore(pending, partial)
            queue.publish(NOTHING, step)
            first, old = step + len(pending), partial
            for number in range(step, min(step + steps, total)):
                batch = queue.take(number)
                for each in batch.groups.rollouts:
                    versions = each.completion.versions
                    assert (np.diff(versions) >= 0).all()
                    assert number < first or versions.min() >= number - ahead
                time.sleep(learns[number % len(learns)])
                queue.publish(NOTHING, number + 1)
                pending = queue.pending()
                assert loader.cursor == (number + 1 + len(pending)) * PROMPTS
                time.sleep(learns[-1 - number % len(learns)])
                partial = queue.partial()  # type: ignore[assignment]
                assert all(key.step >= number + 1 + len(pending) for key in partial)
                for key, made in partial.items():
                    assert made.token_ids.tolist() == whole(key)[: len(made.token_ids)]
                    assert made.versions.min() >= key.step - ahead
                pending, partial = stored(number + 1, pending, partial)
                step = number + 1
            if killed_later and step < total:
                queue.take(step)
            young = {
                key: each for key, each in old.items() if each.weights_version >= key.step - ahead
            }
            for key, count in generator.begun.items():
                had = young.get(key)
                assert count == (0 if had is None else len(had.token_ids))
                assert had is None or had.stop_reason is None


def test_what_was_begun_for_a_prompt_does_not_go_on_after_another() -> None:
    """Data and chat template may change between two starts."""
    key = key_of(3, 7, 0, greedy=False)
    tokens = np.array(whole(key)[:1], np.int64)
    numbers = tokens.astype(np.float32)
    begun, generator = Completion(tokens, numbers, numbers, None, 1), Ticking(random.Random(0), 0.0)
    other = Request(7, PROMPT + 1)
    ((made,),) = PartialCompletions({key: begun}).generate(
        generator, [other], Sampling(MOST, step=3)
    )
    assert generator.begun == {key: 0}
    assert made.token_ids.tolist() == whole(key)


def test_spans_of_weights_are_joined() -> None:
    def part(count: int, version: int, *later: tuple[int, int]) -> Completion:
        numbers = np.arange(count, dtype=np.float32)
        made = Completion(np.arange(count), numbers, numbers, None, version)
        return replace(made, later_versions=later)

    both = joined_completions([part(4, 1, (2, 3)), part(3, 2, (5, 1))])
    assert both.versions.tolist() == [1, 1, 1, 2, 2, 5, 5]
    assert (both.weights_version, both.later_versions) == (1, ((2, 3), (5, 5)))
    assert joined_completions([part(2, 3), part(0, 0)]).versions.tolist() == [3, 3]
    assert joined_completions([part(2, 3), part(1, 4)]).later_versions == ((4, 2),)
