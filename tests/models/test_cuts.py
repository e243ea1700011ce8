from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models.tiny import tiny_config

from burnish.models.meta_init import build_on_meta
from burnish.models.names import regions
from burnish.models.parts import ShardRule, cut_regions

SIZES = st.integers(1, 12)


@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 3))
def test_ranks_hold_every_index_once(size: int, ranks: int, joined: int) -> None:
    cuts = [ShardRule.of(size * joined, 0, rank, ranks, joined) for rank in range(ranks)]
    held = [index for cut in cuts for span in cut.spans for index in span]
    assert sorted(held) == list(range(size * joined))
    for cut in cuts:
        assert len({span.start // max(size, 1) for span in cut.spans if span}) in (0, joined)


@given(SIZES, SIZES, st.integers(0, 1), st.integers(1, 4), st.integers(1, 3))
def test_the_parts_put_together_are_the_whole(
    rows: int, columns: int, dim: int, ranks: int, joined: int
) -> None:
    shape = [rows, columns]
    shape[dim] *= joined
    whole = torch.arange(rows * columns * joined).view(shape)
    built = torch.full_like(whole, -1)
    for rank in range(ranks):
        cut = ShardRule.of(shape[dim], dim, rank, ranks, joined)
        indices = torch.tensor([index for span in cut.spans for index in span], dtype=torch.int64)
        built.index_copy_(dim, indices, cut.of_tensor(whole))
    assert torch.equal(built, whole)


@pytest.mark.parametrize("ranks", [2, 3])
def test_regions_of_fused_experts(ranks: int) -> None:
    """gate and up of every expert lie in one parameter, of which each rank has some rows of both."""
    whole = regions(build_on_meta(tiny_config("qwen3_moe")))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    numbered = {r.name: torch.arange(24 * 32).view(r.shape) for r in whole if r.parameter == name}
    assert len(numbered) == 8
    found = {key: torch.full((24, 32), -1) for key in numbered}
    for rank in range(ranks):
        cut = ShardRule.of(48, 1, rank, ranks, joined=2)
        parameter = torch.cat(
            [
                torch.stack([torch.arange(24 * 32).view(24, 32)] * 4)[:, span.start % 24 :][
                    :, : len(span)
                ]
                for span in cut.spans
            ],
            dim=1,
        )
        for region in cut_regions(whole, {name: cut}):
            if region.parameter == name:
                values = parameter[region.box.slices].squeeze(0)
                rows = slice(region.start[0], region.start[0] + len(values))
                found[region.name][rows] = values
            else:
                assert region in whole
    for key, values in numbered.items():
        assert torch.equal(found[key], values)


def test_what_a_rank_holds_nothing_of_is_left_out() -> None:
    whole = regions(build_on_meta(tiny_config("llama")))
    nothing = ShardRule(0, (range(0),))
    kept = cut_regions(whole, {"lm_head.weight": nothing})
    assert {r.name for r in whole} - {r.name for r in kept} == {"lm_head.weight"}
