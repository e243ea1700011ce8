"""Decode completions in slots.

Waiting completions enter free slots in order. Prompts are read ahead in packed chunks. An accelerator copies tokens to the host
during its next step, so Python learns of a completion's end one step late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from burnish.config.schema import MOST_SLOTS
from burnish.distributed.device import has_matrix_units
from burnish.records import Experts, TokenIds, to_device
from burnish.rollout.base import Sampling, Watch, not_finite
from burnish.rollout.builtin.forward import InferenceModel
from burnish.rollout.builtin.kv_cache import PromptCache, SlotBytes, SlotCache
from burnish.rollout.builtin.sampling import Drawn, draw, uniforms
from burnish.rollout.running import Running, StopRule

if TYPE_CHECKING:
    from burnish.rollout.builtin.turns import KeptTurns

_PREFILL_TOKENS = 8192
"""Chunk size for reading prompts, in tokens; a longer prompt is read alone."""
_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.OVERRIDEABLE,
]
"""Attention kernels to use. cuDNN's is left out: it is planned anew for every shape, and shapes change at every step."""


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    cache: PromptCache
    """The prompts' keys, values and states."""
    last: Tensor
    """Hidden state after each prompt's last token [prompts, hidden]."""
    experts: Sequence[Experts]
    """Experts of each prompt's tokens; empty unless requested."""
    version: int
    """Version of the weights that read the prompts."""


@dataclass(slots=True, eq=False)
class SlotPrompt:
    """A prompt, and its chunk until all completions have started."""

    token_ids: TokenIds
    key: tuple[int, int]
    """The request's `prompt_key` and first sample."""
    chunk: _Chunk | None = None
    index: int = 0
    drawn: int = 0
    """How many tokens of its completion it ends with, because that was stopped and starts again."""


@dataclass(slots=True, eq=False, kw_only=True)
class SlotSequence(Running):
    """A completion in a slot, or waiting."""

    prompt: SlotPrompt
    """The prompt, shared by its samples."""
    sampled_logprobs: list[float] = field(default_factory=list)
    """As in `Drawn`, one per token."""
    logprobs: list[float] = field(default_factory=list)
    """As in `Drawn`, one per token."""


def slots_that_fit(room: float, slot_bytes: SlotBytes, length: int, *, keeps: bool) -> int:
    """Return how many sequences of `length` tokens fit: 512, halved until they do. With `keeps`, as many again are kept.

    Only powers of two, so that a restart computes the same bits.
    """
    per_token, fixed, _ = slot_bytes
    length *= 2 if keeps else 1
    slots = MOST_SLOTS
    while slots > 1 and slots * (length * per_token + fixed) > room:
        slots //= 2
    return slots


class Decoding:
    """One call's completions in at most `slots` slots."""

    def __init__(
        self,
        model: InferenceModel,
        sequences: Sequence[SlotSequence],
        sampling: Sampling,
        stop_rule: StopRule,
        slots: int,
        turns: KeptTurns | None = None,
    ) -> None:
        self._turns = turns
        self._model = model
        self._forward: Callable[..., Tensor] = model.forward
        self._sampling = sampling
        self._stop_rule = stop_rule
        self._waiting = deque(sequences)
        self._unread = deque(dict.fromkeys(sequence.prompt for sequence in sequences))
        slots = min(slots, len(self._waiting))
        longest = max((len(prompt.token_ids) for prompt in self._unread), default=0)
        self._cache = self._make_cache(slots, longest)
        self._prompts_read = 0
        self._slots: list[SlotSequence | None] = [None] * slots
        self._readbacks: deque[Any] = deque()
        """Drawn tokens on their way to the host: the arguments of `_append`."""
        self._steps_behind = steps_behind(model.device)
        self._ended = 0
        self._version: Callable[[], int] = lambda: 0
        self._state = torch.zeros(4, slots, dtype=torch.int64, device=model.device)
        """Rows: latest token, its position, random key, number of tokens drawn. One column per slot."""

    def run(
        self,
        version: Callable[[], int],
        watch: Watch | None = None,
        following: Callable[[bool], list[SlotSequence]] | None = None,
    ) -> None:
        """Decode to the end. `version` returns that of the weights, which `watch` may replace."""
        reported = 0
        self._version = version
        self._following = following
        # The first n slots are in use: a late one moves into each gap. So a step computes no rows for completions that have ended.
        with sdpa_kernel(_KERNELS):
            while running := self._refill():
                self._step(running)
                if watch is not None:
                    watch(self._ended - reported)
                    reported = self._ended
        if watch is not None:
            watch(self._ended - reported)

    def _refill(self) -> int:
        """Fill free slots and close gaps; return the number running."""
        while self._clear() and None in self._slots:
            free = [row for row, slot in enumerate(self._slots) if slot is None]
            rows = free[: self._admissible()]
            if not rows:
                break
            self._start(rows, [self._waiting.popleft() for _ in rows])
        running = sum(slot is not None for slot in self._slots)
        gaps = [row for row, slot in enumerate(self._slots[:running]) if slot is None]
        if gaps:
            late = [row for row in range(running, len(self._slots)) if self._slots[row] is not None]
            self._move(late, gaps)
        return running

    def _make_cache(self, slots: int, longest: int) -> SlotCache:
        """Return a cache for so many slots, whose longest prompt now has so many tokens."""
        if has_matrix_units(self._model.device):
            from burnish.rollout.builtin.dense_cache import DenseCache

            return DenseCache(slots, longest, self._sampling.max_tokens)
        from burnish.rollout.builtin.shared_cache import SharedCache

        return SharedCache(slots, longest, self._sampling.max_tokens)

    def _admissible(self) -> int:
        """Return how many waiting completions memory has room for."""
        return len(self._waiting)

    def _clear(self) -> bool:
        """Free the slots of completions that have ended; return whether others wait."""
        if self._turns is not None:
            self._turns.keep(self._slots, self._cache, self._version())
        self._slots = [None if slot is None or slot.reason else slot for slot in self._slots]
        if self._following is not None:
            new = self._following(not self._waiting and not any(self._slots))
            if self._turns is not None:
                self._turns.add(new)
            self._waiting.extend(new)
            self._unread.extend(dict.fromkeys(sequence.prompt for sequence in new))
        return bool(self._waiting)

    def _move(self, sources: list[int], targets: list[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._slots[target] = self._slots[source]
            self._slots[source] = None
        self._cache.move(sources, targets)
        self._state[:, self._index(targets)] = self._state[:, self._index(sources)]

    def _start(self, rows: list[int], sequences: list[SlotSequence]) -> None:
        by_chunk: dict[_Chunk, dict[int, SlotSequence]] = {}
        for row, sequence in zip(rows, sequences, strict=True):
            by_chunk.setdefault(self._chunk_of(sequence.prompt), {})[row] = sequence
            self._slots[row] = sequence
        for chunk, by_row in by_chunk.items():
            chunk_sequences = list(by_row.values())
            which = [sequence.prompt.index for sequence in chunk_sequences]
            for sequence in chunk_sequences if chunk.experts else ():
                known = sum(map(len, sequence.experts))
                sequence.experts.append(chunk.experts[sequence.prompt.index][known:])
            self._cache.place(list(by_row), chunk.cache, which)
            keys = self._index([sequence.key for sequence in chunk_sequences])
            counts = self._index([len(sequence.tokens) for sequence in chunk_sequences])
            drawn = self._draw(chunk.last[self._index(which)], keys, counts)
            self._receive(chunk_sequences, drawn)
            lengths = self._index([chunk.cache.lengths[prompt] for prompt in which])
            self._state[:, self._index(list(by_row))] = torch.stack(
                (drawn.tokens, lengths, keys, counts + 1)
            )
        self._forget(sequences)

    def _forget(self, started: Sequence[SlotSequence]) -> None:
        """Release chunks whose completions have all started, in order."""
        coming = self._waiting[0].prompt if self._waiting else None
        for sequence in started:
            if sequence.prompt is not coming:
                sequence.prompt.chunk = None

    def _chunk_of(self, prompt: SlotPrompt) -> _Chunk:
        if prompt.chunk is not None and prompt.chunk.version != self._version():
            waiting = dict.fromkeys([prompt, *(sequence.prompt for sequence in self._waiting)])
            stale = [unread for unread in waiting if unread.chunk is prompt.chunk]
            self._unread.extendleft(reversed(stale))
            for unread in stale:
                unread.chunk = None
        while prompt.chunk is None:
            self._read_ahead()
        return prompt.chunk

    def _read_ahead(self) -> None:
        prompts: list[SlotPrompt] = []
        room = _PREFILL_TOKENS
        # No more than there are slots: a prompt's states may be larger than its keys and values.
        for _ in range(min(len(self._slots), len(self._unread))):
            if prompts and len(self._unread[0].token_ids) > room:
                break
            prompts.append(self._unread.popleft())
            room -= len(prompts[-1].token_ids)
        device = self._model.device
        lengths = [len(prompt.token_ids) for prompt in prompts]
        place = (lengths, device, self._prompts_read)
        cache: PromptCache | None = None
        if self._turns is not None:
            cache = self._turns.continued(prompts, self._version(), *place)
        cache = cache or PromptCache(*place)
        self._prompts_read += len(prompts)
        unread = [
            prompt.token_ids[known:] for prompt, known in zip(prompts, cache.known, strict=True)
        ]
        tokens = np.concatenate(unread)
        spans = zip(cache.known, cache.lengths, strict=True)
        positions = torch.cat([torch.arange(known, length) for known, length in spans])
        routing = self._routing()
        hidden = self._model.forward(
            to_device(torch.from_numpy(tokens.astype(np.int64)), device),
            to_device(positions, device),
            cache,
            routing,
        )
        ends = np.cumsum([len(part) for part in unread])
        experts = np.split(routing.record().cpu().numpy(), ends[:-1]) if routing else ()
        last = to_device(torch.from_numpy(ends - 1), device)
        chunk = _Chunk(cache, hidden[last], cache.with_known(experts), self._version())
        for index, prompt in enumerate(prompts):
            prompt.chunk = chunk
            prompt.index = index

    def _step(self, running: int) -> None:
        sequences = [sequence for sequence in self._slots[:running] if sequence is not None]
        read = max(len(s.prompt.token_ids) + len(s.tokens) - s.drawn for s in sequences)
        # An accelerator is one step ahead of what Python has read, so a row may be longer than its tokens here say.
        self._receive(sequences, *self._compute(running, read + self._steps_behind))

    def _compute(self, rows: int, span: int) -> tuple[Drawn, Tensor | None]:
        """Draw the next token of the first rows, which hold less than `span`; return them, and the experts of those before."""
        token, position, key, count = self._state[:, :rows]
        routing = self._routing()
        cache = self._cache.step(position, span)
        hidden = self._forward(token, position, cache, routing)
        drawn = self._draw(hidden, key, count)
        token.copy_(drawn.tokens)
        position += 1
        count += 1
        return drawn, routing.record() if routing else None

    def _routing(self) -> Any:
        if not self._sampling.experts:
            return None
        from burnish.models.routing import Routing

        return Routing()

    def _draw(self, hidden: Tensor, keys: Tensor, counts: Tensor) -> Drawn:
        return draw(self._model.logits(hidden), self._sampling, uniforms(keys, counts))

    def _receive(
        self, sequences: Sequence[SlotSequence], drawn: Drawn, experts: Tensor | None = None
    ) -> None:
        """Start copying drawn tokens to the host; append those that have arrived."""
        device = self._model.device
        parts = [part.to("cpu", non_blocking=True) for part in drawn]
        experts = None if experts is None else experts.to("cpu", non_blocking=True)
        copied = None if device.type == "cpu" else torch.Event(device)
        if copied is not None:
            copied.record()
        self._readbacks.append((tuple(sequences), parts, experts, copied, self._version()))
        while len(self._readbacks) > self._steps_behind:
            self._append(*self._readbacks.popleft())

    def _append(
        self,
        sequences: Sequence[SlotSequence],
        parts: Sequence[Tensor],
        experts: Tensor | None,
        copied: torch.Event | None,
        version: int,
    ) -> None:
        """Append drawn tokens, and the experts [n, L, k] of the tokens before them. Raises `BurnishError` for NaN."""
        if copied is not None:
            copied.synchronize()
        if not bool(parts[2].isfinite().all()):
            raise not_finite()
        tokens, sampled, logprobs = (part.tolist() for part in parts)
        # Copied out of pinned memory, because completions keep them to their end.
        routed = None if experts is None else experts.numpy().copy()
        now = time.time()
        for row, sequence in enumerate(sequences):
            if sequence.reason is not None:
                continue
            sequence.sampled_logprobs.append(sampled[row])
            sequence.logprobs.append(logprobs[row])
            if routed is not None:
                sequence.experts.append(routed[row : row + 1])
            self._ended += sequence.take(tokens[row : row + 1], version, self._stop_rule, now)

    def _index(self, rows: Sequence[int]) -> Tensor:
        # Copied without blocking: a tensor made on the device would wait for everything queued there.
        return to_device(torch.tensor(rows), self._model.device)


def steps_behind(device: torch.device) -> int:
    """Return how many steps are queued before the oldest is read."""
    return 0 if device.type == "cpu" else 1
