"""Random numbers as a function of what they are for, so that batching, order and ranks change nothing.

Every completion has a 64-bit key, derived from (run seed, step, prompt, sample). Number t of a key
is splitmix64's t-th output when seeded with the key (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014): z = key + (t + 1)·γ mod 2^64, then two rounds of
xor-shift and multiply. A device without fp64 leaves them to the CPU, so they are the same
everywhere. Left out: what is done with the numbers (`burnish.rollout.builtin.sampling`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.distributed.device import has_fp64
from burnish.records.seeds import derive_seed


def stream_key(seed: int, step: int, prompt_key: int, sample: int) -> int:
    """The key of one completion's numbers, as a signed 64-bit integer."""
    return _signed(derive_seed(seed, "rollout", step, prompt_key, sample))


def uniforms(keys: Tensor, counts: Tensor) -> Tensor:
    """Number `counts` [n] of each of the `keys` [n], both int64: float64 [n] in [0, 1), 53 random bits.

    They lie where the keys lie, or on the CPU where that device has no fp64.
    """
    if not has_fp64(keys.device):
        cpu = torch.device("cpu")
        keys, counts = keys.to(cpu), counts.to(cpu)
    z = keys + (counts + 1) * _GAMMA
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).double() * 2.0**-53


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own keeps the sign)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
