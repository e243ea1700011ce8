"""All caches against attention written out, over schedules as decoding makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws
from torch import Tensor

from burnish.models.kernels.attention import Softmax
from burnish.rollout.builtin.dense_cache import DenseCache
from burnish.rollout.builtin.kv_cache import PromptCache, SlotCache
from burnish.rollout.builtin.paged_cache import PagedCache
from burnish.rollout.builtin.shared_cache import SharedCache

LAYERS, WIDTH, SCALING = 2, 4, 0.3
BLOCK = 4
Make = Callable[[int, int, int], SlotCache]


def paged(slots: int, prompt: int, completion: int) -> PagedCache:
    """A cache with blocks for all slots."""
    longest = prompt + completion
    blocks = 1 + slots * -(-longest // BLOCK)
    return PagedCache(slots, longest, blocks, torch.device("cpu"), BLOCK)


@dataclass
class Row:
    """A completion: the keys and values [tokens, kv_heads, WIDTH] that each layer should have of it."""

    layers: list[list[Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.layers[0][0])


class World:
    """What decoding does with a cache: completions wait, start, take steps, end, and are moved together."""

    def __init__(self, seed: int, kind: Make, window: int | None, more: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.torch_rng = torch.Generator().manual_seed(seed)
        self.kv_heads, self.shared = int(self.rng.integers(1, 3)), int(self.rng.choice([1, 3]))
        sinks = self.draw(self.kv_heads * self.shared) if more else None
        self.softmax = Softmax(SCALING, window, 0.5 if more else None, sinks)
        self.rows: list[Row | None] = [None] * int(self.rng.integers(1, 7))
        self.cache = kind(len(self.rows), 8, 40)
        self.read = 0
        self.waiting: list[tuple[PromptCache, int]] = []
        for _ in range(self.rng.integers(1, 4)):
            chunk = self.chunk()
            samples = [int(self.rng.integers(1, 5)) for _ in chunk.lengths]
            self.waiting += [(chunk, i) for i, n in enumerate(samples) for _ in range(n)]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.torch_rng)

    def chunk(self) -> PromptCache:
        lengths = self.rng.integers(1, 8, self.rng.integers(1, 4)).tolist()
        chunk = PromptCache(lengths, torch.device("cpu"), self.read)
        self.read += len(lengths)
        for layer in range(LAYERS):
            chunk.layers[layer] = (
                self.draw(self.kv_heads, sum(lengths), WIDTH),
                self.draw(self.kv_heads, sum(lengths), WIDTH),
            )
        return chunk

    def start(self) -> None:
        """Fill free rows, chunk by chunk."""
        free = [row for row, held in enumerate(self.rows) if held is None]
        started, self.waiting = self.waiting[: len(free)], self.waiting[len(free) :]
        for chunk in {id(c): c for c, _ in started}.values():
            mine = [(row, i) for row, (c, i) in zip(free, started, strict=False) if c is chunk]
            self.cache.place([row for row, _ in mine], chunk, [i for _, i in mine])
            for row, index in mine:
                begin = sum(chunk.lengths[:index])
                part = slice(begin, begin + chunk.lengths[index])
                both = [chunk.layers[layer] for layer in range(LAYERS)]
                self.rows[row] = Row(
                    [[each[:, part].transpose(0, 1) for each in kv] for kv in both]
                )

    def close_gaps(self) -> int:
        running = sum(row is not None for row in self.rows)
        gaps = [row for row, held in enumerate(self.rows[:running]) if held is None]
        late = [row for row in range(running, len(self.rows)) if self.rows[row] is not None]
        if gaps:
            self.cache.move(late, gaps)
        for source, target in zip(late, gaps, strict=True):
            self.rows[target], self.rows[source] = self.rows[source], None
        return running

    def step(self, running: int) -> None:
        rows = [row for row in self.rows[:running] if row is not None]
        positions = torch.tensor([row.length for row in rows])
        if isinstance(self.cache, PagedCache):
            assert self.cache.can_grow(running)
            self.cache.grow(running)
            self.check_blocks(self.cache)
        step = self.cache.step(positions, int(positions.max()) + 1)
        for layer in range(LAYERS):
            query = self.draw(1, self.kv_heads * self.shared, running, WIDTH)
            given = [self.draw(1, self.kv_heads, running, WIDTH) for _ in range(2)]
            output = step.attend(layer, (query, *given), self.softmax)
            for number, row in enumerate(rows):
                held = row.layers[layer]
                for part in range(2):
                    held[part] = torch.cat((held[part], given[part][0, :, number][None]))
                want = written_out(query[0, :, number], *held, self.softmax)
                torch.testing.assert_close(output[0, number], want)

    def end(self) -> None:
        for number in range(len(self.rows)):
            if self.rng.random() < 0.25:
                self.rows[number] = None
        if isinstance(self.cache, PagedCache):
            self.cache.release(n for n, row in enumerate(self.rows) if row is None)
            self.check_blocks(self.cache)

    def check_blocks(self, cache: PagedCache) -> None:
        """No block is lost, or given to two; only full blocks of one prompt are shared."""
        rows = list(zip(cache._blocks, cache._written, cache._prompt_of, strict=True))
        holders = Counter(block for blocks, _, _ in rows for block in blocks)
        assert holders == {n: held for n, held in enumerate(cache.pool._holders) if held}
        free = cache.pool._free
        assert sorted([*free, *holders]) == list(range(1, len(cache.pool._holders)))
        for blocks, written, prompt in rows:
            assert not blocks or (len(blocks) - 1) * BLOCK <= written <= len(blocks) * BLOCK
            for number, block in enumerate(blocks):
                same = [p for other, _, p in rows if block in other]
                assert same == [prompt] * len(same)
                assert len(same) == 1 or (number + 1) * BLOCK <= written
        assert set(cache._prefixes) <= {prompt for blocks, _, prompt in rows if blocks}


def written_out(query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
    """[heads, WIDTH] of one token's queries [heads, WIDTH], which see the last `window` keys."""
    seen = slice(None) if softmax.window is None else slice(-softmax.window, None)
    shared = len(query) // keys.shape[1]
    outputs = []
    for head, vector in enumerate(query):
        own_keys, own_values = keys[seen, head // shared], values[seen, head // shared]
        scores = own_keys @ vector * SCALING
        if softmax.softcap is not None and softmax.sinks is not None:
            scores = softmax.softcap * (scores / softmax.softcap).tanh()
            own_values = torch.cat((own_values, torch.zeros(1, WIDTH)))
            scores = torch.cat((scores, softmax.sinks[head][None]))
        outputs.append(scores.softmax(0) @ own_values)
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", [DenseCache, SharedCache, paged])
@pytest.mark.parametrize("window", [None, 1, 3])
@draws(20)
@given(seed=st.integers(0, 10_000), more=st.booleans())
def test_attention_is_that_over_prompt_and_completion(
    kind: Make, window: int | None, seed: int, more: bool
) -> None:
    world = World(seed, kind, window, more)
    while True:
        while world.waiting and None in world.rows:
            world.start()
            world.end()  # some with their first token
        if not (running := world.close_gaps()):
            break
        world.step(running)
        world.end()


def test_a_prompt_lies_there_once_however_late_its_completions_start() -> None:
    world = World(0, SharedCache, None, False)
    cache, first, second = SharedCache(4, 8, 8), world.chunk(), world.chunk()

    def prompts_there() -> int:
        cache.step(positions, int(positions.max()) + 1)
        assert cache._groups.prompts <= len(cache._prompts.layers[0][0])
        return cache._groups.prompts

    cache.place([0, 1, 2], first, [0, 0, 0])
    positions = torch.tensor([first.lengths[0]] * 3)
    assert prompts_there() == 1
    cache.place([3], first, [0])
    positions = torch.tensor([first.lengths[0]] * 4)
    assert prompts_there() == 1
    cache.place([0, 1, 2], second, [0, 0, 0])
    positions = torch.tensor([second.lengths[0]] * 3 + [first.lengths[0]])
    assert prompts_there() == 2
    positions = positions[:3]
    assert prompts_there() == 1
    cache.place([3], second, [0])
    positions = torch.tensor([second.lengths[0]] * 4)
    assert prompts_there() == 1
    assert len(cache._prompts.layers[0][0]) == 2
