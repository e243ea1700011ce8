"""Decoding with a cache in blocks, on the CPU: completions, shapes, and what CUDA would record."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from contracts.generator import GeneratorContract, assert_same, make_requests, take_turns
from support.models.generators import builtin
from support.models.tiny import FAMILIES, MIXTURES, WITH_STATE, tiny_model
from support.nightly import by_day
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from burnish.models.kernels.fused import norm_rotate
from burnish.rollout.base import Generator, Sampling
from burnish.rollout.builtin import decoding as builtin_decoding
from burnish.rollout.builtin import paged_decoding
from burnish.rollout.builtin.cuda_graphs import GraphedSteps
from burnish.rollout.builtin.fused_steps import FusedSteps
from burnish.rollout.builtin.kv_cache import PromptCache
from burnish.rollout.builtin.paged_cache import PagedCache
from burnish.rollout.builtin.paged_decoding import PagedDecoding, Pages, bucket_of

BLOCK = 4


def use_blocks(monkeypatch: pytest.MonkeyPatch, rows: int | None = None) -> list[PagedDecoding]:
    """Decode in blocks on the CPU, in as many as `rows` of the longest rows have; return the decodings."""
    made: list[PagedDecoding] = []
    begin = PagedDecoding.__init__
    divide = Pages.of

    def of(*given: Any) -> Pages:
        pages = divide(*given, block=BLOCK)
        of_row = -(-pages.longest // BLOCK)
        return pages if rows is None else pages._replace(blocks=1 + rows * of_row)

    def noted(self: PagedDecoding, *given: Any, **more: Any) -> None:
        made.append(self)
        begin(self, *given, **more)

    monkeypatch.setattr("burnish.rollout.builtin.generator.is_sm80_or_newer", lambda device: True)
    monkeypatch.setattr(paged_decoding, "has_pages", lambda prompts: True)
    monkeypatch.setattr(Pages, "of", staticmethod(of))
    monkeypatch.setattr(PagedDecoding, "__init__", noted)
    return made


@pytest.mark.nightly
class TestContract(GeneratorContract):
    @pytest.fixture(autouse=True, params=[None, 1])
    def _cache(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """With blocks for all slots, and for one alone."""
        use_blocks(monkeypatch, request.param)

    def make(self, model: PreTrainedModel, **options: Any) -> Generator:
        return builtin(model, **options)


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("family", by_day(dict.fromkeys((*FAMILIES, *WITH_STATE)), ["mistral"]))
def test_completions_are_those_of_the_other_caches(
    family: str, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where blocks run out, and completions are stopped and read again."""
    model = tiny_model(family)
    requests = make_requests((1, 5, 23, 8, 2), samples=3)
    sampling = Sampling(14, seed=3, experts=family in MIXTURES)
    wanted = builtin(model).generate(requests, sampling)
    monkeypatch.setattr(builtin_decoding, "steps_behind", lambda device: behind)
    for rows in (None, 1):
        with monkeypatch.context() as patch:
            made = use_blocks(patch, rows)
            stopped = count_calls(patch, PagedDecoding, "_make_room")
            found = builtin(model, slots=5).generate(requests, sampling)
        assert_same(found, wanted)
        assert bool(stopped) == (rows is not None)
        for one, two in zip(chain(*found), chain(*wanted), strict=True):
            if one.experts is not None:
                np.testing.assert_array_equal(one.experts, two.experts)
        (decoding,) = made
        pool = decoding._cache.pool
        assert pool.free == len(pool._holders) - 1
        assert not decoding._cache._prefixes


def test_the_cache_is_freed_when_the_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be most of a device's memory, and training cannot wait until Python looks for cycles."""
    made = use_blocks(monkeypatch)
    generator = builtin(tiny_model("qwen3"))
    gc.disable()
    try:
        generator.generate(make_requests((1, 5), samples=2), Sampling(5))
        (cache,) = (weakref.ref(decoding._cache) for decoding in made)
        made.clear()
        assert cache() is None
    finally:
        gc.enable()


def count_calls(patch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """Note each call of a method."""
    calls: list[str] = []
    method = getattr(owner, name)
    patch.setattr(owner, name, lambda *given: calls.append(name) or method(*given))
    return calls


@pytest.mark.parametrize("rows", [None, pytest.param(2, marks=pytest.mark.nightly)])
def test_turns_are_drawn_as_if_read_anew(rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3")
    wanted = take_turns(builtin(model), Sampling(9))
    use_blocks(monkeypatch, rows)
    found = take_turns(builtin(model), Sampling(9, keeps=True))
    assert_same([[each for _, each in found]], [[each for _, each in wanted]])


class _Recorded(TorchDispatchMode):
    """Notes what a graph would fix: operations, shapes, and addresses of tensors that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = []
        for each in tree_leaves((args, kwargs)):
            if not isinstance(each, Tensor):
                given.append(each)
                continue
            is_new = each.untyped_storage().data_ptr() in self._made
            given.append((each.shape, each.stride(), None if is_new else each.data_ptr()))
        self.calls.append((func, *given))
        inputs = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                pointer = each.untyped_storage().data_ptr()
                if pointer not in inputs:
                    self._made[pointer] = each  # alive, so that no other tensor gets its memory
        return result


@pytest.mark.parametrize("family", by_day(("qwen3", "mistral", "gemma3_text", "lfm2"), ("qwen3",)))
def test_steps_of_equal_rows_read_equal_shapes_at_equal_addresses(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, list[tuple[Any, ...]]]] = []

    class Watched(PagedDecoding):
        def _compute_packed(self, rows: int) -> tuple[Tensor, Tensor | None]:
            with _Recorded() as recorded:
                result = super()._compute_packed(rows)
            steps.append((rows, recorded.calls))
            return result

    made = use_blocks(monkeypatch, 5)
    monkeypatch.setattr("burnish.rollout.builtin.paged_decoding.PagedDecoding", Watched)
    model = tiny_model(family)
    builtin(model, slots=6, eos=range(3, 9)).generate(
        make_requests((1, 5, 23), samples=4), Sampling(15, top_k=20)
    )
    assert len(made) == 1
    by_rows: dict[int, list[list[tuple[Any, ...]]]] = {}
    for rows, calls in steps:
        by_rows.setdefault(rows, []).append(calls)
    assert set(by_rows) <= {1, 2, 4, 6}
    assert max(map(len, by_rows.values())) > 5
    reads = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
    for same in by_rows.values():
        assert not reads.intersection(call[0] for call in same[0])
        for calls in same[1:]:
            assert calls == same[0]


class _Called(TorchDispatchMode):
    """Counts calls of torch."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_host_asks_for_little_around_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph replaces `_compute_packed`, so the host has the rest of a step: 1 to 2 µs a call, of 40 µs that a step may take."""
    around: list[int] = []

    class Watched(PagedDecoding):
        def _compute_packed(self, rows: int) -> tuple[Tensor, Tensor | None]:
            with _disable_current_modes():
                return super()._compute_packed(rows)

        def _step(self, running: int) -> None:
            with _Called() as called:
                super()._step(running)
            around.append(called.count)

    use_blocks(monkeypatch, 64)
    monkeypatch.setattr("burnish.rollout.builtin.paged_decoding.PagedDecoding", Watched)
    builtin(tiny_model("qwen3"), slots=16).generate(
        make_requests((1, 5, 23), samples=5), Sampling(40, top_k=20)
    )
    assert len(around) == 39  # the first token comes with the prompt
    assert 0 < max(around) <= 20


class _Kernels:
    """What the Triton kernels compute, by their definitions."""

    @staticmethod
    def rotate_and_write(
        joined: Tensor,
        weights: tuple[Tensor, Tensor] | None,
        epsilon: float,
        rotation: tuple[Tensor, Tensor],
        places: Tensor,
        pools: tuple[Tensor, Tensor],
    ) -> Tensor:
        kv_heads = pools[0].shape[1]
        sizes = [joined.shape[1] - 2 * kv_heads, kv_heads, kv_heads]
        query, key, value = torch.split(joined, sizes, dim=1)
        query, key = (
            norm_rotate(part, None if weights is None else weights[number], epsilon, rotation)
            for number, part in enumerate((query, key))
        )
        pools[0][places] = key
        pools[1][places] = value
        return query

    @staticmethod
    def silu_gate(joined: Tensor) -> Tensor:
        gate, up = joined.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("family", "changes"),
    by_day(
        [
            ("qwen3", {}),
            ("llama", {"attention_bias": True, "mlp_bias": True}),
            ("mistral", {}),
            ("qwen3", {"hidden_act": "gelu"}),
        ],
        [("qwen3", {})],
    ),
)
def test_fused_steps_draw_the_same(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, **changes)
    requests, sampling = make_requests((1, 5, 23), samples=2), Sampling(9)
    wanted = builtin(model).generate(requests, sampling)
    use_blocks(monkeypatch)
    steps = partial(FusedSteps, kernels=_Kernels)
    monkeypatch.setattr("burnish.rollout.builtin.fused_steps.FusedSteps", steps)
    monkeypatch.setattr(
        "burnish.rollout.builtin.paged_decoding.compiles_triton", lambda device: True
    )
    fused = count_calls(monkeypatch, FusedSteps, "_attend")
    assert_same(builtin(model).generate(requests, sampling), wanted)
    assert fused


def test_few_numbers_of_rows_are_computed() -> None:
    for most in (1, 5, 24, 512):
        buckets = [bucket_of(rows, most) for rows in range(1, most + 1)]
        assert all(rows <= found <= most for rows, found in enumerate(buckets, 1))
        assert len(set(buckets)) <= 5 + most // 16


@pytest.mark.parametrize("keeps", [False, True])
def test_blocks_fill_the_memory_that_there_is(keeps: bool) -> None:
    sampling = Sampling(8, keeps=keeps)
    slot_bytes = (1000, 10_000, PromptCache([1], torch.device("cpu")))
    scarce = Pages.of(1e9, slot_bytes, "auto", 8192, 2048, sampling)
    assert scarce.rows == 512
    share = 2 if keeps else 1
    assert 0.8e9 / share < scarce.tokens * 1000 <= 1e9 / share
    ample = Pages.of(1e12, slot_bytes, 64, 300, 2048, sampling)
    assert ample == Pages(64, 300, 1 + 64 * 2, 256)
    none = Pages.of(0, slot_bytes, "auto", 300, 8, sampling)
    assert none == Pages(1, 300, 3, 256)


def test_the_kernels_check_finds_a_kernel_that_is_right_and_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    assert paged_decoding.block_error(cpu, torch.float32, 2, 16) == 0
    assert 0 < paged_decoding.block_error(cpu, torch.bfloat16, 2, 16) < 0.02
    right = PagedCache.attend

    def only_the_first(cache: PagedCache, *given: Any) -> Tensor:
        """As FlashAttention 2 does in several parts."""
        output = right(cache, *given)
        if output.dtype == torch.bfloat16:
            output[:, 1:] = 0
        return output

    monkeypatch.setattr(PagedCache, "attend", only_the_first)
    assert paged_decoding.block_error(cpu, torch.bfloat16, 2, 16) > 0.1


class TestGraphs:
    @pytest.fixture
    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What is asked of CUDA."""
        calls: list[str] = []

        class Graph:
            def replay(self) -> None:
                calls.append("replay")

            def pool(self) -> int:
                return 7

        @contextmanager
        def graph(_: Graph, pool: Any, capture_error_mode: str) -> Iterator[None]:
            calls.append(f"record {pool}")
            yield
            if pool == 7 and len(calls) > 8:
                raise RuntimeError("the host reads a number")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        return calls

    def test_the_second_step_of_equal_rows_is_recorded(self, recorded: list[str]) -> None:
        computed: list[int] = []
        steps = partial(
            GraphedSteps(), lambda rows: computed.append(rows) or (torch.ones(rows), None)
        )
        for rows in (4, 2, 4, 4, 2, 4):
            assert len(steps(rows)[0]) == rows
        assert computed == [4, 2, 4, 2]
        assert recorded == [
            *("record None", "replay", "replay"),
            *("record 7", "replay", "replay"),
        ]

    def test_what_cannot_be_recorded_runs_as_it_is(
        self, recorded: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        computed: list[int] = []
        steps = partial(
            GraphedSteps(), lambda rows: computed.append(rows) or (torch.ones(rows), None)
        )
        with caplog.at_level(logging.WARNING):
            for rows in (*[4] * 9, 2, 2, 2, 1, 1, 4):
                assert len(steps(rows)[0]) == rows
        assert Counter(computed) == {4: 2, 2: 4, 1: 2}
        assert Counter(recorded) == {"record None": 1, "record 7": 1, "replay": 9}
        assert len(caplog.records) == 1
