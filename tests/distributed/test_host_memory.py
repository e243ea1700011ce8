from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws
from torch import Tensor

from burnish.distributed import host_memory
from burnish.distributed.host_memory import Arena, page_lock
from burnish.errors import BurnishError

CPU = torch.device("cpu")
LEAST = 1 << 16


@draws(60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 9)), min_size=1, max_size=40))
def test_what_is_taken_never_overlaps_and_comes_back(steps: list[tuple[int, int]]) -> None:
    """Each step takes bytes and gives back an earlier lot; what is held keeps its content."""
    arena, held = Arena(CPU, LEAST), dict[int, Tensor]()
    for number, (size, dropped) in enumerate(steps):
        held[number] = arena.take(size).fill_(number % 251)
        held.pop(number - dropped, None)
        assert arena.used >= sum(tensor.numel() for tensor in held.values())
        assert all(bool((tensor == key % 251).all()) for key, tensor in held.items())
    held.clear()
    assert arena.used == 0


def test_threads_take_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one closes a region, or joins gaps, that another is about to use."""
    arena, inside, pages = Arena(CPU, LEAST), [0, 0], host_memory._pages

    def slow_pages(size: int) -> mmap.mmap:
        inside[0] += 1
        inside[1] = max(inside)
        time.sleep(0.05)
        inside[0] -= 1
        return pages(size)

    monkeypatch.setattr(host_memory, "_pages", slow_pages)
    with ThreadPoolExecutor(4) as pool:
        held = list(pool.map(arena.take, [3000] * 4))
    assert inside == [0, 1]
    assert len({tensor.data_ptr() for tensor in held}) == 4


def test_steps_that_are_alike_take_no_more_and_soon_have_one_piece() -> None:
    arena = Arena(CPU, LEAST)
    sizes = [30_000, 80_000, 5, 200_000, 64, 1_000_000]
    for _ in range(2):
        held = [arena.take(size) for size in sizes]
        after_first = arena.held
        assert len(arena._regions) <= len(sizes)
        del held
    held = [arena.take(size) for size in sizes]
    assert len(arena._regions) == 1
    assert arena.held <= after_first
    assert held[0].data_ptr() % 64 == 0


def test_a_view_keeps_its_place_and_its_piece() -> None:
    arena = Arena(CPU, LEAST)
    view = arena.take(400).view(torch.float32).fill_(7.0)[10:20]
    other = arena.take(LEAST).fill_(1)
    assert arena.used >= 400 + LEAST
    del arena
    gc.collect()
    other.fill_(2)
    assert view.tolist() == [7.0] * 10


def test_neighbours_that_come_back_are_one_gap() -> None:
    arena = Arena(CPU, LEAST)
    parts = [arena.take(LEAST // 4) for _ in range(4)]
    del parts[3], parts[0]
    del parts[1]
    first = arena.take(LEAST // 2)
    assert len(arena._regions) == 1
    assert first.data_ptr() > parts[0].data_ptr()


def test_the_lack_of_memory_says_which_settings_take_it() -> None:
    with pytest.raises(BurnishError, match=r"engine\.activation_offload"):
        Arena(CPU).take(1 << 60)


def test_what_was_pinned_is_unpinned_once_when_its_last_view_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: list[int] = []

    def page_lock(memory: Tensor, device: torch.device) -> bool:
        known.append(memory.data_ptr())
        return True

    monkeypatch.setattr(host_memory, "page_lock", page_lock)
    monkeypatch.setattr(
        host_memory, "page_unlock", lambda memory, device: known.remove(memory.data_ptr())
    )
    monkeypatch.setattr(host_memory, "synchronize", lambda device: None)
    arena = Arena(torch.device("cuda"), LEAST)
    held = [arena.take(LEAST) for _ in range(3)]
    assert len(known) == 3
    del held[1:]
    held.append(arena.take(LEAST))  # the two free ones become one
    assert len(known) == 2
    del arena
    gc.collect()
    assert len(known) == 2
    held.clear()
    gc.collect()
    assert not known


def test_a_free_piece_that_is_too_small_gives_way_to_one_that_is_not() -> None:
    arena = Arena(CPU, LEAST)
    kept = arena.take(LEAST)
    for size in (2 * LEAST, 3 * LEAST, 5 * LEAST):
        passing = arena.take(size).fill_(1)
        assert arena.held == LEAST + size
        del passing
    assert kept.numel() == LEAST


def test_pinning_happens_on_the_device_whatever_the_thread_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, calls = [0], list[tuple[str, int]]()

    @contextmanager
    def device_index(index: int) -> Iterator[None]:
        chosen.append(index)
        yield
        chosen.pop()

    class Registry:
        def cudaHostRegister(self, *_: int) -> int:
            calls.append(("register", chosen[-1]))
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            calls.append(("unregister", chosen[-1]))

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(host_memory, "_runtime", Registry)
    monkeypatch.setattr(
        host_memory, "synchronize", lambda device: calls.append(("synchronize", chosen[-1]))
    )
    arena = Arena(torch.device("cuda", 3), LEAST)
    arena.take(LEAST)
    arena.take(2 * LEAST)
    del arena
    gc.collect()
    assert {what for what, _ in calls} == {"register", "synchronize", "unregister"}
    assert {device for _, device in calls} == {3}


class Runtime:
    """Answers with what it is given."""

    def __init__(self, answer: int) -> None:
        self.answer = answer

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return self.answer


@pytest.mark.parametrize(("answer", "forgotten"), [(0, 0), (712, 1)])
def test_the_error_of_a_refusal_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, answer: int, forgotten: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(host_memory, "_runtime", lambda: Runtime(answer))
    monkeypatch.setattr(host_memory, "_forget_error", lambda: calls.append(None))
    assert page_lock(torch.zeros(8), CPU) is (answer == 0)
    assert len(calls) == forgotten
    assert not page_lock(torch.zeros(0), CPU)
    assert len(calls) == forgotten
