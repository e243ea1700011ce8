from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws
from torch.utils._python_dispatch import TorchDispatchMode

from burnish.models.logprobs import LogitTransform, LogprobOptions, token_logprobs

TRANSFORMS = [LogitTransform(), LogitTransform(softcap=3.0), LogitTransform(scale=0.25)]


def plain(hidden, weight, targets, options):
    """The definition, with the whole [N, V] in memory."""
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    logits = logits * options.transform.scale
    if (cap := options.transform.softcap) is not None:
        logits = cap * torch.tanh(logits / cap)
    logp = torch.log_softmax(logits / options.temperature, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def draw(rows, width=5, vocab=11, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_gradcheck(transform, chunk):
    hidden, weight, targets = draw(7)
    options = LogprobOptions(chunk, temperature=0.7, transform=transform)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets, options), (hidden, weight)
    )


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("used", ["both", "logprobs", "entropy"])
@draws(25)
@given(
    rows=st.integers(0, 9),
    chunk=st.integers(1, 10),
    temperature=st.floats(0.3, 2.0),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_the_definition(transform, used, rows, chunk, temperature, seed):
    options = LogprobOptions(chunk, temperature, transform)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(2, rows, generator=generator, dtype=torch.float64)
    upstream = upstream * (torch.rand(rows, generator=generator) < 0.6)
    # Those with a gradient, and one without.
    learned = upstream.any(dim=0).nonzero()[:, 0]
    if rows and upstream[:, -1].eq(0).all():
        learned = torch.cat([learned, torch.tensor([rows - 1])])
    results = []
    for function in (token_logprobs, partial(token_logprobs, learned=learned), plain):
        hidden, weight, targets = draw(rows, seed=seed)
        logprobs, entropy = function(hidden, weight, targets, options)
        parts = {"logprobs": logprobs @ upstream[0], "entropy": entropy @ upstream[1]}
        sum(parts.values() if used == "both" else [parts[used]]).backward()
        results.append((logprobs, entropy, hidden.grad, weight.grad))
    for ours, sparse, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(sparse, theirs, rtol=1e-9, atol=1e-10)


def test_bf16_is_summed_in_fp32():
    options = LogprobOptions(chunk=64)
    results = []
    for function in (token_logprobs, plain):
        hidden, weight, targets = draw(256, width=64, vocab=1000, dtype=torch.bfloat16)
        logprobs, entropy = function(hidden, weight, targets, options)
        assert logprobs.dtype == entropy.dtype == torch.float32
        (logprobs.sum() + entropy.sum()).backward()
        assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
        results.append((logprobs, entropy, hidden.grad.float(), weight.grad.float()))
    for name, ours, theirs in zip(("logp", "H", "dh", "dW"), *results, strict=True):
        bound = 1e-5 if name in ("logp", "H") else 2e-2
        assert (ours - theirs).norm() <= bound * theirs.norm(), name


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 0]), LogprobOptions(8))
    assert logprobs.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all()


def test_saved_tensors_are_left_alone():
    hidden, weight, targets = draw(6)
    before = hidden.detach().clone(), weight.detach().clone()
    logprobs, entropy = token_logprobs(hidden, weight, targets, LogprobOptions(4))
    (logprobs.sum() + entropy.sum()).backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(hidden, before[0])
    assert torch.equal(weight, before[1])
    assert torch.equal(hidden.grad, first[0])
    assert torch.equal(weight.grad, first[1])


def test_the_logits_of_a_whole_batch_never_exist():
    hidden, weight, targets = draw(400, width=8, vocab=5000, dtype=torch.float32)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, tuple | list) else [out]:
                if isinstance(value, torch.Tensor) and 5000 in value.shape:
                    largest = max(largest, value.numel())
            return out

    with Sizes():
        logprobs, entropy = token_logprobs(hidden, weight, targets, LogprobOptions(16))
        (logprobs.sum() + entropy.sum()).backward()
    assert 0 < largest <= 16 * 5000


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets = draw(6)
    weight.requires_grad_(False)
    logprobs, _ = token_logprobs(hidden, weight, targets, LogprobOptions(4))
    logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0
