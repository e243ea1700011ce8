from contextlib import nullcontext

import pytest
import torch
from devices import BF16_ATTENTION_ERROR, ROUNDED_FACTORS_ERROR
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.models.kernels import cpu_attention
from burnish.models.kernels.cpu_attention import causal_attention


def make(n, heads, length, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, length, heads, width, generator=generator)
    return rows.bfloat16().transpose(1, 2).requires_grad_()


def written_out(query, key, value, scaling, window):
    """The formula in fp64."""
    query, key, value = (part.detach().double().requires_grad_() for part in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    keys, values = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    steps = torch.arange(query.shape[2])
    distance = steps[:, None] - steps[None, :]
    hidden = (distance < 0) | (distance >= window)
    scores = (query @ keys.transpose(2, 3) * scaling).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ values, (query, key, value)


def gradients(output, parts):
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    (output * upstream.to(output.dtype)).sum().backward()
    return [part.grad for part in parts]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    length=st.integers(1, 300),
    window=st.integers(1, 320),
    scores=st.sampled_from([1 << 8, 1 << 14, 1 << 20]),
    width=st.sampled_from([6, 8]),
    units=st.booleans(),
)
def test_equals_the_formula(n, key_heads, shared, length, window, scores, width, units):
    """With and without torch's kernel forward, which takes values as wide as keys, and no windows."""
    query = make(n, key_heads * shared, length, 8)
    key, value = make(n, key_heads, length, 8, seed=1), make(n, key_heads, length, width, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "has_matrix_units", lambda device: units)
        patch.setattr(cpu_attention, "_SCORES", scores)
        patch.setattr(cpu_attention, "_MOST_SCORES", 4 * scores)
        output = causal_attention(query, key, value, 0.4, window)
        ours = [output, *gradients(output, (query, key, value))]
    expected, parts = written_out(query, key, value, 0.4, window)
    theirs = [expected, *gradients(expected, parts)]
    assert all(each.dtype == torch.bfloat16 for each in ours)
    by_kernel = units and width == 8 and window >= length
    bounds = [ROUNDED_FACTORS_ERROR if by_kernel else BF16_ATTENTION_ERROR]
    bounds += [BF16_ATTENTION_ERROR] * 3
    for mine, exact, bound in zip(ours, theirs, bounds, strict=True):
        assert (mine.double() - exact).norm() <= bound * exact.norm() + 1e-6


def test_torch_finds_the_operators_right():
    parts = (make(2, 4, 40, 8), make(2, 2, 40, 8), make(2, 2, 40, 8))
    torch.library.opcheck(causal_attention, (*parts, 0.4, 40))


def test_scores_are_bounded_and_every_pair_is_covered_once():
    for shape, window in (
        ((2, 3, 3, 5000, 8), 5000),
        ((1, 1, 1, 9, 8), 4),
        ((2, 2, 2, 700, 8), 130),
    ):
        n, key_heads, shared, length, _ = shape
        most = max(cpu_attention._SCORES, cpu_attention._MOST_SCORES)
        pairs = 0
        for span in cpu_attention._spans(torch.Size(shape), window):
            at_a_time = [range(n * key_heads)[some] for some in span.groups]
            assert [head for some in at_a_time for head in some] == list(range(n * key_heads))
            positions = len(range(length)[span.asking])
            keys = len(range(length)[span.seen])
            assert max(map(len, at_a_time)) * shared * positions * keys <= most
            clear = positions * (keys - span.bias.shape[1])
            pairs += clear + int((span.bias == 0).sum())
        assert pairs == sum(min(at + 1, window) for at in range(length))


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
