import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws
from support.ranks.devices import BF16_ATTENTION_ERROR, CPU
from torch.nn.functional import scaled_dot_product_attention

from burnish.models.kernels.attention import BlockPlan, Softmax

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def one_by_one(query, key, value, lengths, scaling, window, own=None):
    """Each sequence alone, with a mask that is written out."""
    outputs = []
    cut = query.split(own or lengths), key.split(lengths), value.split(lengths)
    for q, k, v in zip(*cut, strict=True):
        steps = torch.arange(len(k))
        distance = steps[len(k) - len(q) :, None] - steps[None, :]
        mask = (distance >= 0) & (distance < (window or len(k)))
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (k, v))
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(~mask, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def draw(total, seed=0, asked=None):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, heads, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for rows, heads in ((asked or total, HEADS), (total, KV_HEADS), (total, KV_HEADS))
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


@draws(60)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([0, 3, 50])), min_size=1, max_size=9
    ),
    window=st.none() | st.integers(1, 80),
    dtype=st.sampled_from([torch.float64, torch.bfloat16]),
)
def test_last_queries_equal_each_sequence_alone(lengths, window, dtype):
    own, whole = [asked for asked, _ in lengths], [sum(each) for each in lengths]
    results = []
    for blocks in (True, False):
        rows = draw(sum(whole), asked=sum(own))
        if blocks:
            given_rows = [part.to(dtype) for part in rows]
            output = BlockPlan.of(whole, CPU, own).attend(given_rows, Softmax(0.4, window))
        else:
            output = one_by_one(*rows, whole, 0.4, window, own)
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        (output * upstream).sum().backward()
        results.append((output.double(), *(part.grad for part in rows)))
    for ours, theirs in zip(*results, strict=True):
        bound = 1e-9 if dtype == torch.float64 else 0.02
        assert (ours - theirs).norm() <= bound * theirs.norm() + bound / 10


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
    plan = BlockPlan.of(lengths, CPU).queries
    assert sum(count for count, _ in plan.sizes) == len(lengths)
    heights = [height for _, height in plan.sizes]
    assert heights == sorted(set(heights), reverse=True)
    assert set(heights) <= set(lengths)
    if plan.gather is None:
        assert lengths == sorted(lengths, reverse=True)
        assert sum(count * height for count, height in plan.sizes) == sum(lengths)
        return
    gather, scatter = plan.gather, plan.scatter
    assert len(gather) == sum(count * height for count, height in plan.sizes)
    assert torch.equal(gather[scatter], torch.arange(sum(lengths)))
    padding = plan.padding if plan.padding is not None else scatter[:0]
    assert torch.equal(torch.cat((scatter, padding)).sort().values, torch.arange(len(gather)))
    assert len(padding) <= sum(max(15, length // 8) for length in lengths)


@pytest.mark.parametrize("lengths", [[90, 85, 96, 81], [40, 200, 33]])
def test_like_lengths_share_a_block(lengths):
    plan = BlockPlan.of(lengths, CPU)
    expected = [(4, 96)] if len(lengths) == 4 else [(1, 200), (2, 40)]
    assert list(plan.queries.sizes) == expected


def test_samples_with_one_beginning_share_a_block():
    plan = BlockPlan.of([40, 35, 33, 90, 37], CPU, [40, 5, 3, 90, 7])
    assert plan.queries.sizes == ((1, 90), (1, 40), (3, 7))
    assert plan.keys.sizes == ((1, 90), (1, 40), (3, 37))


@pytest.mark.parametrize("lengths", [[50], [9, 9, 9, 9], [1]])
def test_one_length_copies_nothing(lengths, monkeypatch):
    plan = BlockPlan.of(lengths, CPU)
    assert plan.queries.gather is None
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
    assert BlockPlan.of([], CPU).queries.sizes == ()
    plan = BlockPlan.of([3, 0, 5], CPU)
    assert sum(count for count, _ in plan.queries.sizes) == 2
