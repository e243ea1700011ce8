"""Files and blocks: every byte of every tensor in exactly one part, on every rank's plan alike."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.checkpoint.blocks import Stored, blocks_of, parts_of, plan_files, shares_of
from burnish.checkpoint.dtypes import BY_NAME, dtype_name
from burnish.checkpoint.tensor_sets import set_of
from burnish.errors import IncompatibleError
from burnish.files.safetensors import DTYPE_BITS
from burnish.parallel.boxes import flat_runs

stored = st.lists(
    st.builds(
        Stored,
        st.sampled_from(["model", "exp_avg", "critic/model", "critic/exp_avg"]),
        st.text("abc.01", min_size=1, max_size=5),
        st.sampled_from(sorted(BY_NAME)),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda t: (t.tensor_set, t.name),
)


@given(stored, st.sampled_from([4096, 8192]), st.integers(100, 100_000))
@settings(deadline=None)
def test_blocks_hold_every_byte_once(tensors, block_bytes, max_file_bytes):
    files, _ = plan_files(tensors, max_file_bytes)
    for number, file in enumerate(files):
        count = np.zeros(file.size, dtype=int)
        count[: len(file.header)] += 1
        blocks = blocks_of(number, file.size, block_bytes)
        assert [b.start for b in blocks] == list(range(0, file.size, block_bytes))
        entries = {entry.name: entry for entry in file.entries}
        for block in blocks:
            for part in parts_of(file, block):
                entry = entries[part.key.rpartition("/")[2]]
                [(start, elements)] = flat_runs(part.shape, part.box)
                first = block.start + part.start
                assert first == entry.begin + start * part.dtype.itemsize
                assert part.start % part.dtype.itemsize == 0
                assert first + elements * part.dtype.itemsize <= block.stop
                count[first : first + elements * part.dtype.itemsize] += 1
        assert (count == 1).all()
    names = [(set_of(f.path), e.name) for f in files for e in f.entries]
    assert sorted(names) == sorted((t.tensor_set, t.name) for t in tensors)


@given(stored)
@settings(deadline=None)
def test_the_order_of_tensors_does_not_matter(tensors):
    assert plan_files(tensors) == plan_files(reversed(tensors))


def test_one_file_has_the_plain_name_and_no_index():
    files, indices = plan_files([Stored("model", "w", "BF16", (4,))])
    assert [file.path for file in files] == ["model/model.safetensors"]
    assert indices == {}


def test_many_files_have_numbers_and_an_index():
    tensors = [Stored("model", name, "F32", (1000,)) for name in "abc"]
    files, indices = plan_files(tensors, max_file_bytes=8000)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [file.path for file in files] == [f"model/{name}" for name in names]
    index = json.loads(indices["model/model.safetensors.index.json"])
    assert index["weight_map"] == {"a": names[0], "b": names[0], "c": names[1]}
    assert index["metadata"] == {"total_size": 12000}


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_even_and_in_order(count, world):
    blocks = blocks_of(0, count * 4096, 4096)
    shares = shares_of(blocks, world)
    assert [block for share in shares for block in share] == blocks
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_dtypes_have_the_widths_of_the_format(name):
    assert BY_NAME[name].itemsize * 8 == DTYPE_BITS[name]
    assert dtype_name(BY_NAME[name], "w") == name


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(IncompatibleError, match="tensor w has a dtype"):
        dtype_name(torch.complex128, "w")
