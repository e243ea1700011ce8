"""The common part of generators in this process: running completions, and when they end."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from burnish.errors import UsageError
from burnish.records import Completion, Experts, Floats, Request, StopReason
from burnish.rollout.base import (
    Decode,
    Follow,
    Generator,
    RunningRequest,
    Sampling,
    Watch,
    limit_of,
    require_valid,
)
from burnish.rollout.builtin.sampling import stream_key

R = TypeVar("R", bound="Running")

_MARGIN = 8
"""Characters decoded before the longest stop string, because tokenizers may alter a text's first ones."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StopRule:
    """Ends a completion: at a token id, a stop string, or its length limit.

    The token that completes a stop string is kept: training sees whole tokens.
    """

    def __init__(
        self, sampling: Sampling, eos_token_ids: Sequence[int], decode: Decode | None
    ) -> None:
        """Raises `UsageError` for stop strings without `decode`, or an empty stop string."""
        if sampling.stop_strings and decode is None:
            raise UsageError(
                "stop strings need a tokenizer to decode with",
                have=f"stop strings {list(sampling.stop_strings)} and no decode function",
                do="give the generator a decode function, or use stop_token_ids",
            )
        if "" in sampling.stop_strings:
            have = list(sampling.stop_strings)
            raise UsageError("a stop string is empty", have=have, do="remove it from rollout.stop")
        self._ids = frozenset(eos_token_ids) | frozenset(sampling.stop_token_ids)
        self._strings = sampling.stop_strings
        self._decode = decode or str
        self._endings = frozenset(string[-1] for string in self._strings)
        self._needed = max(map(len, self._strings), default=0) + _MARGIN
        self._candidates: dict[int, bool] = {}

    def ended(self, tokens: Sequence[int], max_tokens: int) -> StopReason | None:
        """Return why the last of `tokens` ends them, or None. Call it after each token."""
        if tokens[-1] in self._ids:
            return "stop"
        if self._strings and self._may_complete(tokens[-1]):
            tail = self._tail(tokens)
            if any(string in tail for string in self._strings):
                return "stop"
        return "length" if len(tokens) >= max_tokens else None

    def _may_complete(self, token: int) -> bool:
        """Return whether the token can end with the last character of a stop string.

        True for tokens that are no text alone, and if a string ends with a space: tokenizers drop leading spaces.
        """
        known = self._candidates.get(token)
        if known is None:
            piece = self._decode([token])
            known = (
                not piece
                or _REPLACEMENT in piece
                or " " in self._endings
                or not self._endings.isdisjoint(piece)
            )
            self._candidates[token] = known
        return known

    def _tail(self, tokens: Sequence[int]) -> str:
        count = self._needed
        text = self._decode(tokens[-count:])
        while len(text) < self._needed and count < len(tokens):
            count *= 2
            text = self._decode(tokens[-count:])
        return text


@dataclass(slots=True, eq=False, kw_only=True)
class Running:
    """A running completion."""

    key: int
    """Key of the completion's random numbers."""
    drawn: int
    """How many of the prompt's last tokens an earlier request drew."""
    max_tokens: int
    """The completion's length limit, `drawn` included."""
    tokens: list[int]
    """The tokens drawn earlier, then this request's own."""
    experts: list[Experts] = field(default_factory=list)
    """Experts of the prompt's tokens, then of this request's own tokens but the last."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Versions of the weights, each with the first token that it drew."""
    reason: StopReason | None = None
    """Why the completion has ended; None while it runs."""
    first: float = 0.0
    """When its first token came."""
    last: float = 0.0
    """When its last token came."""

    @property
    def room(self) -> int:
        """Return the most tokens that this request may draw."""
        return self.max_tokens - self.drawn

    @property
    def own(self) -> list[int]:
        """Return the tokens of this request."""
        return self.tokens[self.drawn :]

    def take(self, tokens: Sequence[int], version: int, rule: StopRule, now: float) -> bool:
        """Append a version's tokens up to one that ends the completion; return whether one does."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.tokens) - self.drawn))
        self.first = self.first or now
        self.last = now
        for token in tokens:
            self.tokens.append(token)
            self.reason = rule.ended(self.tokens, self.max_tokens)
            if self.reason is not None:
                return True
        return False

    def completion(self, sampled: Floats, raw: Floats, asked: float) -> Completion:
        """Return the completion with its log-probs; `asked` is the request's time."""
        return Completion(
            token_ids=np.array(self.own, dtype=np.int64),
            sampled_logprobs=sampled,
            logprobs=raw,
            stop_reason=self.reason,
            weights_version=self.versions[0][0] if self.versions else 0,
            later_versions=tuple(self.versions[1:]),
            experts=np.concatenate(self.experts) if self.experts else None,
            times=(asked, self.first, self.last),
        )


def _start(request: Request, sampling: Sampling, make: Callable[..., R]) -> list[R]:
    samples = range(request.first_sample, request.first_sample + request.samples)
    keys = [
        stream_key(sampling.seed, sampling.step, request.prompt_key, sample, request.turn)
        for sample in samples
    ]
    begun = request.token_ids[len(request.token_ids) - request.drawn :].tolist()
    limit = limit_of(request, sampling)
    return [make(key=key, drawn=request.drawn, tokens=[*begun], max_tokens=limit) for key in keys]


class LocalGenerator(Generator, Generic[R]):
    """Keeps the requests and completions of a running `generate`."""

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        decode: Decode | None,
        max_positions: int | None,
        *,
        experts: bool = True,
    ) -> None:
        """`experts`: whether the generator can record experts."""
        self._eos_token_ids = tuple(eos_token_ids)
        self._decode = decode
        self._max_positions = max_positions
        self._records_experts = experts
        self._version: int | None = None
        self._underway: Callable[[], list[RunningRequest]] = list
        self._following: Callable[[bool], list[R]] | None = None
        """Returns completions that follow from ended ones; None without `Follow`."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        watch: Watch | None = None,
        follow: Follow | None = None,
    ) -> list[list[Completion]]:
        """See `Generator.generate`. What `follow` asks for comes after the requests.

        Raises `UsageError` without weights, and as `require_valid` and `StopRule` do.
        """
        if self._version is None:
            raise UsageError("the generator has no weights", do="call load_weights first")
        if sampling.experts and not self._records_experts:
            raise UsageError(
                "algorithm.router_replay: the generator does not record experts",
                have="algorithm.router_replay=rollout",
                do="set algorithm.router_replay=recompute or none, or choose another rollout.engine",
            )
        rule = StopRule(sampling, self._eos_token_ids, self._decode)
        begun: list[tuple[Request, list[R], float]] = []

        def begin(new: Sequence[Request]) -> list[R]:
            require_valid(new, sampling, self._max_positions)
            groups = [_start(request, sampling, self._maker(request)) for request in new]
            begun.extend((*pair, time.time()) for pair in zip(new, groups, strict=True))
            return [each for group in groups for each in group]

        def completed(group: Sequence[R], asked: float) -> list[Completion]:
            return [each.completion(*self._logprobs(each), asked) for each in group]

        def so_far() -> list[RunningRequest]:
            return [RunningRequest(sampling, each[0], completed(*each[1:])) for each in begun]

        self._underway = so_far
        try:
            running = begin(requests)
            if follow is not None:
                from burnish.rollout.following import Following

                self._following = Following(follow, begun, begin, completed)
            self._complete(running, sampling, rule, watch)
        finally:
            self._following = None
            self._underway = list
        return [each.completions for each in so_far()]

    def so_far(self) -> list[RunningRequest]:
        """See `Generator.so_far`."""
        return self._underway()

    @abstractmethod
    def _maker(self, request: Request) -> Callable[..., R]:
        """Return a constructor of a request's completions."""

    @abstractmethod
    def _complete(
        self, running: Sequence[R], sampling: Sampling, rule: StopRule, watch: Watch | None
    ) -> None:
        """Generate until all have ended."""

    @abstractmethod
    def _logprobs(self, running: R) -> tuple[Floats, Floats]:
        """Return sampled and raw log-probs of `running.own`."""
