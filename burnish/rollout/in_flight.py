"""Keep partial completions, so that a save stores them and a resumed run continues them.

A completion of n tokens continues, with draw n, as a request whose prompt ends with these tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from burnish.records import Completion, Request
from burnish.records.completion_parts import joined_completions
from burnish.records.samples import digest_of
from burnish.rollout.base import Generator, Sampling, Watch


class SampleKey(NamedTuple):
    """Identifies a completion of training."""

    step: int
    """The step that trains on it, 0-based."""
    prompt_key: int
    sample: int
    greedy: bool
    """Whether this is the greedy completion that ReMax draws beside the others."""
    prompt: str
    """Digest of the prompt's tokens, in hex. After a change of data or template, `prompt_key` may belong to another prompt."""


class PartialCompletions:
    """Completions begun for training, ended ones included."""

    def __init__(self, begun: Mapping[SampleKey, Completion]) -> None:
        """`begun` are a save's completions."""
        self._known = dict(begun)
        self._lock = threading.Lock()
        self._sampling: Sampling | None = None

    def generate(
        self,
        generator: Generator,
        requests: Sequence[Request],
        sampling: Sampling,
        watch: Watch | None = None,
    ) -> list[list[Completion]]:
        """Return what `generator.generate` returns, but continue begun completions."""
        keyed = [(request, _keys(request, sampling)) for request in requests]
        remaining = [part for request, keys in keyed for part in self._remaining(request, keys)]
        self._sampling = sampling
        drawn = generator.generate(remaining, sampling, watch)
        with self._lock:
            for request, group in zip(remaining, drawn, strict=True):
                for key, completion in zip(_keys(request, sampling), group, strict=True):
                    self._known[key] = _joined(self._known.get(key), completion)
        self._sampling = None
        return [[self._known[key] for key in keys] for _, keys in keyed]

    def so_far(self, generator: Generator) -> dict[SampleKey, Completion]:
        """Return all completions so far, from any thread."""
        sampling = self._sampling
        running = generator.so_far() if sampling is not None else []
        with self._lock:
            known = dict(self._known)
        completions = dict(known)
        for part in running:
            if part.sampling != sampling:  # left over from an interrupted evaluation
                continue
            for key, continuation in zip(
                _keys(part.request, part.sampling), part.completions, strict=True
            ):
                begun = known.get(key)
                if part.request.drawn == (0 if begun is None else len(begun.token_ids)):
                    completions[key] = _longer(completions.get(key), _joined(begun, continuation))
        return {key: each for key, each in completions.items() if len(each.token_ids)}

    def forget(self, step: int) -> None:
        """Forget completions for steps before `step`."""
        with self._lock:
            self._known = {key: each for key, each in self._known.items() if key.step >= step}

    def _remaining(self, request: Request, keys: Sequence[SampleKey]) -> Iterator[Request]:
        begun = [self._known.get(key) for key in keys]
        if not any(begun):
            # One request, because a generator reads its prompt once for all samples.
            yield request
            return
        for key, completion in zip(keys, begun, strict=True):
            alone = replace(request, samples=1, first_sample=key.sample)
            if completion is None:
                yield alone
            elif completion.stop_reason is None:
                ids = np.concatenate([request.token_ids, completion.token_ids])
                yield replace(alone, token_ids=ids, drawn=len(completion.token_ids))


def _joined(begun: Completion | None, continuation: Completion) -> Completion:
    """Append its continuation to a begun completion."""
    return continuation if begun is None else joined_completions([begun, continuation])


def _longer(one: Completion | None, other: Completion) -> Completion:
    """Return the completion that has ended or is longer: one that ends meanwhile or changes servers is reported twice."""
    both = [other] if one is None else [one, other]
    return max(both, key=lambda each: (each.stop_reason is not None, len(each.token_ids)))


def _keys(request: Request, sampling: Sampling) -> list[SampleKey]:
    greedy = sampling.temperature == 0
    numbers = range(request.samples)
    prompt = digest_of(request.token_ids[: len(request.token_ids) - request.drawn]).hex()
    return [
        SampleKey(sampling.step, request.prompt_key, request.first_sample + n, greedy, prompt)
        for n in numbers
    ]
