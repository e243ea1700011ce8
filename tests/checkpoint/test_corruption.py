"""Flipped bits and hostile files, a seeded sample; `make faults` tries ten thousand and a million."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.checkpoints.states import BIG_SHAPES
from support.faults.bit_flips import check_flip, flips, make_step
from support.fuzz.checkpoint_files import LARGE, TARGETS, reading
from support.nightly import draws

from burnish.checkpoint.manifest import BLOCK_BYTES

FLIPS = 400


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return make_step(tmp_path_factory.mktemp("checkpoints"))


def test_every_flipped_bit_is_found_and_named(step):
    chosen = list(itertools.islice(flips(step, random.Random(1)), FLIPS))
    assert len({flip.name for flip in chosen}) == sum(p.is_file() for p in step.rglob("*"))
    assert [words for flip in chosen for words in check_flip(step, flip)] == []


@pytest.mark.nightly
def test_of_several_blocks_the_damaged_one_is_named(tmp_path):
    step = make_step(tmp_path, BIG_SHAPES)
    chosen = list(itertools.islice(flips(step, random.Random(2)), 40))
    assert any(flip.bit > 8 * BLOCK_BYTES for flip in chosen)
    assert [words for flip in chosen for words in check_flip(step, flip)] == []


SMALL = [name for name in TARGETS if name not in LARGE]


@pytest.mark.parametrize("target", SMALL)
@given(rng=st.randoms(use_true_random=False))
@draws(150, suppress_health_check=list(HealthCheck))
def test_hostile_files_are_refused_in_plain_words(tmp_path_factory, target, rng):
    assert reading(target, rng, tmp_path_factory.getbasetemp()).wrong == ""


@pytest.mark.parametrize("target", SMALL)
def test_refusing_takes_little_memory(tmp_path, target):
    tracemalloc.start()
    try:
        found = [reading(target, random.Random(seed), tmp_path).wrong for seed in range(60)]
        assert not any(found)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("target", LARGE)
def test_files_as_large_as_may_be(tmp_path, target):
    """What they cost, `make faults` looks at."""
    assert not any(reading(target, random.Random(seed), tmp_path).wrong for seed in range(3))
