"""Files and blocks: every byte of every tensor in exactly one part, on every rank's plan alike."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.boxes.box import flat_runs
from burnish.boxes.pieces import TensorIndex
from burnish.boxes.tensor_reader import TORCH_DTYPES, dtype_name
from burnish.checkpoint.manifest import (
    BLOCK_BYTES,
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
)
from burnish.checkpoint.write_plan import (
    MOST_BLOCKS,
    Parts,
    SpanTable,
    StoredTensor,
    block_bytes_for,
    block_writers,
    groups_of,
    plan_files,
    set_of,
)
from burnish.errors import IncompatibleError
from burnish.files.safetensors import DTYPE_BITS

stored = st.lists(
    st.builds(
        StoredTensor,
        st.sampled_from(["model", "exp_avg", "critic/model", "critic/exp_avg"]),
        st.text("abc.01", min_size=1, max_size=5),
        st.sampled_from(sorted(TORCH_DTYPES)),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda t: (t.tensor_set, t.name),
)


@given(stored, st.sampled_from([4096, 8192]), st.integers(100, 100_000))
def test_blocks_hold_every_byte_once(tensors, block_bytes, max_file_bytes):
    files, _ = plan_files(tensors, max_file_bytes)
    for file in files:
        count = np.zeros(file.size, dtype=int)
        count[: file.header_bytes] += 1
        blocks = SpanTable.blocks([file.size], block_bytes)
        assert blocks.start.tolist() == list(range(0, file.size, block_bytes))
        known = TensorIndex()
        keys = {f"{file.tensor_set}/{entry.name}": entry for entry in file.entries}
        known.add([(k, e.shape, TORCH_DTYPES[e.dtype]) for k, e in keys.items()], "")
        parts = Parts.of([file], blocks, known)
        places = parts.places(np.arange(len(blocks.file)))
        for part, place in places.items():
            key = known.names[parts.pieces.boxes.tensor[part]]
            entry, block = keys[key], blocks[place.slot]
            [(start, elements)] = flat_runs(entry.shape, place.box)
            first, itemsize = block.start + place.start, TORCH_DTYPES[entry.dtype].itemsize
            assert first == entry.begin + start * itemsize
            assert place.start % itemsize == 0
            assert first + elements * itemsize <= block.stop
            count[first : first + elements * itemsize] += 1
        assert (count == 1).all()
        assert sorted(places) == list(range(len(parts.span)))
    names = [(set_of(f.path), e.name) for f in files for e in f.entries]
    assert sorted(names) == sorted((t.tensor_set, t.name) for t in tensors)


@pytest.mark.parametrize(
    ("total", "times"),
    [(200, 1), (MOST_BLOCKS, 1), (MOST_BLOCKS + 1, 2), (5 * MOST_BLOCKS, 8)],
)
def test_a_step_of_too_many_blocks_has_larger_ones(total, times):
    half = total * BLOCK_BYTES // 2
    sizes = [half, total * BLOCK_BYTES - half]
    assert block_bytes_for(sizes) == times * BLOCK_BYTES
    assert block_bytes_for(sizes, most=1) <= MAX_BLOCK_BYTES


@pytest.mark.parametrize(
    ("sizes", "block_bytes"),
    [
        ([], MIN_BLOCK_BYTES),
        ([8] * 1000, MIN_BLOCK_BYTES),
        ([8] * 1000 + [32 << 20], 512 << 10),
        ([100 << 20, 200 << 20, 90 << 20], 2 << 20),
        ([1 << 30, 8], BLOCK_BYTES),
    ],
)
def test_blocks_are_small_where_tensors_are(sizes, block_bytes):
    assert block_bytes_for(sizes) == block_bytes


@given(st.lists(st.integers(1, 8 << 12), max_size=30), st.sampled_from([4096, 16384]))
def test_tensors_begin_where_blocks_do_as_far_as_their_sizes_allow(sizes, align):
    tensors = [StoredTensor("exp_avg", str(n), "U8", (size,)) for n, size in enumerate(sizes)]
    files, _ = plan_files(tensors, align=align)
    is_large = sum(sizes) >= 32 * align
    for file in files:
        assert file.header_bytes % (align if is_large else 8) == 0
        for entry in file.entries:
            size = entry.end - entry.begin
            assert (entry.begin - file.header_bytes) % min(size & -size, align) == 0


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5), st.integers(0, 40))
def test_spans_are_blocks_of_one_owner_that_follow_each_other(ranks, most, cut):
    owner = np.array(ranks, np.int64)
    first = min(cut, len(ranks))
    blocks = SpanTable.blocks([first * 10, (len(ranks) - first) * 10], 10)
    table, owners_of_spans = blocks.joined(owner, most * 10)
    spans = [table[row] for row in range(len(owners_of_spans))]
    found = [
        (span.file, start, rank)
        for span, rank in zip(spans, owners_of_spans.tolist(), strict=True)
        for start in range(span.start, span.stop, 10)
    ]
    assert found == [(*b, r) for *b, r in zip(blocks.file, blocks.start, ranks, strict=True)]
    assert all(span.stop - span.start <= most * 10 for span in spans)
    for one, two, a, b in zip(spans, spans[1:], owners_of_spans, owners_of_spans[1:], strict=False):
        assert a != b or one.file != two.file or one.stop % (most * 10) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 5), st.booleans()),
        max_size=40,
    ),
    st.integers(9, 30),
)
def test_spans_that_travel_come_in_the_first_groups_then_those_of_low_places(rows, group_bytes):
    owner, size, place = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    travels = np.array([row[3] for row in rows], bool)
    group, index = groups_of(owner, size, place, travels, group_bytes)
    for rank in range(3):
        mine = sorted(
            (int(group[i]), int(index[i]), i) for i in np.flatnonzero(owner == rank).tolist()
        )
        order = [i for _, _, i in mine]
        assert order == sorted(order, key=lambda i: (not travels[i], place[i], i))
        for number, some in itertools.groupby(mine, key=lambda each: each[0]):
            members = list(some)
            assert [i for _, i, _ in members] == list(range(len(members)))
            assert sum(int(size[i]) for _, _, i in members) < group_bytes + 9
            assert number <= len(order)


@given(stored)
def test_the_order_of_tensors_does_not_matter(tensors):
    assert plan_files(tensors) == plan_files(reversed(tensors))


def test_one_file_has_the_plain_name_and_no_index():
    files, indices = plan_files([StoredTensor("model", "w", "BF16", (4,))])
    assert [file.path for file in files] == ["model/model.safetensors"]
    assert indices == {}


def test_many_files_have_numbers_and_an_index():
    tensors = [StoredTensor("model", name, "F32", (1000,)) for name in "abc"]
    files, indices = plan_files(tensors, max_file_bytes=8000)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [file.path for file in files] == [f"model/{name}" for name in names]
    index = json.loads(indices["model/model.safetensors.index.json"])
    assert index["weight_map"] == {"a": names[0], "b": names[0], "c": names[1]}
    assert index["metadata"] == {"total_size": 12000}


@given(
    st.lists(st.tuples(st.integers(0, 19), st.integers(0, 5), st.integers(1, 9)), max_size=60),
    st.integers(6, 9),
)
def test_every_block_has_an_owner_and_all_ranks_as_many(rows, world):
    table = np.array(rows, np.int64).reshape(-1, 3)
    owner = block_writers(table[:, 0], table[:, 1], table[:, 2], 20, world)
    assert len(owner) == 20
    assert np.bincount(owner, minlength=world).max() <= -(-20 // world)


def test_a_block_belongs_to_whom_has_the_most_of_it():
    block = np.array([0, 0, 1, 1, 1, 2, 3])
    rank = np.array([0, 1, 0, 1, 0, 1, 0])
    size = np.array([3, 4, 3, 4, 3, 1, 1])
    assert block_writers(block, rank, size, 4, 2).tolist() == [1, 0, 1, 0]


def test_those_who_have_the_same_take_turns():
    block, rank = np.repeat(np.arange(6), 3), np.tile(np.arange(3), 6)
    assert block_writers(block, rank, np.ones(18, np.int64), 6, 3).tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_dtypes_have_the_widths_of_the_format(name):
    assert TORCH_DTYPES[name].itemsize * 8 == DTYPE_BITS[name]
    assert dtype_name(TORCH_DTYPES[name], "w") == name


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(IncompatibleError):
        dtype_name(torch.complex128, "w")
