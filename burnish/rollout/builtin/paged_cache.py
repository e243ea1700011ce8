"""The KV cache of GPUs: blocks of `BLOCK` tokens, of which each row has a list.

A row gets a block when it grows into it, so memory follows what was drawn and not what might be, and nothing grows by copying.
Completions of one prompt share its full blocks, which are counted. Nobody writes to a full block, and the rest of the prompt is
copied to each row's own next block. So no block is ever written by two, and none has to be copied before it is written.

All tensors that a step reads have fixed addresses, and its shapes follow from the number of rows alone, so that a CUDA graph can
replay it. Rows that nobody uses read and write block 0. On the CPU, which is the kernel's oracle, the blocks of each row are put
together, and attention is that of `DenseCache`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from burnish.models.kernels.attention import Heads, Softmax
from burnish.records import to_device
from burnish.rollout.builtin.dense_cache import attend_one
from burnish.rollout.builtin.kv_cache import PromptCache, SlotCache

BLOCK = 256
"""Tokens of a block: FlashAttention 2 takes multiples of this."""


class BlockPool:
    """Counts who holds each block. Block 0 is never given out."""

    def __init__(self, blocks: int) -> None:
        """Take the number of all blocks."""
        self._free = list(range(blocks - 1, 0, -1))
        self._holders = [0] * blocks

    @property
    def free(self) -> int:
        """Return how many blocks nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return `count` blocks that nobody holds; there must be as many."""
        taken = [self._free.pop() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more holder of these blocks."""
        for block in blocks:
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Count one holder less of these blocks; return those that are free now."""
        freed = []
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                freed.append(block)
        self._free += freed
        return freed


class PagedCache(SlotCache):
    """Rows of blocks."""

    def __init__(
        self, slots: int, longest: int, blocks: int, device: torch.device, block: int = BLOCK
    ) -> None:
        """Allocate `blocks` blocks with the first prompts; no row has more than `longest` tokens."""
        super().__init__(slots, longest, 0)
        self.pool = BlockPool(blocks)
        self._count = blocks
        self._block = block
        self._blocks: list[list[int]] = [[] for _ in range(slots)]
        """The blocks of each row; none for a row that is not used."""
        self._written = [0] * slots
        """Tokens of each row."""
        self._prompt_of = [-1] * slots
        """Number of the prompt whose full blocks each row shares."""
        self._prefixes: dict[int, list[int]] = {}
        """Full blocks of prompts, by the number of the prompt."""
        self._host_table = np.zeros((slots, -(-longest // block)), np.int32)
        self._table = torch.zeros(self._host_table.shape, dtype=torch.int32, device=device)
        self._starts = torch.arange(slots + 1, dtype=torch.int32, device=device)
        self._is_stale = False
        self._used = self._positions
        self.places = self._positions
        """Where the latest step writes: for each row, the number of a token of all blocks [n]."""

    def blocks_for(self, tokens: int, prompt: int) -> int:
        """Return how many free blocks a row takes for its prompt of so many tokens. `prompt` is its number, or -1 before it is read."""
        return 1 + (0 if prompt in self._prefixes else tokens // self._block)

    def place(self, rows: Sequence[int], prompts: PromptCache, which: Sequence[int]) -> None:
        """See `SlotCache.place`. There must be as many free blocks as `blocks_for` says."""
        super().place(rows, prompts, which)
        starts = np.cumsum([0, *prompts.lengths])
        copies: list[tuple[int, int, list[int]]] = []
        for row, index in zip(rows, which, strict=True):
            length = prompts.lengths[index]
            number = prompts.first + index
            full = length // self._block
            shared = self._prefixes.get(number)
            if shared is None:
                shared = self.pool.take(full)
                copies.append((starts[index], full * self._block, shared))
                if shared:
                    self._prefixes[number] = shared
            else:
                self.pool.share(shared)
            own = self.pool.take(1)
            copies.append((starts[index] + full * self._block, length % self._block, own))
            self._prompt_of[row] = number
            self._set_blocks(row, [*shared, *own], length)
        self._write(prompts, copies)

    def _set_blocks(self, row: int, blocks: list[int], written: int) -> None:
        self._blocks[row] = blocks
        self._written[row] = written
        self._host_table[row] = 0
        self._host_table[row, : len(blocks)] = blocks
        self._is_stale = True

    def _write(self, prompts: PromptCache, copies: Sequence[tuple[int, int, list[int]]]) -> None:
        """Copy tokens, each time from a first packed one, so many, to the beginning of blocks."""
        within = np.arange(self._block)
        sources = np.concatenate([start + np.arange(count) for start, count, _ in copies])
        targets = np.concatenate(
            [
                (np.array(blocks)[:, None] * self._block + within).ravel()[:count]
                for _, count, blocks in copies
            ]
        )
        index = to_device(torch.from_numpy(np.stack([sources, targets])).long(), prompts.device)
        for layer, pair in prompts.layers.items():
            if layer not in self.layers:
                # Zeros: what no row has written is still multiplied by a weight of 0.
                self.layers[layer] = [
                    part.new_zeros((self._count, self._block, len(part), part.shape[2]))
                    for part in pair
                ]
            for stored, part in zip(self.layers[layer], pair, strict=True):
                tokens = part.index_select(1, index[0]).transpose(0, 1)
                stored.flatten(0, 1).index_copy_(0, index[1], tokens)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `RowStore.move`."""
        blocks, self.layers = self.layers, {}
        super().move(sources, targets)  # the states
        self.layers = blocks
        for source, target in zip(sources, targets, strict=True):
            self._set_blocks(target, self._blocks[source], self._written[source])
            self._prompt_of[target] = self._prompt_of[source]
            self._set_blocks(source, [], 0)

    def release(self, rows: Iterable[int]) -> None:
        """Let go of what these rows hold."""
        for row in rows:
            if self._blocks[row]:
                freed = set(self.pool.release(self._blocks[row]))
                if freed.intersection(self._prefixes.get(self._prompt_of[row], ())):
                    del self._prefixes[self._prompt_of[row]]
                self._set_blocks(row, [], 0)

    def tokens_of(self, row: int) -> int:
        """Return how many tokens a row has."""
        return self._written[row]

    def can_grow(self, rows: int) -> bool:
        """Return whether there are blocks for one more token of each of the first rows."""
        return len(self._full(rows)) <= self.pool.free

    def grow(self, rows: int) -> None:
        """Give the first rows the blocks of their next tokens; see `can_grow`."""
        for row in self._full(rows):
            self._set_blocks(row, [*self._blocks[row], *self.pool.take(1)], self._written[row])
        for row in range(rows):
            self._written[row] += 1
        if self._is_stale:
            host = torch.from_numpy(self._host_table.copy())
            self._table.copy_(to_device(host, self._table.device))
            self._is_stale = False

    def _full(self, rows: int) -> list[int]:
        size = self._block
        return [r for r in range(rows) if self._written[r] == len(self._blocks[r]) * size]

    def copied(self, row: int, length: int) -> dict[int, tuple[Tensor, ...]]:
        """See `RowStore.copied`."""
        blocks = to_device(torch.tensor(self._blocks[row]), self._table.device)
        return {
            layer: tuple(
                part[blocks].flatten(0, 1)[:length].transpose(0, 1).contiguous() for part in pair
            )
            for layer, pair in self.layers.items()
        }

    def step(self, positions: Tensor, span: int) -> PagedCache:
        """See `SlotCache.step`; `grow` was called. A row that is not used has position 0."""
        rows = len(positions)
        self._positions = positions
        self._span = self._table.shape[1] * self._block
        self._biases = {}
        block = self._table[:rows].gather(1, (positions // self._block)[:, None])[:, 0]
        self.places = block * self._block + positions % self._block
        self._used = (positions + 1).int()
        return self

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer by `places`, each [tokens, kv_heads, head_dim]."""
        keys, values = (part.flatten(0, 1) for part in self.layers[layer])
        return keys, values

    def attend(self, layer: int, parts: Heads, softmax: Softmax) -> Tensor:
        """See `SlotCache.attend`."""
        query, *latest = (part[0].transpose(0, 1) for part in parts)
        for stored, part in zip(self.pools(layer), latest, strict=True):
            stored.index_copy_(0, self.places, part)
        return self.attend_to_blocks(layer, query, softmax)[None]

    def attend_to_blocks(self, layer: int, query: Tensor, softmax: Softmax) -> Tensor:
        """Attend with a token per row, whose key and value are written: [n, heads, head_dim] → [n, heads, width of values]."""
        keys, values = self.layers[layer]
        table = self._table[: len(query)]
        if query.device.type != "cpu":
            return _attend(query, keys, values, table, self._starts, self._used, softmax)
        keys, values = (part[table].flatten(1, 2).transpose(1, 2) for part in (keys, values))
        bias = self._bias(softmax.window, keys.dtype)
        return attend_one(query, keys, values, bias, softmax).flatten(1, 2)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    starts: Tensor,
    used: Tensor,
    softmax: Softmax,
) -> Tensor:
    """Attend to the first `used` tokens of each row's blocks by torch's kernel, in one part.

    In several, FlashAttention 2 writes only the first row (pytorch/pytorch#194167). With a sink z, whose score adds to the sum of
    exponentials exp(L), the output is σ(L - z) O.
    """
    span = table.shape[1] * keys.shape[1]
    window = softmax.window
    starts = starts[: len(query) + 1]
    kernel = partial(
        varlen_attn,
        query,
        keys,
        values,
        starts,
        # FlashAttention 2 wants them without using them, and 3 wants none beside blocks.
        starts if current_flash_attention_impl() is None else None,
        1,
        span,
        scale=softmax.scaling,
        window_size=(-1 if window is None or window >= span else window - 1, 0),
        enable_gqa=True,
        seqused_k=used,
        block_table=table,
        num_splits=1,
    )
    if softmax.sinks is None:
        output = kernel()
        assert isinstance(output, Tensor)  # a tuple only if log-sum-exps are requested
        return output
    output, sums = kernel(return_aux=AuxRequest(lse=True))
    return output.mul_((sums - softmax.sinks.float()[:, None]).sigmoid_().T[..., None])
