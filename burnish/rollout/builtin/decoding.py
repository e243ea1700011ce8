"""One call of the built-in generator: which completion runs in which slot, until all have ended.

Waiting completions enter slots in order, as soon as slots are free. Prompts are read ahead in
packed chunks, each once, copied into the slot of every sample or one place for all of them, and forgotten. Between steps the running
completions always fill the first n slots, so no completion is computed that is known to have ended; on an accelerator
that is known one step late (`burnish.rollout.builtin.async_readback`). Nothing here depends on
time, so the same call gives the same schedule. Left out: evicting a completion for lack of memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from burnish.distributed.device import has_matrix_units
from burnish.errors import IncompatibleError
from burnish.models.routing import Routing
from burnish.records import Completion, Experts, Request, StopReason
from burnish.rollout.base import Sampling, Watch
from burnish.rollout.builtin.async_readback import Arriving, Token, steps_behind
from burnish.rollout.builtin.cache import Cache, PromptCache, SlotCache
from burnish.rollout.builtin.forward import Forward
from burnish.rollout.builtin.rng import stream_key, uniforms
from burnish.rollout.builtin.sampling import Drawn, draw
from burnish.rollout.builtin.shared_cache import SharedCache
from burnish.rollout.builtin.stopping import StopRule

_PREFILL_TOKENS = 8192
"""Prompts are read in chunks of at most so many tokens (a longer prompt alone)."""
_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.OVERRIDEABLE,
]
"""Of attention. cuDNN's, which torch takes first on new GPUs, is planned anew for every shape, and shapes change with every step."""


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """What decoding needs of the model."""

    forward: Forward
    """Token ids to hidden states."""
    logits: Callable[[Tensor], Tensor]
    """Hidden states [n, hidden] to fp32 logits [n, V] in memory of their own."""
    device: torch.device
    """Where it computes."""
    layers: int
    """How many layers keep keys and values."""


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Prompts that were read together."""

    cache: PromptCache
    """Their keys and values."""
    last: Tensor
    """[prompts, hidden], the hidden state after each one's last token."""
    experts: Sequence[Experts]
    """Of each one's tokens; empty where nobody asked."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt, and from when it is read until its last completion starts, its place in a chunk."""

    request: Request
    chunk: _Chunk | None = None
    index: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
    """A completion in the making."""

    prompt: _Prompt
    key: int
    tokens: list[int] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)
    """Of the prompt, then of each token that was computed."""
    reason: StopReason | None = None
    """Why it has ended; None while it runs."""

    def append(self, drawn: Token, rule: StopRule) -> bool:
        """Take a token, unless the completion had ended before; whether it ends with this one."""
        if self.reason is not None:
            return False
        self.tokens.append(drawn.token)
        self.sampled_logprobs.append(drawn.sampled_logprob)
        self.logprobs.append(drawn.logprob)
        if drawn.experts is not None:
            self.experts.append(drawn.experts)
        self.reason = rule.ended(self.tokens)
        return self.reason is not None

    def finished(self, version: int) -> Completion:
        """The record of the completion."""
        return Completion(
            token_ids=np.array(self.tokens, dtype=np.int64),
            sampled_logprobs=np.array(self.sampled_logprobs, dtype=np.float32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            stop_reason=self.reason or "length",
            weights_version=version,
            experts=np.concatenate(self.experts) if self.experts else None,
        )


class Decoding:
    """The completions of some requests, made in at most `slots` slots."""

    def __init__(
        self,
        network: Network,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_rule: StopRule,
        slots: int,
    ) -> None:
        self._network, self._sampling, self._stop_rule = network, sampling, stop_rule
        prompts = [_Prompt(request) for request in requests]
        self._groups = [_sequences(prompt, sampling) for prompt in prompts]
        self._waiting = deque(sequence for group in self._groups for sequence in group)
        self._unread = deque(prompt for prompt in prompts if prompt.request.samples)
        slots = min(slots, len(self._waiting))
        longest = max((len(prompt.request.token_ids) for prompt in self._unread), default=0)
        self._cache = _cache(network.device, slots, longest, sampling.max_tokens)
        self._slots: list[_Sequence | None] = [None] * slots
        self._arriving: deque[Arriving[_Sequence]] = deque()
        self._behind = steps_behind(network.device)
        self._ended = 0
        self._state = torch.zeros(4, slots, dtype=torch.int64, device=network.device)
        """Latest token, its position, key, tokens drawn so far: one column per slot."""

    def run(self, version: int, watch: Watch | None = None) -> list[list[Completion]]:
        """Decode to the end: for each request its completions, marked with the weights' version."""
        reported = 0
        with sdpa_kernel(_KERNELS):
            while running := self._refill():
                self._step(running)
                if watch is not None:
                    watch(self._ended - reported)
                    reported = self._ended
        if watch is not None:
            watch(self._ended - reported)
        return [[sequence.finished(version) for sequence in group] for group in self._groups]

    def _refill(self) -> int:
        """Put waiting completions into free slots, close gaps; how many completions run."""
        while self._waiting and (free := [i for i, held in enumerate(self._slots) if _free(held)]):
            rows = free[: len(self._waiting)]
            self._start(rows, [self._waiting.popleft() for _ in rows])
        self._slots = [None if _free(held) else held for held in self._slots]
        running = sum(held is not None for held in self._slots)
        gaps = [row for row, held in enumerate(self._slots[:running]) if held is None]
        if gaps:
            late = [row for row in range(running, len(self._slots)) if self._slots[row] is not None]
            self._move(late, gaps)
        return running

    def _move(self, sources: list[int], targets: list[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._slots[target], self._slots[source] = self._slots[source], None
        rows_from, rows_to = self._index(sources), self._index(targets)
        self._cache.move(rows_from, rows_to)
        self._state[:, rows_to] = self._state[:, rows_from]

    def _start(self, rows: list[int], sequences: list[_Sequence]) -> None:
        """Give each completion its slot, its prompt's keys and values, and its first token."""
        by_chunk: dict[_Chunk, list[int]] = {}
        for number, sequence in enumerate(sequences):
            by_chunk.setdefault(self._chunk_of(sequence.prompt), []).append(number)
            self._slots[rows[number]] = sequence
        for chunk, numbers in by_chunk.items():
            for number in numbers if chunk.experts else ():
                sequences[number].experts.append(chunk.experts[sequences[number].prompt.index])
            mine = [rows[number] for number in numbers]
            which = [sequences[number].prompt.index for number in numbers]
            index = self._index(mine)
            self._cache.place(index, chunk.cache, which)
            keys = self._index([sequences[number].key for number in numbers])
            drawn = self._draw(chunk.last[self._index(which)], keys, torch.zeros_like(keys))
            self._receive([sequences[number] for number in numbers], drawn)
            lengths = self._index([chunk.cache.lengths[prompt] for prompt in which])
            self._state[:, index] = torch.stack(
                (drawn.tokens, lengths, keys, torch.ones_like(keys))
            )
        self._forget(sequences)

    def _forget(self, started: Sequence[_Sequence]) -> None:
        """Let go of what was read for prompts of which no completion waits; they come in order."""
        coming = self._waiting[0].prompt if self._waiting else None
        for sequence in started:
            if sequence.prompt is not coming:
                sequence.prompt.chunk = None

    def _chunk_of(self, prompt: _Prompt) -> _Chunk:
        """The chunk that the prompt was read with, reading up to it first."""
        while prompt.chunk is None:
            self._read_ahead()
        return prompt.chunk

    def _read_ahead(self) -> None:
        """Read the next prompts, as many as fit into a chunk."""
        prompts: list[_Prompt] = []
        room = _PREFILL_TOKENS
        while self._unread and (not prompts or len(self._unread[0].request.token_ids) <= room):
            prompts.append(self._unread.popleft())
            room -= len(prompts[-1].request.token_ids)
        lengths = [len(prompt.request.token_ids) for prompt in prompts]
        device = self._network.device
        cache = PromptCache(lengths, device)
        tokens = np.concatenate([prompt.request.token_ids for prompt in prompts])
        positions = torch.cat([torch.arange(length) for length in lengths])
        routing = self._routing()
        hidden = self._network.forward(
            torch.from_numpy(tokens.astype(np.int64)).to(device, non_blocking=True),
            positions.to(device, non_blocking=True),
            cache,
            routing,
        )
        if len(cache.keys) != self._network.layers:
            raise IncompatibleError(
                "some layers of the model keep no keys and values, so it cannot be decoded here",
                have=f"{len(cache.keys)} attention layers",
                want=f"attention in all of the model's {self._network.layers} layers",
            )
        ends = np.cumsum(lengths)
        experts = np.split(routing.record().cpu().numpy(), ends[:-1]) if routing else ()
        last = torch.from_numpy(ends - 1).to(device, non_blocking=True)
        read = _Chunk(cache, hidden[last], experts)
        for index, prompt in enumerate(prompts):
            prompt.chunk, prompt.index = read, index

    def _step(self, running: int) -> None:
        """Decode a token of each of the first `running` slots."""
        sequences = [held for held in self._slots[:running] if held is not None]
        read = max(len(s.prompt.request.token_ids) + len(s.tokens) for s in sequences)
        span = read + self._behind
        token, position, key, count = self._state[:, :running]
        routing, cache = self._routing(), self._cache.step(position, span)
        hidden = self._network.forward(token, position, cache, routing)
        drawn = self._draw(hidden, key, count)
        token.copy_(drawn.tokens)
        position += 1
        count += 1
        self._receive(sequences, drawn, routing.record() if routing else None)

    def _routing(self) -> Routing | None:
        """What notes the experts of one forward pass, where they were asked for."""
        return Routing() if self._sampling.experts else None

    def _draw(self, hidden: Tensor, keys: Tensor, counts: Tensor) -> Drawn:
        return draw(self._network.logits(hidden), self._sampling, uniforms(keys, counts))

    def _receive(
        self, sequences: Sequence[_Sequence], drawn: Drawn, experts: Tensor | None = None
    ) -> None:
        """Have what was drawn come to the host, and append what has come to the completions."""
        self._arriving.append(Arriving(sequences, drawn, experts))
        while len(self._arriving) > self._behind:
            for sequence, token in self._arriving.popleft().read():
                self._ended += sequence.append(token, self._stop_rule)

    def _index(self, rows: Sequence[int]) -> Tensor:
        # As everywhere here: a tensor made on the device itself, or copied there otherwise, waits for all that is queued.
        return torch.tensor(rows).to(self._network.device, non_blocking=True)


def _cache(device: torch.device, slots: int, prompt: int, completion: int) -> Cache:
    """The one that is fastest on the device, for prompts and completions of at most so many tokens."""
    if has_matrix_units(device):
        return SlotCache(slots, prompt + completion)
    return SharedCache(slots, completion)


def _free(slot: _Sequence | None) -> bool:
    """Whether the slot may be given away: nothing is in it, or what has ended."""
    return slot is None or slot.reason is not None


def _sequences(prompt: _Prompt, sampling: Sampling) -> list[_Sequence]:
    request = prompt.request
    samples = range(request.first_sample, request.first_sample + request.samples)
    return [
        _Sequence(prompt, stream_key(sampling.seed, sampling.step, request.prompt_key, sample))
        for sample in samples
    ]
