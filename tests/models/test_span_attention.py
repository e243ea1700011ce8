from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws
from support.ranks.devices import BF16_ATTENTION_ERROR, CPU, ROUNDED_FACTORS_ERROR

from burnish.models.kernels import span_attention
from burnish.models.kernels.span_attention import causal_attention


def make(n, heads, length, width, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, length, heads, width, generator=generator)
    return rows.to(dtype).transpose(1, 2).requires_grad_()


def written_out(parts, scaling, window, softcap):
    """The formula in fp64, of queries, keys, values, and sinks if there are any."""
    parts = [part.detach().double().requires_grad_() for part in parts]
    query, key, value, *sinks = parts
    shared = query.shape[1] // key.shape[1]
    keys, values = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    steps = torch.arange(keys.shape[2])
    distance = steps[-query.shape[2] :, None] - steps[None, :]
    hidden = (distance < 0) | (distance >= window)
    scores = query @ keys.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks:
        more = sinks[0][:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, more), -1).softmax(-1)[..., :-1] @ values, parts
    return scores.softmax(-1) @ values, parts


def gradients(output, parts):
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    (output * upstream.to(output.dtype)).sum().backward()
    return [part.grad for part in parts]


@draws(80, deadline=None)
@given(
    n=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    length=st.integers(1, 300),
    begun=st.sampled_from([0, 0, 1, 130]),
    window=st.integers(1, 320),
    scores=st.sampled_from([1 << 8, 1 << 14, 1 << 20]),
    width=st.sampled_from([6, 8]),
    units=st.booleans(),
    softcap=st.sampled_from([None, 0.7]),
    has_sinks=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_equals_the_formula(
    n, key_heads, shared, length, begun, window, scores, width, units, softcap, has_sinks, dtype
):
    """With and without torch's kernel forward, which takes values as wide as keys, no windows, sinks or caps."""
    parts = [
        make(n, key_heads * shared, length, 8, dtype=dtype),
        make(n, key_heads, begun + length, 8, seed=1, dtype=dtype),
        make(n, key_heads, begun + length, width, seed=2, dtype=dtype),
        *([make(1, 1, key_heads * shared, 1, 3, dtype).detach().flatten()] if has_sinks else []),
    ]
    parts = [part.requires_grad_() for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_attention, "has_matrix_units", lambda device: units)
        patch.setattr(span_attention, "_SCORES", scores)
        patch.setattr(span_attention, "_MOST_SCORES", 4 * scores)
        output = causal_attention(*parts[:3], 0.4, window, softcap, *parts[3:])
        ours = [output, *gradients(output, parts)]
    expected, exactly = written_out(parts, 0.4, window, softcap)
    theirs = [expected, *gradients(expected, exactly)]
    assert all(each.dtype == dtype for each in ours)
    plain = window >= begun + length and softcap is None and not has_sinks
    by_kernel = units and width == 8 and plain
    bounds = [ROUNDED_FACTORS_ERROR if by_kernel else BF16_ATTENTION_ERROR]
    bounds += [BF16_ATTENTION_ERROR] * 4
    for part, (mine, exact, bound) in enumerate(zip(ours, theirs, bounds, strict=False)):
        bound = bound if dtype == torch.bfloat16 else 1e-5
        size = max(exact.norm(), part == 4)  # what queries add to a sink's gradient may cancel
        assert (mine.double() - exact).norm() <= bound * size + 1e-6


def test_torch_finds_the_operators_right():
    parts = (make(2, 4, 40, 8), make(2, 2, 40, 8), make(2, 2, 40, 8))
    torch.library.opcheck(causal_attention, (*parts, 0.4, 40))
    torch.library.opcheck(causal_attention, (make(2, 4, 30, 8), *parts[1:], 0.4, 40))
    torch.library.opcheck(
        causal_attention, (*parts, 0.4, 40, 2.0, torch.ones(4, requires_grad=True))
    )


def test_scores_are_bounded_and_every_pair_is_covered_once():
    for shape, begun, window in (
        ((2, 3, 3, 5000, 8), 0, 5000),
        ((1, 1, 1, 9, 8), 0, 4),
        ((2, 2, 2, 700, 8), 0, 130),
        ((2, 2, 2, 700, 8), 900, 130),
        ((2, 2, 2, 700, 8), 900, 1600),
    ):
        n, key_heads, shared, asked, _ = shape
        length = begun + asked
        most = max(span_attention._SCORES, span_attention._MOST_SCORES)
        pairs = 0
        for span in span_attention._spans(torch.Size(shape), length, window, CPU):
            at_a_time = [range(n * key_heads)[some] for some in span.groups]
            assert [head for some in at_a_time for head in some] == list(range(n * key_heads))
            positions = len(range(asked)[span.asking])
            keys = len(range(length)[span.seen])
            assert max(map(len, at_a_time)) * shared * positions * keys <= most
            clear = positions * (keys - span.bias.shape[1])
            pairs += clear + int((span.bias == 0).sum())
        assert pairs == sum(min(at + 1, window) for at in range(begun, length))


@pytest.mark.parametrize("broken", [False, True])
def test_the_setting_of_products_is_as_it_was(broken, monkeypatch):
    setting, multiply, within = torch.backends.mkldnn.matmul, torch.bmm, []

    def watched(*factors, **options):
        within.append(setting.fp32_precision)
        if broken:
            raise RuntimeError("out of memory")
        return multiply(*factors, **options)

    monkeypatch.setattr(torch, "bmm", watched)
    before = setting.fp32_precision
    parts = [make(1, 1, 5, 8, seed) for seed in range(3)]
    with pytest.raises(RuntimeError, match="out of memory") if broken else nullcontext():
        causal_attention(*parts, 1.0, 5).sum().backward()
    assert set(within) == {"bf16"} != {before}
    assert setting.fp32_precision == before
