import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws
from support.ranks.devices import BF16_ATTENTION_ERROR, CPU
from torch.nn.functional import scaled_dot_product_attention

from burnish.models.kernels.attention import BlockPlan, Softmax

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def one_by_one(query, key, value, lengths, scaling, window):
    """Each sequence alone, with a mask that is written out."""
    outputs = []
    for q, k, v in zip(*(rows.split(lengths) for rows in (query, key, value)), strict=True):
        steps = torch.arange(len(q))
        distance = steps[:, None] - steps[None, :]
        mask = (distance >= 0) & (distance < (window or len(q)))
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (k, v))
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(~mask, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def draw(total, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(total, heads, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


@draws(60)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9),
    window=st.none() | st.integers(1, 80),
)
def test_equals_each_sequence_alone(lengths, window):
    results = []
    for blocks in (True, False):
        rows = draw(sum(lengths))
        if blocks:
            output = BlockPlan.of(lengths, CPU).attend(rows, Softmax(0.4, window))
        else:
            output = one_by_one(*rows, lengths, 0.4, window)
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        (output * upstream).sum().backward()
        results.append((output, *(part.grad for part in rows)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", [[9, 40, 41, 3], [300, 300], [2500, 130]])
def test_bf16_is_exact_up_to_its_rounding(lengths, window):
    rows = [part.detach().bfloat16() for part in draw(sum(lengths))]
    exact = [part.double().requires_grad_() for part in rows]
    rows = [part.requires_grad_() for part in rows]
    output = BlockPlan.of(lengths, CPU).attend(rows, Softmax(0.4, window))
    expected = one_by_one(*exact, lengths, 0.4, window)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    (output * upstream).sum().backward()
    (expected * upstream.double()).sum().backward()
    assert output.dtype == torch.bfloat16
    for ours, theirs in zip(
        (output, *(part.grad for part in rows)),
        (expected, *(part.grad for part in exact)),
        strict=True,
    ):
        assert (ours.double() - theirs).norm() <= BF16_ATTENTION_ERROR * theirs.norm()


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200))
def test_every_row_is_computed_once_beside_the_padding(lengths):
    plan = BlockPlan.of(lengths, CPU)
    assert sum(count for count, _ in plan.blocks) == len(lengths)
    heights = [height for _, height in plan.blocks]
    assert heights == sorted(set(heights), reverse=True)
    assert set(heights) <= set(lengths)
    if plan.gather is None:
        assert lengths == sorted(lengths, reverse=True)
        assert sum(count * height for count, height in plan.blocks) == sum(lengths)
        return
    gather, scatter = plan.gather, plan.scatter
    assert len(gather) == sum(count * height for count, height in plan.blocks)
    assert torch.equal(gather[scatter], torch.arange(sum(lengths)))
    padding = plan.padding if plan.padding is not None else scatter[:0]
    assert torch.equal(torch.cat((scatter, padding)).sort().values, torch.arange(len(gather)))
    assert len(padding) <= sum(max(15, length // 8) for length in lengths)


@pytest.mark.parametrize("lengths", [[90, 85, 96, 81], [40, 200, 33]])
def test_like_lengths_share_a_block(lengths):
    plan = BlockPlan.of(lengths, CPU)
    expected = [(4, 96)] if len(lengths) == 4 else [(1, 200), (2, 40)]
    assert list(plan.blocks) == expected


@pytest.mark.parametrize("lengths", [[50], [9, 9, 9, 9], [1]])
def test_one_length_copies_nothing(lengths, monkeypatch):
    plan = BlockPlan.of(lengths, CPU)
    assert plan.gather is None
    rows = draw(sum(lengths))
    seen = []

    def watched(query, key, value, **options):
        seen.extend([query, key, value])
        return scaled_dot_product_attention(query, key, value, **options)

    monkeypatch.setattr("burnish.models.kernels.attention.scaled_dot_product_attention", watched)
    plan.attend(rows, Softmax(1.0))
    assert [part.data_ptr() for part in seen] == [part.data_ptr() for part in rows]


def test_sequences_never_see_each_other():
    lengths = [7, 12, 3]
    rows = draw(22)
    changed = [part.detach().clone() for part in rows]
    for part in changed:
        part[7:19] = 100.0
    plan = BlockPlan.of(lengths, CPU)
    before, after = plan.attend(rows, Softmax(1.0)), plan.attend(changed, Softmax(1.0))
    assert torch.equal(before[:7], after[:7])
    assert torch.equal(before[19:], after[19:])


@pytest.mark.parametrize("lengths", [[12], [12, 12], [5, 40]])
def test_the_output_is_contiguous(lengths):
    """Models view it in another shape (AFMoE); one sequence behind a mask is a case of its own."""
    output = BlockPlan.of(lengths, CPU).attend(draw(sum(lengths)), Softmax(1.0, 4))
    assert output.is_contiguous()


def test_no_sequences():
    assert BlockPlan.of([], CPU).blocks == ()
    plan = BlockPlan.of([3, 0, 5], CPU)
    assert sum(count for count, _ in plan.blocks) == 2
