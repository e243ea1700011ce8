from __future__ import annotations

import numpy as np
import torch

from burnish.rollout.builtin.sampling import stream_key, uniforms

MASK = (1 << 64) - 1


def splitmix64(state: int) -> tuple[int, int]:
    """The next state and output of the published generator, in Python's integers."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def test_numbers_are_those_of_splitmix64() -> None:
    for key in (0, 1, -1, 123456789, -(1 << 63), (1 << 63) - 1):
        state, want = key & MASK, []
        for _ in range(50):
            state, output = splitmix64(state)
            want.append((output >> 11) / 2**53)
        got = uniforms(torch.full((50,), key), torch.arange(50))
        assert got.dtype == torch.float64
        assert got.tolist() == want


def test_the_published_first_output_of_seed_0() -> None:
    assert splitmix64(0)[1] == 0xE220A8397B1DCDAF


def _numbers(streams: int, length: int) -> np.ndarray:
    keys = torch.tensor(
        [stream_key(7, 3, prompt, s) for prompt in range(streams // 8) for s in range(8)]
    )
    counts = torch.arange(length).repeat(len(keys))
    return uniforms(keys.repeat_interleave(length), counts).view(len(keys), length).numpy()


def test_numbers_are_uniform_and_unrelated() -> None:
    """Bounds are about 5 standard deviations wide, and the numbers are always the same."""
    u = _numbers(512, 256)
    n = u.size
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 / np.sqrt(12 * n)
    cells = np.bincount((u.ravel() * 1000).astype(int), minlength=1000)
    chi_square = ((cells - n / 1000) ** 2 / (n / 1000)).sum()
    assert abs(chi_square - 999) < 5 * np.sqrt(2 * 999)
    for one, two in (
        (u[:, :-1], u[:, 1:]),  # one position and the next
        (u[:-1], u[1:]),  # one sample and the next
        (u[:-8], u[8:]),  # one prompt and the next
    ):
        correlation = np.corrcoef(one.ravel(), two.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(one.size)


def test_every_part_enters_the_key() -> None:
    keys = {stream_key(*parts) for parts in np.ndindex(3, 3, 3, 3)}
    assert len(keys) == 81
    assert all(-(1 << 63) <= key < 1 << 63 for key in keys)
