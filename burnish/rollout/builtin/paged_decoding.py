"""Decode with a cache in blocks, in steps of fixed shapes.

Rows start while there are blocks for their prompts, and one more for each that runs. If blocks run out nevertheless, the row with the
fewest tokens is stopped. It waits in front of the others, and what it drew is then read like a prompt. Its draws go on where they
were, so it draws the same tokens, up to rounding.

A step computes a number of rows from `buckets`, at least those that run; the others read block 0. So few shapes occur, and CUDA
records the kernels of each (`GraphedSteps`).
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from burnish.config.schema import MOST_SLOTS
from burnish.distributed.device import compiles_triton
from burnish.models.kernels.attention import Softmax, has_varlen_kernel
from burnish.rollout.base import Sampling
from burnish.rollout.builtin.decoding import Decoding, SlotPrompt, slots_that_fit
from burnish.rollout.builtin.forward import FusedForward
from burnish.rollout.builtin.kv_cache import PromptCache, SlotBytes
from burnish.rollout.builtin.paged_cache import BLOCK, PagedCache
from burnish.rollout.builtin.sampling import Drawn

if TYPE_CHECKING:
    from burnish.rollout.builtin.cuda_graphs import GraphedSteps

_MOST_ERROR = 0.02
"""What attention in 16 bits may differ from fp32, relative to its norm."""
_log = logging.getLogger(__name__)
_LARGE_BUCKET = 16
"""From here on buckets are multiples of this, and powers of 2 below."""


def choose_decoding(
    room: float,
    slot_bytes: SlotBytes,
    slots: int | Literal["auto"],
    longest: int,
    completions: int,
    sampling: Sampling,
) -> tuple[Callable[..., Decoding], int | Literal["auto"], int | None]:
    """Return how to make a `Decoding`, its slots, and the most tokens to keep of conversations; see `Pages.of`.

    Says how many completions are held at a time, and how many vLLM would hold.
    """
    per_token, _, prompts = slot_bytes
    longest = max(longest, 1)
    vllm = int(room / (longest * max(1, per_token)))
    if has_pages(prompts):
        pages = Pages.of(room, slot_bytes, slots, longest, completions, sampling)
        _say(
            f"the generator holds {pages.tokens} tokens at a time, in at most {pages.rows} completions: "
            f"{pages.tokens // longest} of the longest, of {longest} tokens. vLLM would hold {vllm} of those."
        )
        return partial(PagedDecoding, pages=pages), pages.rows, pages.tokens
    dense = slots if slots != "auto" else slots_that_fit(room, slot_bytes, longest, keeps=False)
    _say(
        f"the generator holds {dense} completions at a time, each with memory for {longest} tokens. vLLM would "
        f"hold {vllm} of that length, and more of shorter ones."
    )
    return Decoding, slots, None


@cache
def _say(text: str) -> None:
    """Log a text once."""
    _log.info(text)


def has_pages(prompts: PromptCache) -> bool:
    """Return whether a kernel reads all layers' keys and values in blocks, given those of a prompt.

    Not with soft caps, nor where values have another width than keys (latent attention). FlashAttention 4 does so on some devices
    only.
    """
    return (
        {"block_table", "num_splits"} <= inspect.signature(varlen_attn).parameters.keys()
        and current_flash_attention_impl() in (None, "FA3")
        and not prompts.has_softcap
        and all(has_varlen_kernel(*pair) for pair in prompts.layers.values())
        and all(
            _reads_blocks(key.device, key.dtype, *key.shape[::2])
            for key, _ in prompts.layers.values()
        )
    )


@cache
def _reads_blocks(device: torch.device, dtype: torch.dtype, kv_heads: int, width: int) -> bool:
    """Return whether the device's kernel computes what the CPU does in fp32; if not, say so.

    The kernel has been wrong in silence before (pytorch/pytorch#194167), and takes milliseconds to try.
    """
    if device.type != "cuda":
        return True
    try:
        error = block_error(device, dtype, kv_heads, width)
    except RuntimeError as raised:
        _say(
            f"the generator's cache is not in blocks, because torch cannot read them here: {raised}"
        )
        return False
    if error > _MOST_ERROR:
        _say(
            f"the generator's cache is not in blocks, because torch reads them wrongly: {error:.1e}"
        )
    return error <= _MOST_ERROR


def block_error(device: torch.device, dtype: torch.dtype, kv_heads: int, width: int) -> float:
    """Return by how much attention to blocks on a device differs from that on the CPU in fp32, relative to its norm."""
    lengths = [1, 300, 256, 511]
    random = torch.Generator().manual_seed(0)
    packed = torch.randn(2, kv_heads, sum(lengths), width, generator=random)
    parts = torch.randn(3, 4 * kv_heads, len(lengths), width, generator=random)
    outputs = []
    for place, kind in ((device, dtype), (torch.device("cpu"), torch.float32)):
        prompts = PromptCache(lengths, place)
        keys, values = packed.to(dtype).to(place, kind)
        prompts.layers[0] = keys, values
        cache = PagedCache(len(lengths), 512, 9, place)
        cache.place(range(len(lengths)), prompts, range(len(lengths)))
        cache.grow(len(lengths))
        step = cache.step(torch.tensor(lengths, device=place), 0)
        query, key, value = parts.to(dtype).to(place, kind)
        heads = (query[None], key[None, :kv_heads], value[None, :kv_heads])
        sinks = torch.linspace(-1, 1, 4 * kv_heads, device=place)
        ways = (Softmax(0.1), Softmax(0.1, 200), Softmax(0.1, None, None, sinks))
        outputs += [step.attend(0, heads, how).float().cpu() for how in ways]
    found, wanted = torch.stack(outputs).chunk(2)
    return float((found - wanted).norm() / wanted.norm())


class Pages(NamedTuple):
    """How much a generator holds at a time."""

    rows: int
    """Most completions."""
    longest: int
    """Most tokens of a completion and its prompt."""
    blocks: int
    """Blocks of the cache, block 0 included."""
    block: int = BLOCK
    """Tokens of a block."""

    @property
    def tokens(self) -> int:
        """Return the tokens of all blocks."""
        return (self.blocks - 1) * self.block

    @classmethod
    def of(
        cls,
        room: float,
        slot_bytes: SlotBytes,
        slots: int | Literal["auto"],
        longest: int,
        completions: int,
        sampling: Sampling,
        block: int = BLOCK,
    ) -> Pages:
        """Divide `room` bytes. With `Sampling.keeps`, half of them are left for what is kept.

        Blocks have at most three binary digits that are not 0, so that a restart computes the same bits.
        """
        per_token, fixed, _ = slot_bytes
        rows = max(1, min(MOST_SLOTS if slots == "auto" else slots, completions))
        while rows > 1 and slots == "auto" and rows * fixed > room / 4:
            rows = -(-rows // 2)
        of_row = max(1, -(-longest // block))
        fit = int(
            max(0.0, room - rows * fixed) / (1 + sampling.keeps) / (block * max(1, per_token))
        )
        unit = 1 << max(0, fit.bit_length() - 3)
        return cls(rows, longest, 1 + max(of_row, min(fit // unit * unit, rows * of_row)), block)


def bucket_of(rows: int, most: int) -> int:
    """Return how many rows a step computes where so many run, of at most `most`."""
    if rows > _LARGE_BUCKET:
        return min(most, -(-rows // _LARGE_BUCKET) * _LARGE_BUCKET)
    return min(most, 1 << math.ceil(math.log2(rows)))


class PagedDecoding(Decoding):
    """A `Decoding` whose cache is a `PagedCache`."""

    _cache: PagedCache

    def __init__(self, *of_decoding: Any, pages: Pages) -> None:
        """See `Decoding`."""
        self._pages = pages
        super().__init__(*of_decoding)
        device = self._model.device
        if isinstance(self._model.forward, FusedForward) and compiles_triton(device):
            from burnish.rollout.builtin.fused_steps import FusedSteps

            self._forward = FusedSteps(self._model.forward)
        self._graphs: GraphedSteps | None = None
        if device.type == "cuda":
            from burnish.rollout.builtin.cuda_graphs import GraphedSteps

            self._graphs = GraphedSteps()

    def _make_cache(self, slots: int, longest: int) -> PagedCache:
        pages = self._pages
        device = self._model.device
        return PagedCache(slots, pages.longest, pages.blocks, device, pages.block)

    def _clear(self) -> bool:
        waits = super()._clear()
        self._cache.release(row for row, slot in enumerate(self._slots) if slot is None)
        return waits

    def _admissible(self) -> int:
        running = sum(slot is not None for slot in self._slots)
        left = self._cache.pool.free - running
        counted: set[int] = set()
        for count, sequence in enumerate(self._waiting):
            prompt = sequence.prompt
            chunk = prompt.chunk
            is_read = chunk is not None and chunk.version == self._version()
            number = chunk.cache.first + prompt.index if chunk and is_read else -1
            needed = self._cache.blocks_for(len(prompt.token_ids), number)
            left -= 1 + (1 if id(prompt) in counted else needed)
            counted.add(id(prompt))
            if left < 0 and running + count:
                return count
        return len(self._waiting)

    def _step(self, running: int) -> None:
        if not self._cache.can_grow(running):
            self._make_room()
            return
        sequences = [sequence for sequence in self._slots[:running] if sequence is not None]
        rows = bucket_of(running, len(self._slots))
        self._cache.grow(running)
        if rows > running:
            self._state[:, running:rows] = 0
        # A bound method in a field would be a cycle, which keeps the cache until Python looks for cycles.
        compute = self._compute_packed
        packed, experts = self._graphs(compute, rows) if self._graphs else compute(rows)
        tokens, *logprobs = packed.to("cpu", non_blocking=True)[:, :running]
        drawn = Drawn(tokens.view(torch.int32), *logprobs)
        self._receive(sequences, drawn, None if experts is None else experts[:running])

    def _compute_packed(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """Compute a step; return the fields of `Drawn` in one tensor [3, rows] fp32, tokens by the bits of int32, and the experts."""
        (tokens, *logprobs), experts = self._compute(rows, 0)
        return torch.stack((tokens.int().view(torch.float32), *logprobs)), experts

    def _make_room(self) -> None:
        """Wait for what was drawn; unless a completion has ended, stop the one with the fewest tokens."""
        while self._readbacks:
            self._append(*self._readbacks.popleft())
        running = [(row, slot) for row, slot in enumerate(self._slots) if slot is not None]
        if any(slot.reason is not None for _, slot in running):
            return
        row, sequence = min(running, key=lambda pair: self._cache.tokens_of(pair[0]))
        self._slots[row] = None
        self._cache.release([row])
        stopped = sequence.prompt
        ids = np.append(stopped.token_ids, sequence.own[stopped.drawn :])
        sequence.prompt = SlotPrompt(ids, stopped.key, drawn=len(sequence.own))
        self._waiting.appendleft(sequence)
        self._unread.appendleft(sequence.prompt)
