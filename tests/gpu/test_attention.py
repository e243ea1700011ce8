"""Packed attention on one device: the variable-length kernel of a GPU, the blocks everywhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.models.tiny import FAMILIES, MIXTURES, VOCAB, tiny_model
from support.ranks.devices import DEVICES
from torch import Tensor, nn

from burnish.models.kernels.attention import (
    IMPLEMENTATION,
    PackedLayout,
    Softmax,
    has_varlen_kernel,
)
from burnish.models.packing import PrefixTree
from burnish.records import plan_on_device

LENGTHS = (5, 64, 1, 30, 64, 100)


class Layer(nn.Module):
    is_causal = True
    layer_idx = 0


def last_states(
    family: str, attention: str, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The last hidden states of sequences of LENGTHS, and a gradient through them; fp32 on the CPU."""
    model = tiny_model(family, attention=attention).to(device, dtype)
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (sum(LENGTHS),), generator=draws).to(device)
    upstream = torch.randn(len(ids), 32, generator=draws).to(device, dtype)
    if attention == IMPLEMENTATION:
        positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
        packing = PackedLayout.of(LENGTHS, device)
        states = model.base_model(
            ids[None], position_ids=positions[None], packing=packing, use_cache=False
        ).last_hidden_state[0]
    else:
        parts = [model.base_model(part[None], use_cache=False) for part in ids.split(LENGTHS)]
        states = torch.cat([part.last_hidden_state[0] for part in parts])
    (states * upstream).sum().backward()
    gradient = model.base_model.layers[0].self_attn.k_proj.weight.grad
    return states.detach().float().cpu(), gradient.float().cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in MIXTURES])
def test_packed_models_are_as_near_to_fp32_as_plain_ones(family: str, device: torch.device) -> None:
    """A mixture of experts is left out: in bf16 a token near a tie goes to another expert."""
    exact = last_states(family, "sdpa", torch.float32, torch.device("cpu"))
    full = last_states(family, IMPLEMENTATION, torch.float32, device)
    ours = last_states(family, IMPLEMENTATION, torch.bfloat16, device)
    plain = last_states(family, "sdpa", torch.bfloat16, device)
    for value, in_fp32, mine, theirs in zip(exact, full, ours, plain, strict=True):
        assert (in_fp32 - value).norm() <= 1e-5 * value.norm()
        grain = (theirs - value).norm()
        assert grain > 1e-4 * value.norm(), "the plain model was not computed in bf16"
        assert (mine - value).norm() <= 2 * grain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_takes_the_kernel() -> None:
    if torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernel needs compute capability 8.0")
    query = torch.zeros(1, 2, 5, 32, device="cuda")
    half = query.bfloat16()
    assert has_varlen_kernel(half, half)
    assert not has_varlen_kernel(half, half[..., :16])
    assert not has_varlen_kernel(query, query)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 1, 9, 500])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("sinks", "softcap"), [(False, None), (True, None), (True, 2.0)])
def test_half_precision_equals_blocks_in_fp32(
    window: int | None, kv_heads: int, sinks: bool, softcap: float | None, device: torch.device
) -> None:
    layout = PackedLayout.of([5, 64, 1, 130, 64], device)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        draws = torch.Generator().manual_seed(0)
        parts = [
            torch.randn(1, heads, 264, 32, generator=draws)
            .bfloat16()
            .to(device, dtype)
            .requires_grad_()
            for heads in (4, kv_heads, kv_heads)
        ]
        if sinks:
            parts.append(torch.randn(4, generator=draws).to(device, dtype).requires_grad_())
        output = layout.attend(0, parts[:3], Softmax(0.2, window, softcap, *parts[3:]))
        upstream = torch.randn(output.shape, generator=draws).bfloat16().to(device, dtype)
        (output * upstream).sum().backward()
        results.append([output, *(part.grad for part in parts)])
    for half, exact in zip(*results, strict=True):
        # With a window of 1 the gradient of scores is 0, and in fp32 its rounding alone is left.
        assert (half.float() - exact).norm() <= 1e-2 * exact.norm() + 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 9, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
def test_shared_rows_equal_whole_sequences(
    window: int | None, dtype: torch.dtype, sinks: bool, device: torch.device
) -> None:
    """Three samples of a prompt, one of which is the beginning of another, beside a sequence of its own."""
    ids = np.arange(1000)
    prompt, answer = ids[:60], ids[100:170]
    sequences = [[*prompt, *answer], [*prompt, *answer[:3]], ids[500:533], [*prompt, 7, 8]]
    lengths = [len(each) for each in sequences]
    tree = PrefixTree.of(np.concatenate(sequences), lengths)
    assert tree.own == (130, 0, 33, 2)
    shared = plan_on_device(PackedLayout.of_tree(tree, lengths, device), device)
    whole = PackedLayout.of(lengths, device)
    rows, computed = (torch.from_numpy(each).to(device) for each in (tree.rows, tree.computed))
    draws = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, heads, len(computed), 32, generator=draws) for heads in (4, 2, 2)]
    upstream = torch.randn(1, len(computed), 4, 32, generator=draws).to(device, dtype)
    weights = [torch.randn(4, generator=draws).to(device, dtype)] if sinks else []
    how = Softmax(0.2, window, None, *weights)
    results = []
    for layout in (shared, whole):
        own = [part.to(device, dtype, copy=True).requires_grad_() for part in parts]
        if layout is whole:
            output = layout.attend(0, [part[:, :, rows] for part in own], how)[:, computed]
        else:
            output = layout.attend(0, own, how)
        (output * upstream).sum().backward()
        results.append([output, *(part.grad for part in own)])
    for ours, exact in zip(*results, strict=True):
        bound = 1e-5 if dtype == torch.float32 else 1e-2
        assert (ours - exact).float().norm() <= bound * exact.float().norm()
