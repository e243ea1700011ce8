from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.checkpoints.states import make_state, save_once, shards_of

from burnish.boxes.tensor_reader import DirectoryReader
from burnish.checkpoint.load import StepReader
from burnish.checkpoint.steps import open_step
from burnish.checkpoint.tools.diff import Distance, compare_steps
from burnish.distributed.layout import Layout
from burnish.files.storage import LocalStorage

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2)


def distance(a, b):
    found = Distance()
    found.add(a, b)
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("start", [0.0, -0.0, 1.0, -1.0, 0.75])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_ulp_are_steps_to_the_next_number(dtype, start, steps):
    if dtype in (torch.float64, torch.float32):  # the oracle walks
        kind = np.float64 if dtype == torch.float64 else np.float32
        there = kind(start)
        for _ in range(steps):
            there = np.nextafter(there, kind(-np.inf))
        there = float(there)
    else:
        numbers = all_numbers(dtype)
        there = numbers[numbers.index(start) - steps]
    found = distance(torch.tensor([start], dtype=dtype), torch.tensor([there], dtype=dtype))
    assert found.max_ulp == steps
    assert found.different == 1
    assert found.max_absolute == abs(start - there)
    assert found.max_relative == abs(start - there) / max(abs(start), abs(there))


def all_numbers(dtype):
    """Every finite value of a small dtype, in order, zero once."""
    kind = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    ends = (0, 256) if kind == torch.uint8 else (-(1 << 15), 1 << 15)
    every = torch.arange(*ends, dtype=torch.int32).to(kind).view(dtype).to(torch.float64)
    return sorted(set(every[every.isfinite()].tolist()))


words = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=20)


@given(words, words)
def test_any_bits_of_fp32_agree_with_plain_python(first, second):
    count = min(len(first), len(second))
    a, b = (
        torch.tensor(bits[:count], dtype=torch.int32).view(torch.float32)
        for bits in (first, second)
    )
    found = distance(a, b)
    pairs = list(zip(a.tolist(), b.tolist(), first, second, strict=False))
    different = [(x, y, i, j) for x, y, i, j in pairs if i != j]
    finite = [p for p in different if math.isfinite(p[0]) and math.isfinite(p[1])]

    def place(bits):
        return bits if bits >= 0 else -(bits + (1 << 31))

    assert found.different == len(different)
    assert found.nonfinite == len(different) - len(finite)
    assert found.max_ulp == max((abs(place(i) - place(j)) for *_, i, j in finite), default=0)
    assert found.max_absolute == max((abs(x - y) for x, y, *_ in finite), default=0)
    relative = [abs(x - y) / max(abs(x), abs(y)) if x != y else 0 for x, y, *_ in finite]
    assert found.max_relative == max(relative, default=0)


@pytest.mark.parametrize(
    ("dtype", "first", "second"),
    [
        (torch.int64, 2**53, 2**53 + 1),
        (torch.int64, -(2**63), 2**63 - 1),
        (torch.int64, -(2**62) - 1, 2**62),
        (torch.uint64, 2**64 - 1, 0),
        (torch.uint64, 2**64 - 1, 2**64 - 2),
        (torch.uint32, 2**32 - 1, 0),
        (torch.int8, -128, 127),
        (torch.bool, True, False),
    ],
)
def test_integers_are_exact(dtype, first, second):
    a, b = (torch.tensor([each, 3 & each], dtype=dtype) for each in (first, second))
    found = distance(a, b)
    gaps = [abs(first - second), abs((3 & first) - (3 & second))]
    assert found.max_ulp == max(gaps) > 0
    assert found.max_absolute == float(max(gaps))
    assert found.max_relative > 0


@pytest.mark.parametrize(("first", "second"), [(1.0, 1e-300), (1.0, -1.5), (1e300, -1e300)])
def test_fp64_steps_are_exact(first, second):
    a, b = (torch.tensor([each], dtype=torch.float64) for each in (first, second))
    places = [int(np.float64(abs(each)).view(np.int64)) for each in (first, second)]
    apart = places[0] + places[1] if second < 0 else abs(places[0] - places[1])
    assert distance(a, b).max_ulp == apart


def test_equal_bits_are_equal_nan_or_not():
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1.0])
    assert distance(special, special.clone()) == Distance()


def test_zeros_of_both_signs_differ_by_nothing():
    found = distance(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert found == Distance(different=1)


def test_numbers_that_are_none():
    a = torch.tensor([float("nan"), float("inf"), 1.0, 1.0])
    b = torch.tensor([1.0, 1.0, float("-inf"), 1.0])
    assert distance(a, b) == Distance(different=3, nonfinite=3)


@pytest.mark.parametrize("coarser", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_compared_in_steps_of_the_coarser(coarser):
    exact = torch.linspace(1, 2, 1000)
    found = distance(exact, exact.to(coarser))
    assert found.max_ulp == 0
    error = (exact.double() - exact.to(coarser).double()).abs()
    assert found.max_absolute == float(error.max())
    assert found.different == int((error > 0).sum())
    assert distance(exact.to(coarser), exact.to(coarser).float()) == Distance()


def test_integers_and_complex_numbers():
    found = distance(torch.tensor([1, 5]), torch.tensor([1, 2]))
    assert (found.different, found.max_ulp, found.max_absolute) == (1, 3, 3)
    found = distance(torch.tensor([True, False]), torch.tensor([True, True]))
    assert (found.different, found.max_ulp) == (1, 1)
    found = distance(torch.tensor([1 + 2j]), torch.tensor([1 + 4j]))
    assert (found.different, found.max_absolute, found.max_ulp) == (1, 2, 1 << 23)


def verdicts(a, b):
    return {each.key: each.verdict for each in compare_steps(a, b)}


def test_a_step_with_itself_and_another(tmp_path):
    first, second = save_once(tmp_path, 1), save_once(tmp_path, 2, seed=1)
    steps = [open_step(path, LocalStorage()) for path in (first, second)]
    with StepReader(steps[0]) as a, StepReader(steps[0]) as again, StepReader(steps[1]) as b:
        assert set(verdicts(a, again).values()) == {"equal"}
        found = {each.key: each for each in compare_steps(a, b)}
        weights = [make_state(seed)[0]["layers.0.up.weight"].double() for seed in (0, 1)]
        apart = found["model/layers.0.up.weight"].distance
        assert apart.max_absolute == float((weights[0] - weights[1]).abs().max())
        assert found["model/layers.0.none"].verdict == "equal"


def test_one_bit_below_bf16_is_found(tmp_path):
    weights, _ = make_state(0)
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed["layers.0.up.weight"].view(torch.int32)[3, 4] += 1
    paths = [
        save_once(tmp_path, step, weights=shards_of(each, Layout()))
        for step, each in ((1, weights), (2, changed))
    ]
    a, b = (StepReader(open_step(path, LocalStorage())) for path in paths)
    with a, b:
        [found] = [each for each in compare_steps(a, b) if each.verdict != "equal"]
    assert found.key == "model/layers.0.up.weight"
    assert (found.distance.different, found.distance.max_ulp) == (1, 1)


def test_what_cannot_be_compared_is_said(tmp_path):
    one = {"a": torch.ones(2), "shape": torch.ones(2), "kind": torch.ones(2), "same": torch.ones(3)}
    two = {
        "b": torch.ones(2),
        "shape": torch.ones(1, 2),
        "kind": torch.ones(2, dtype=torch.int32),
        "same": torch.ones(3, dtype=torch.bfloat16),
    }
    for name, tensors in (("one", one), ("two", two)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    with DirectoryReader(tmp_path / "one") as a, DirectoryReader(tmp_path / "two") as b:
        found = list(compare_steps(a, b))
    assert {each.key: each.verdict for each in found} == {
        "a": "only in A",
        "b": "only in B",
        "shape": "another shape",
        "kind": "another kind",
        "same": "equal",
    }
    same = next(each for each in found if each.key == "same").as_json()
    assert same["a"] == {"dtype": "float32", "shape": [3]}
    assert same["b"] == {"dtype": "bfloat16", "shape": [3]}
    assert same["max_ulp"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_relative_l2_is_that_of_numpy(dtype):
    a, b = (torch.randn(1000, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (0, 1))
    x, y = a.double().numpy(), b.double().numpy()
    wanted = np.linalg.norm(x - y) / np.linalg.norm(x)
    assert distance(a, b).relative_l2 == pytest.approx(wanted)
    assert distance(a, a).relative_l2 == 0
    assert distance(torch.zeros(1000), b).relative_l2 == np.inf
