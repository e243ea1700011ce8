"""Flat ranges to boxes: what is cut anywhere, through any fusion, is put together again bit for bit."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.models.tiny import tiny_config
from support.nightly import draws

from burnish.boxes.box import Box
from burnish.engines.megatron.distributed_optimizer import boxes_in_range
from burnish.models.megatron_names import MegatronSlot, regions_of
from burnish.models.meta_init import model_sizes
from burnish.models.names import Region

SIZES = st.integers(1, 9)


def put_together(
    regions: tuple[Region, ...], parameter: np.ndarray, cuts: list[int]
) -> dict[str, np.ndarray]:
    """Every region's tensor from the ranges of a parameter that is cut at these places; -1 where nothing is known."""
    built = {region.name: np.full(region.shape, -1) for region in regions}
    flat = parameter.reshape(-1)
    for start, stop in zip([0, *cuts], [*cuts, flat.size], strict=True):
        piece = flat[start:stop]
        for region in regions:
            for at, box in boxes_in_range(region, parameter.shape, start, stop):
                values = piece[at : at + box.elements].reshape(box.sizes)
                assert (built[region.name][box.slices] == -1).all(), "elements come twice"
                built[region.name][box.slices] = values
    return built


@st.composite
def cut_parameters(draw: st.DrawFn) -> tuple[tuple[Region, ...], np.ndarray, list[int]]:
    """Some boxes of a parameter as tensors of their own, and where its flat elements are cut."""
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
    regions = []
    for number in range(draw(st.integers(1, 3))):
        offsets = [draw(st.integers(0, size - 1)) for size in shape]
        sizes = [draw(st.integers(1, s - o)) for s, o in zip(shape, offsets, strict=True)]
        start = tuple(draw(st.integers(0, 2)) for _ in shape)
        total = tuple(b + s for b, s in zip(start, sizes, strict=True))
        box = Box(tuple(offsets), tuple(sizes))
        regions.append(Region(str(number), total, "p", box, tuple(range(len(shape))), start))
    count = math.prod(shape)
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=6)))
    return tuple(regions), np.arange(count).reshape(shape), cuts


@given(cut_parameters())
def test_ranges_of_any_boxes(drawn: tuple[tuple[Region, ...], np.ndarray, list[int]]) -> None:
    regions, parameter, cuts = drawn
    built = put_together(regions, parameter, cuts)
    for region in regions:
        inner = tuple(slice(b, None) for b in region.start)
        np.testing.assert_array_equal(built[region.name][inner], parameter[region.box.slices])
        assert (built[region.name] >= 0).sum() == region.box.elements


@draws(50)
@given(st.integers(1, 4), st.sampled_from([1, 2, 3]), SIZES, st.data())
def test_a_run_through_fused_qkv_is_few_boxes(
    groups: int, queries: int, hidden: int, data: st.DataObject
) -> None:
    """q, k and v of each group in turn, cut into a layout's ranges: what comes together is q, k and v."""
    config = tiny_config(
        "qwen3",
        num_attention_heads=groups * queries,
        num_key_value_heads=groups,
        head_dim=4,
        hidden_size=hidden,
    )
    rows = {"q": groups * queries * 4, "k": groups * 4, "v": groups * 4}
    tensors, first = {}, 0
    for letter, count in rows.items():
        tensors[letter] = np.arange(first, first + count * hidden).reshape(count, hidden)
        first += count * hidden
    split = {letter: np.split(tensor, groups) for letter, tensor in tensors.items()}
    fused = np.concatenate([split[letter][g] for g in range(groups) for letter in "qkv"])
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    regions = regions_of(name, fused.shape, model_sizes(config), MegatronSlot(), MegatronSlot())
    cuts = sorted(data.draw(st.lists(st.integers(0, fused.size), max_size=4)))
    built = put_together(regions, fused, cuts)
    for letter, tensor in tensors.items():
        found = built[f"model.layers.0.self_attn.{letter}_proj.weight"]
        np.testing.assert_array_equal(found, tensor)
    for region in regions:
        assert len(list(boxes_in_range(region, fused.shape, 1, fused.size - 1))) <= 3
