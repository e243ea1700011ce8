import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models.tiny import FAMILIES, tiny_config
from support.nightly import draws
from torch import nn

from burnish.families import family_of
from burnish.models.kernels import fused
from burnish.models.kernels.fused import (
    FusedAttention,
    FusedRMSNorm,
    norm_rotate,
    rms_norm,
    rotate,
    rotation_of,
)
from burnish.models.meta_init import build_on_meta


def plain_norm(x, weight, epsilon):
    return weight * x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()


def plain_rotation(heads, cos, sin):
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[0, :, None] + torch.cat((-second, first), dim=-1) * sin[0, :, None]


def angles(tokens, width):
    phase = torch.rand(1, tokens, width // 2, dtype=torch.float64).repeat(1, 1, 2) * 6
    return phase.cos(), phase.sin()


def gradients(function, inputs, upstream):
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    output = function(*leaves)
    output.backward(upstream.to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def assert_near(found, wanted, tolerance):
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm() + 1e-12


@draws(30)
@given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 3),
    width=st.sampled_from([4, 8, 32]),
    block=st.sampled_from([1, 50, 1 << 17]),
    dtype=st.sampled_from([(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]),
)
def test_values_and_gradients_equal_the_formulas(tokens, heads, width, block, dtype):
    kind, tolerance = dtype
    torch.manual_seed(tokens)
    x, upstream = (torch.randn(tokens, heads, width).to(kind).double() for _ in range(2))
    weight = (1 + torch.rand(width)).to(kind).double()
    cos, sin = angles(tokens, width)
    rotation = rotation_of(cos, sin)
    cases = (
        (lambda x, w: plain_norm(x, w, 1e-5), lambda x, w: rms_norm(x, w, 1e-5), (x, weight)),
        (lambda x: plain_rotation(x, cos, sin), lambda x: rotate(x, rotation), (x,)),
        (
            lambda x, w: plain_rotation(plain_norm(x, w, 1e-5), cos, sin),
            lambda x, w: norm_rotate(x, w, 1e-5, rotation),
            (x, weight),
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_CPU_BLOCK_ELEMENTS", block)
        for plain, ours, inputs in cases:
            wanted = gradients(plain, inputs, upstream)
            found = gradients(ours, [value.to(kind) for value in inputs], upstream)
            assert all(value.dtype == kind for value in found)
            assert_near(found, wanted, tolerance)
            with torch.no_grad():
                assert_near([ours(*(v.to(kind) for v in inputs))], wanted[:1], tolerance)
        patch.setattr(torch.compiler, "is_compiling", lambda: True)  # what a compiler is given
        for plain, ours, inputs in cases:
            wanted = gradients(plain, inputs, upstream)
            found = gradients(ours, [value.to(kind) for value in inputs], upstream)
            assert_near(found, wanted, tolerance)


def test_only_what_needs_a_gradient_is_kept():
    """The norm keeps its input, its weight and one number per row: no copies in fp32."""
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-6)
    assert sum(t.nbytes for t in kept) == x.nbytes + weight.nbytes + 64 * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_known_families_get_the_layers_and_keep_their_parameters(family):
    from transformers import AutoModelForCausalLM

    config = tiny_config(family)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    model = build_on_meta(config)
    assert [(n, p.shape) for n, p in sorted(model.named_parameters())] == [
        (n, p.shape) for n, p in sorted(plain.named_parameters())
    ]
    kinds = {type(module) for module in model.modules()}
    assert ({FusedAttention, FusedRMSNorm} <= kinds) == family_of(family).has_llama_layers
    assert ({FusedAttention, FusedRMSNorm} & kinds == set()) != family_of(family).has_llama_layers


def test_partial_rotations_keep_their_attention():
    config = tiny_config(
        "llama",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    )
    model = build_on_meta(config)
    rotated = 2 * model.base_model.rotary_emb.inv_freq.numel()
    whole = rotated == model.base_model.layers[0].self_attn.head_dim
    assert any(isinstance(m, FusedAttention) for m in model.modules()) == whole
    assert any(isinstance(m, FusedRMSNorm) for m in model.modules())
